"""The seams for causal attention with sinks, such as GPT-OSS's, that transformers computes by its eager function.

That function holds (heads, T, T) scores, and sdpa lacks sinks. Two seams together replace it:

- `CausalMaskSeam`, on the module that makes the masks. It returns a `CausalRows` instead of a (T, T) tensor if the mask
  says only that tokens see earlier ones, and perhaps a window. The layers pass it on.
- `SinksAttentionSeam`, on each attention. It runs the op if it gets a `CausalRows`. Every other mask runs the family's
  own function: padding at the left, a cache that holds tokens, and masks of the caller.

Either both are put into a model or none, because no other attention understands a `CausalRows`.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tigon import ops
from tigon.models.kv_cache import CACHE_ARGUMENTS, cache_in
from tigon.models.seams.base import Seam, is_dtensor
from tigon.models.seams.mask import MaskSeam, choose_by_positions, makes_consecutive_positions, without_positions
from tigon.models.seams.rebind import Forward, owner_of, rebind, rebind_each
from tigon.models.verification import probe

if TYPE_CHECKING:
    from transformers import Cache

# B batch, h query heads, k key heads, T tokens, D head width.

FLAG, OP = "attention_sinks", "attention_with_sinks"
EAGER = "eager"
_FUNCTION = "eager_attention_forward"
_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
_WINDOW = 3
"""The probe's window: fewer tokens than its rows have."""


class CausalRows:
    """Takes the place of a mask: tokens see earlier tokens of their document, or of the row if it is one document.

    It is not a dataclass, because FSDP2's mixed precision hands copies of those to the model.
    """

    def __init__(self, cu_seqlens: Tensor | None = None, max_length: int | None = None) -> None:
        self.cu_seqlens, self.max_length = cu_seqlens, max_length

    @classmethod
    def of_positions(cls, positions_BT: Tensor) -> CausalRows:
        """The documents of rows whose positions begin anew at each document. It waits for the device once."""
        begins_BT = positions_BT.diff(dim=1, prepend=positions_BT[:, :1]) != 1
        begins_BT[:, 0] = True
        starts = begins_BT.flatten().nonzero().flatten().tolist()
        if len(starts) == len(positions_BT):
            return cls()
        places = [*starts, positions_BT.numel()]
        lengths = [end - start for start, end in itertools.pairwise(places)]
        return cls(torch.tensor(places, dtype=torch.int32, device=positions_BT.device), max(lengths))

    def dense(self, query: Tensor, window: int | None) -> Tensor:
        """The mask (B or 1, 1, T, T) that transformers' eager functions add to the scores, for these queries."""
        B, _, T, _ = query.shape
        place = torch.arange(T, device=query.device)
        behind = place[:, None] - place
        sees = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        sees = sees[None, None]
        if self.cu_seqlens is not None:
            every = torch.arange(B * T, device=query.device, dtype=torch.int32)
            ends = self.cu_seqlens.to(query.device)[1:]
            document_BT = torch.bucketize(every, ends, right=True).view(B, T)
            sees = sees & (document_BT[:, None, :, None] == document_BT[:, None, None, :])
        mask = torch.zeros(sees.shape, dtype=query.dtype, device=query.device)
        return mask.masked_fill_(~sees, torch.finfo(query.dtype).min)


