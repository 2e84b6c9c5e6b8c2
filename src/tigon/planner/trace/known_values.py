"""A dispatch mode that computes integers while a trace runs, for models that read the values of their inputs.

A vision-language model reads how many images a row has, where their tokens are and how large they are. Fake tensors
hold no values, so such a model could not be traced. This mode computes every operator whose inputs all hold values, and
leaves the rest to the fake tensors: weights, pixels and all that follows from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tigon.planner.trace.dispatch_recorder import TraceRecorder

if TYPE_CHECKING:
    from torch._ops import OpOverload

aten = torch.ops.aten
_CONSTANTS = frozenset(
    f"aten::{name}" for name in ("arange", "full", "ones", "zeros", "scalar_tensor", "linspace", "eye")
)
_COMPARISONS = frozenset(f"aten::{name}" for name in ("ne", "eq", "gt", "ge", "lt", "le"))
_MOST = 1 << 20
"""The most elements of a comparison that becomes a tensor with values."""


class KnownValues(TorchDispatchMode):
    """Give integers their values. The recorder still counts the memory of the tensors.

    A comparison of counts that follow from pixels is true: every image is a real one, and none of it is padding.
    """

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not is_fake and (tensors or name in _CONSTANTS):
            with _disable_current_modes():
                made = func(*args, **kwargs)
            if tensors or not made.is_floating_point():
                self._recorder.follow(made)
                return made
        elif name in _COMPARISONS and not args[0].is_floating_point() and args[0].numel() <= _MOST:
            with _disable_current_modes():
                made = torch.ones(func(*(_shape_of(arg) for arg in args)).shape, dtype=torch.bool)
            self._recorder.follow(made)
            return made
        elif func is aten.index.Tensor:
            args = (args[0], _as_numbers(args[1]))
        return func(*args, **kwargs)


def _shape_of(value: object) -> object:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _as_numbers(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The indices with numbers in place of masks, whose results would have a shape that fake tensors do not know."""
    numbers: list[Tensor | None] = []
    for index in indices:
        if isinstance(index, Tensor) and not isinstance(index, FakeTensor) and index.dtype == torch.bool:
            with _disable_current_modes():
                numbers += index.nonzero(as_tuple=True)
        else:
            numbers.append(index)
    return numbers
