"""Results of operators on fake tensors, remembered by the operators' arguments.

A search traces the same layers many times, and most of a trace's time is spent on finding the shape of each result.
PyTorch's fake mode has a cache for that. It makes its key from forty attributes of each tensor, checks twenty
conditions, and leaves out the operators of other libraries. This cache serves strided tensors of one fake mode alone,
and asks the fake mode for everything else. `tests/planner/test_operator_cache.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

if TYPE_CHECKING:
    from torch._ops import OpOverload

_FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_UNKNOWN_RESULTS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})
_MAX_ENTRIES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Result:
    """One result of an operator: one of its arguments, a view of an argument, a new tensor, or a dtype."""

    same_as: int | None = None
    """Place of the argument that the operator returns."""
    view_of: int | None = None
    """Place of the argument whose memory the result shares; None for a new tensor."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    """The dtype of the tensor, or the result itself if `constant`."""
    device: torch.device | None = None
    constant: bool = False


@dataclass(frozen=True, slots=True)
class _Entry:
    results: tuple[_Result, ...]
    container: type | None
    """tuple or list; None for an operator with one result."""


class _Uncached(Exception):
    """A call whose result this cache does not know how to make again."""


_entries: dict[Hashable, _Entry | None] = {}
"""A call's key -> its results; None if the fake mode must be asked each time."""


def call(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`func(*args, **kwargs)` under the active fake mode. Without a fake mode it is an ordinary call."""
    mode = torch._C._get_dispatch_mode(_FAKE_MODE)
    if mode is None or mode.shape_env is not None or torch.is_inference_mode_enabled():
        return func(*args, **kwargs)
    try:
        key = _key(func, args, kwargs, mode)
    except _Uncached:
        return func(*args, **kwargs)
    entry = _entries.get(key, _entries)
    if entry is None:
        return func(*args, **kwargs)
    if isinstance(entry, _Entry):
        return _made_again(entry, args, mode)
    result = func(*args, **kwargs)
    while len(_entries) >= _MAX_ENTRIES:
        del _entries[next(iter(_entries))]
    _entries[key] = _remembered(func, args, kwargs, mode, key, result)
    return result


def _key(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> Hashable:
    parts: list[Any] = [func, torch.get_default_dtype()]
    _add(parts, args, mode)
    for name, value in kwargs.items():
        parts.append(name)
        _add(parts, (value,), mode)
    return tuple(parts)


def _add(parts: list[Any], values: Sequence[Any], mode: FakeTensorMode) -> None:
    """Add `values` to a key. Raises _Uncached for a value of another kind than an operator's usual arguments."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not mode or value.constant is not None or value.layout is not torch.strided:
                raise _Uncached
            dtype = value.dtype
            if dtype.is_complex:
                raise _Uncached
            parts.append(dtype)
            parts.append(value.shape)
            parts.append(value.stride())
            parts.append(value.storage_offset())
            parts.append(value.fake_device)
        elif kind in _PLAIN:
            # 1, 1.0 and True are equal, but give results of different dtypes
            parts.append(kind)
            parts.append(value)
        elif kind is list or kind is tuple:
            parts.append(len(value))
            _add(parts, value, mode)
        else:
            raise _Uncached


def _remembered(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    key: Hashable,
    result: Any,
) -> _Entry | None:
    if not _UNKNOWN_RESULTS.isdisjoint(func.tags):
        return None
    container = type(result) if isinstance(result, (tuple, list)) else None
    results = result if container else (result,)
    try:
        if _key(func, args, kwargs, mode) != key:  # the operator changed the shape of an argument
            return None
        made = tuple(_described(one, args, mode) for one in results)
    except _Uncached:
        return None
    storages = [one.untyped_storage()._cdata for one, how in zip(results, made, strict=True) if _is_new(how)]
    return _Entry(made, container) if len(set(storages)) == len(storages) else None


def _is_new(result: _Result) -> bool:
    return result.same_as is None and result.view_of is None and not result.constant


def _described(result: Any, args: Sequence[Any], mode: FakeTensorMode) -> _Result:
    if result is None or isinstance(result, torch.dtype):
        return _Result(dtype=result, constant=True)
    for place, arg in enumerate(args):
        if arg is result:
            return _Result(same_as=place)
    _add([], (result,), mode)
    if type(result) is not FakeTensor or result.requires_grad:
        raise _Uncached
    shape, stride, offset = tuple(result.shape), result.stride(), int(result.storage_offset())
    storage = result.untyped_storage()
    owners = [
        place
        for place, arg in enumerate(args)
        if isinstance(arg, Tensor) and arg.untyped_storage()._cdata == storage._cdata
    ]
    if not owners and (offset or storage.nbytes() != _dense_bytes(shape, stride, result.itemsize)):
        raise _Uncached
    if owners and args[owners[0]].dtype != result.dtype:  # view(dtype)
        raise _Uncached
    return _Result(
        view_of=owners[0] if owners else None,
        shape=shape,
        stride=stride,
        offset=offset,
        dtype=result.dtype,
        device=result.fake_device,
    )


def _dense_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes of the storage of torch.empty_strided(shape, stride)."""
    if 0 in shape:
        return 0
    return int(itemsize * (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))))


def _made_again(entry: _Entry, args: Sequence[Any], mode: FakeTensorMode) -> Any:
    if entry.container is None:
        return _result(entry.results[0], args, mode)
    return entry.container(_result(one, args, mode) for one in entry.results)


def _result(result: _Result, args: Sequence[Any], mode: FakeTensorMode) -> Any:
    if result.constant:
        return result.dtype
    if result.same_as is not None:
        return args[result.same_as]
    with in_kernel_invocation_manager(mode):
        if result.view_of is not None:
            memory = torch.as_strided(args[result.view_of], result.shape, result.stride, result.offset)
        else:
            memory = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
    return FakeTensor(mode, memory, result.device)