# --- attention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SinksAttentionSeam(Seam):
    """An attention with a parameter `sinks` whose forward falls back to the global `eager_attention_forward`."""

    op: ClassVar[str] = OP
    flag: ClassVar[str] = FLAG

    def candidate(self, module: nn.Module) -> bool:
        sinks = getattr(module, "sinks", None)
        return isinstance(sinks, Tensor) and sinks.ndim == 1 and runs_eager_function(module)

    def code(self, module: nn.Module) -> Callable[..., Any]:
        return _eager_function(type(module))

    def objection(self, module: nn.Module) -> str | None:
        if not _hands_mask_on(type(module)):
            return "its forward reads or changes the mask, so it needs one"
        original = _eager_function(type(module))
        fused = functools.partial(attend, original)
        make = functools.partial(
            probe.make_stand_in, module, parameters={"sinks": (4,)}, attributes={"num_key_value_groups": 2}
        )
        for window in (None, _WINDOW):
            with_rows = functools.partial(_attended, fused, window, dense=False)
            with_mask = functools.partial(_attended, original, window, dense=True)
            reason = probe.disagreement(make, _probe_inputs, with_rows, with_mask)
            if reason is not None:
                return reason
        return None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        forward: Forward = base.forward
        owner = owner_of(forward, _FUNCTION)
        assert owner is not None, "not a candidate"
        replacement = functools.partial(attend, _eager_function(base))
        return {"forward": rebind(forward, owner, {_FUNCTION: replacement})}


def attend(
    original: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`original`, an eager attention function of transformers, or the op if the mask is a `CausalRows`."""
    options = {"scaling": scaling, "dropout": dropout, **options}
    if not isinstance(attention_mask, CausalRows):
        return original(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    window, sinks = options.get("sliding_window"), module.sinks
    wants_weights = options.get("output_attentions") or getattr(module.config, "output_attentions", False)
    if dropout or wants_weights or is_dtensor(query) or is_dtensor(sinks):
        mask = attention_mask.dense(query, window)
        return original(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    cu_seqlens = attention_mask.cu_seqlens
    out_BThD = ops.attention_with_sinks(
        query,
        key.to(query.dtype),
        value.to(query.dtype),
        sinks,
        scale=scaling,
        window=window,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(query.device),
        max_length=attention_mask.max_length,
    )
    return out_BThD, None


def runs_eager_function(module: nn.Module) -> bool:
    """Whether the module's forward falls back to a function of its modeling file, `eager_attention_forward`."""
    return owner_of(type(module).forward, _FUNCTION) is not None


def _hands_mask_on(cls: type[nn.Module]) -> bool:
    """Whether the forward only passes `attention_mask` on. Sparse attention adds to it, and reads it elsewhere."""
    owner = owner_of(cls.forward, _FUNCTION)
    uses = [] if owner is None else list(_uses(owner, "attention_mask"))
    return len(uses) == 1 and "STORE" not in uses[0]


def _uses(function: FunctionType, name: str) -> Iterator[str]:
    """The instructions that read or write a local variable. Python 3.13 has some that do it to two."""
    for instruction in dis.get_instructions(function):
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if any(part in instruction.opname for part in ("FAST", "DEREF")):
            yield from [instruction.opname for each in names if each == name]


def _eager_function(cls: type[nn.Module]) -> Callable[..., Any]:
    owner = owner_of(cls.forward, _FUNCTION)
    assert owner is not None, "not a candidate"
    return owner.__globals__[_FUNCTION]  # type: ignore[no-any-return]


def _attended(
    function: Callable[..., Any], window: int | None, double: Any, q: Tensor, k: Tensor, v: Tensor, *, dense: bool
) -> Tensor:
    """The output of an attention function of transformers on a stand-in."""
    mask = CausalRows().dense(q, window) if dense else CausalRows()
    options = {"scaling": 0.5, "dropout": 0.0, "sliding_window": window, "s_aux": double.sinks}
    return function(double, q, k, v, mask, **options)[0]  # type: ignore[no-any-return]


def _probe_inputs() -> tuple[Tensor, ...]:
    """q (2, 4, 5, WIDTH), k and v (2, 2, 5, WIDTH)."""
    shapes = ((2, 4, 5, probe.WIDTH), (2, 2, 5, probe.WIDTH), (2, 2, 5, probe.WIDTH))
    return tuple(probe.random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes, start=30))


# --- masks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CausalMaskSeam(Seam):
    """The module that calls transformers' functions for causal masks, above all attention modules of a model."""

    op: ClassVar[str] = OP
    flag: ClassVar[str] = FLAG

    def candidate(self, module: nn.Module) -> bool:
        return any(_mask_functions(_without_mask_seam(type(module))))

    def objection(self, module: nn.Module) -> str | None:
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if implementation != EAGER:
            return f"its attention is {implementation}; only eager attention is replaced"
        for path, inner in module.named_modules():
            if runs_eager_function(inner) and not SinksAttentionSeam().candidate(inner):
                return f"{path} has eager attention without sinks"
        return None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        original: Forward = _without_mask_seam(base).forward
        functions = _mask_functions(_without_mask_seam(base))
        runs = {name: functools.partial(mask_or_rows, function) for name, function in functions.items()}
        forward = rebind_each(original, runs)
        if makes_consecutive_positions(original):
            known = {name: without_positions(function, runs[name]) for name, function in functions.items()}
            forward = choose_by_positions(original, forward, rebind_each(original, known), compiles_known=True)
        return {"forward": forward, "_tigon_causal_rows": staticmethod(CausalRows.of_positions)}


def _without_mask_seam(cls: type[nn.Module]) -> type[nn.Module]:
    """The class below an earlier patch's `MaskSeam`, whose forward holds the model's twice."""
    while isinstance(vars(cls).get("_tigon_seam"), MaskSeam):
        cls = cls._tigon_base  # type: ignore[attr-defined]
    return cls


def _mask_functions(cls: type[nn.Module]) -> dict[str, FunctionType]:
    """Name and value of transformers' mask functions that the class's forward calls."""
    owners = {name: owner_of(cls.forward, name) for name in _MASKS}
    return {name: owner.__globals__[name] for name, owner in owners.items() if owner is not None}


def mask_or_rows(original: Callable[..., Any], *args: object, **options: object) -> Any:
    """`original`, a mask function of transformers, or a `CausalRows` if that says the same."""
    try:
        given = dict(inspect.signature(original).bind(*args, **options).arguments)
    except TypeError:
        return original(*args, **options)
    cache = cache_in(given)
    rows = _rows_of(cache, {name: value for name, value in given.items() if name not in CACHE_ARGUMENTS})
    return original(*args, **options) if rows is None else rows


def _rows_of(cache: Cache | None, given: dict[str, Any]) -> CausalRows | None:
    """Returns the mask of these arguments as a `CausalRows`, or None if it says more than that."""
    config, embeddings = given.pop("config"), given.pop("inputs_embeds", None)
    padding_BT, positions = given.pop("attention_mask"), given.pop("position_ids", None)
    given.pop("cache_position", None)  # transformers before 5.17 takes it and ignores it
    if embeddings is None or any(value is not None for value in given.values()):
        return None
    if config._attn_implementation != EAGER or not getattr(config, "is_causal", True) or not _is_empty(cache):
        return None
    B, T = embeddings.shape[:2]
    if padding_BT is not None:
        return CausalRows() if _pads_right(padding_BT, B, T) else None
    if positions is None or torch.compiler.is_compiling():
        return CausalRows() if positions is None else None
    if cache is not None or isinstance(positions, FakeTensor):  # transformers reads no documents with a cache
        return CausalRows()
    return CausalRows.of_positions(positions.expand(B, T)) if positions.shape in ((1, T), (B, T)) else None


def _is_empty(cache: Cache | None) -> bool:
    """Whether there is no cache, or a growing one that holds nothing. Others are longer than the tokens in them."""
    return cache is None or (type(cache).__name__ == "DynamicCache" and cache.get_seq_length() == 0)


def _pads_right(padding_BT: Any, B: int, T: int) -> bool:
    """Whether padding follows the tokens of each row, which then do not see it. It waits for the device once.

    The planner's tensors lack values, and the trainer pads rows at the right.
    """
    if not isinstance(padding_BT, Tensor) or padding_BT.shape != (B, T) or torch.compiler.is_compiling():
        return False
    return isinstance(padding_BT, FakeTensor) or not bool((padding_BT[:, 1:] > padding_BT[:, :-1]).any())
