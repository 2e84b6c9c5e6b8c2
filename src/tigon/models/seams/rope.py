"""The seam for rotary embedding: an attention whose forward calls a global function of its modeling module.

The function is not a method, so the attention's forward is rebuilt with globals in which the function is tigon's
(`rebind.py`). Its results on random tables are compared with each style to find out which pairs it rotates.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.models.seams.base import Seam, is_dtensor
from tigon.models.seams.rebind import Forward, inner_functions, names_of, owner_of, rebind
from tigon.models.verification import probe

# B batch, H heads, T tokens, D head width, R rotary width.

_ROTARY_NAME = re.compile(r"^apply_\w*(rotary|rope)\w*$")


def _half_split(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    return ops.rope(q, k, cos, sin, unsqueeze_dim=heads_dim)


def _interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    return ops.rope(q, k, cos, sin, interleaved=True, unsqueeze_dim=heads_dim)


def _half_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    """Half-split pairs; each angle is in the table once."""
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return ops.rope(q, k, cos, sin, unsqueeze_dim=heads_dim)


def _pairs(table: Tensor) -> Tensor:
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


def _interleaved_from_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    """Interleaved pairs, tables in the half-split order."""
    return ops.rope(q, k, _pairs(cos), _pairs(sin), interleaved=True, unsqueeze_dim=heads_dim)


def _pairs_to_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    """Interleaved pairs in, halves out with the even columns first, as in DeepSeek."""
    half = cos.shape[-1] // 2
    cos, sin = (torch.cat((t[..., :half], t[..., :half]), -1) for t in (cos, sin))
    q, k = (torch.cat((x[..., 0::2], x[..., 1::2]), -1) for x in (q, k))
    return ops.rope(q, k, cos, sin, unsqueeze_dim=heads_dim)


def _pairs_to_halves_whole_tables(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int
) -> tuple[Tensor, Tensor]:
    """As `_pairs_to_halves`, with both halves of the tables, as in DeepSeek up to transformers 5.10."""
    q, k = (torch.cat((x[..., 0::2], x[..., 1::2]), -1) for x in (q, k))
    return ops.rope(q, k, cos, sin, unsqueeze_dim=heads_dim)


def _interleaved_half_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
    """Interleaved pairs; each angle is in the table once. Tables of complex numbers are of this form."""
    cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return ops.rope(q, k, cos, sin, interleaved=True, unsqueeze_dim=heads_dim)


_Rotation = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
STYLES: Mapping[str, _Rotation] = MappingProxyType(
    {
        "half-split": _half_split,
        "interleaved": _interleaved,
        "half-tables": _half_tables,
        "interleaved-from-halves": _interleaved_from_halves,
        "pairs-to-halves": _pairs_to_halves,
        "pairs-to-halves-whole-tables": _pairs_to_halves_whole_tables,
        "interleaved-half-tables": _interleaved_half_tables,
    }
)


@dataclass(frozen=True, kw_only=True)
class RopeSeam(Seam):
    """An attention module whose forward calls a global `apply_...rotary...(q, k, cos, sin, ...)`.

    One complex table, called `freqs_cis`, may take the place of cos and sin.
    """

    op: ClassVar[str] = "rope"
    flag: ClassVar[str] = "rope"

    styles: tuple[str, ...] = tuple(STYLES)
    """The styles that the family uses, out of `STYLES`."""

    def candidate(self, module: nn.Module) -> bool:
        return next(_rotary_functions(type(module)), None) is not None

    def code(self, module: nn.Module) -> Callable[..., Any]:
        return next(function for _, function in _rotary_functions(type(module)))

    def objection(self, module: nn.Module) -> str | None:
        matches = {name: _match(function, self.styles) for name, function in _rotary_functions(type(module))}
        return "; ".join(f"{name}: {match}" for name, match in matches.items() if isinstance(match, str)) or None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        forward: Forward = base.forward
        for name, function in list(_rotary_functions(base)):
            owner, match = owner_of(forward, name), _match(function, self.styles)
            assert owner is not None and not isinstance(match, str)  # objection() would have said so
            forward = rebind(forward, owner, {name: match})
        return {"forward": forward}


def _rotary_functions(cls: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """Name and value of every global rotary function that the class's forward calls."""
    for name in names_of(cls.forward):
        if _ROTARY_NAME.match(name):
            owner = owner_of(cls.forward, name)
            function = None if owner is None else _function_of(owner.__globals__[name])
            if function is not None:
                yield name, function


def _function_of(value: object) -> FunctionType | None:
    """The rotary function that a global of a modeling module stands for, or None.

    If the package kernels is installed, transformers puts the function into a module. Its forward calls the function
    until a kernel of the hub takes the place of that forward.
    """
    if isinstance(value, nn.Module) and "forward" not in vars(value):
        forward: Forward = type(value).forward
        value = next(inner_functions(forward), None) if isinstance(forward, FunctionType) else None
    return value if isinstance(value, FunctionType) else None


@functools.cache
def _match(function: FunctionType, styles: tuple[str, ...]) -> Callable[..., Any] | str:
    """The replacement for a rotary function of one of `styles`, or the reason why it fits none of them."""
    reasons = []
    for style in styles:
        reason = ""
        for replacement in _replacements(function, STYLES[style]):
            found = _disagreement(function, replacement)
            if found is None:
                return replacement
            reason = found
        reasons.append(reason if len(styles) == 1 else f"as {style}, {reason}")
    return reasons[0] if len(styles) == 1 else f"it is none of {', '.join(styles)} ({reasons[0]})"


def _replacements(original: FunctionType, rotation: _Rotation) -> list[Callable[..., Any]]:
    """Functions with the parameters of `original` that use `rotation`.

    The name of a complex table's parameter does not say where the heads are, so there are two.
    """
    if _takes_complex_table(original):
        return [_of_complex_table(original, rotation, heads_dim) for heads_dim in (1, 2)]
    return [_replacement(original, rotation)]


def _of_complex_table(original: FunctionType, rotation: _Rotation, heads_dim: int) -> Callable[..., Any]:
    def apply_rotary_emb(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        if is_dtensor(q) or freqs_cis.ndim != 3 or not freqs_cis.is_complex():
            return original(q, k, freqs_cis)  # type: ignore[no-any-return]
        table = freqs_cis.to(q.device)
        return rotation(q, k, table.real, table.imag, heads_dim)

    return apply_rotary_emb


def _takes_complex_table(function: FunctionType) -> bool:
    return list(inspect.signature(function).parameters)[2:] == ["freqs_cis"]


def _replacement(original: FunctionType, rotation: _Rotation) -> Callable[..., Any]:
    """A function with the parameters of `original` that uses `rotation`."""
    parameters = list(inspect.signature(original).parameters.values())
    names = [p.name for p in parameters]
    tensors = 3 if _rotates_one(original) else 4
    heads_at = names.index("unsqueeze_dim") - tensors if "unsqueeze_dim" in names else None
    heads_default = parameters[heads_at + tensors].default if heads_at is not None else 1

    def apply_to_one(x: Tensor, cos: Tensor, sin: Tensor, *rest: int, **keywords: int) -> Tensor:
        if is_dtensor(x) or x.ndim != 4:
            return original(x, cos, sin, *rest, **keywords)  # type: ignore[no-any-return]
        heads_dim = keywords.get("unsqueeze_dim", heads_default)
        if heads_at is not None and len(rest) > heads_at:
            heads_dim = rest[heads_at]
        # The op takes two tensors, so it gets keys with 0 heads.
        return rotation(x, x.narrow(heads_dim, 0, 0), cos, sin, heads_dim)[0]

    def apply_rotary_pos_emb(
        q: Tensor, k: Any = None, cos: Any = None, sin: Any = None, *rest: int, **keywords: int
    ) -> Any:
        if k is None or is_dtensor(q):  # Qwen4's indexer rotates queries alone
            return original(q, k, cos, sin, *rest, **keywords)
        heads_dim = keywords.get("unsqueeze_dim", heads_default)
        if heads_at is not None and len(rest) > heads_at:
            heads_dim = rest[heads_at]
        if q.ndim == 3:  # (T, H, D), as in vision towers, which pack the images into one sequence
            q_rotated, k_rotated = rotation(q[None], k[None], cos, sin, 2)
            return q_rotated[0], k_rotated[0]
        return rotation(q, k, cos, sin, heads_dim)

    return apply_to_one if tensors == 3 else apply_rotary_pos_emb


def _rotates_one(function: FunctionType) -> bool:
    """Whether the function rotates a single tensor x, and is called separately for queries and keys."""
    return list(inspect.signature(function).parameters)[1:3] == ["cos", "sin"]


_Form = tuple[dict[str, Any], Callable[[], tuple[Tensor, ...]]]
"""Keywords and inputs of a rotary function."""


def _disagreement(original: FunctionType, replacement: Callable[..., Any]) -> str | None:
    """How `replacement` differs from `original`, for every form of inputs that `original` accepts."""
    parameters = list(inspect.signature(original).parameters)
    if parameters[:4] != ["q", "k", "cos", "sin"] and not (_rotates_one(original) or _takes_complex_table(original)):
        return f"its parameters are ({', '.join(parameters)}) instead of (q, k, cos, sin, ...)"
    accepted = [(keywords, inputs) for keywords, inputs in _forms(original) if _accepts(original, inputs, keywords)]
    for keywords, inputs in accepted:
        reason = probe.disagreement(
            nn.Module,
            inputs,
            lambda _, *qkcs, keywords=keywords: replacement(*qkcs, **keywords),
            lambda _, *qkcs, keywords=keywords: original(*qkcs, **keywords),
        )
        if reason is not None:
            return reason
    shapes = "(B, heads, T, D) or (T, heads, D)"
    return None if accepted else f"it does not take q and k {shapes} with tables of D or D / 2 columns"


def _forms(original: FunctionType) -> Iterator[_Form]:
    """Every table width and place of the heads, for a function with the parameters of `original`.

    Narrow tables rotate a part of the columns: the first ones in the op, and the last ones in DeepSeek V4. They have 4
    columns, because half of 2 would be broadcast.
    """
    if _takes_complex_table(original):
        for heads_dim in (1, 2):
            yield {}, functools.partial(_complex_inputs, heads_dim)
        return
    one = _rotates_one(original)
    has_heads_dim = "unsqueeze_dim" in inspect.signature(original).parameters
    for columns, width in ((probe.WIDTH, probe.WIDTH), (probe.WIDTH, probe.WIDTH // 2), (2 * probe.WIDTH, 4)):
        for heads_dim in (1, 2) if has_heads_dim else (1,):
            keywords = {"unsqueeze_dim": heads_dim} if has_heads_dim else {}
            yield keywords, functools.partial(_rotary_inputs, width, heads_dim, one, columns)
        if not one and columns == probe.WIDTH:
            yield {}, functools.partial(_packed_inputs, width)


def _rotary_inputs(width: int, heads_dim: int, one: bool, columns: int = probe.WIDTH) -> tuple[Tensor, ...]:
    """q (2, 4, 5, columns), k (2, 2, 5, columns) unless `one`, cos and sin (2, 5, width).

    With heads_dim 2, heads and tokens of q and k are swapped.
    """
    rotated = [probe.random(2, heads, 5, columns, seed=heads) for heads in ((4,) if one else (4, 2))]
    if heads_dim == 2:
        rotated = [x.transpose(1, 2) for x in rotated]
    cos, sin = probe.random(2, 5, width, seed=2), probe.random(2, 5, width, seed=7)
    return *(x.detach().requires_grad_() for x in rotated), cos, sin


def _complex_inputs(heads_dim: int) -> tuple[Tensor, ...]:
    """q and k as in `_rotary_inputs`, and a complex table (2, 5, WIDTH / 2)."""
    q, k, cos, sin = _rotary_inputs(probe.WIDTH // 2, heads_dim, one=False)
    return q, k, torch.complex(cos, sin)


def _packed_inputs(width: int) -> tuple[Tensor, ...]:
    """q (5, 4, WIDTH) and k (5, 2, WIDTH) without a batch, cos and sin (5, width)."""
    rotated = (probe.random(5, heads, probe.WIDTH, seed=heads).requires_grad_() for heads in (4, 2))
    return *rotated, probe.random(5, width, seed=2), probe.random(5, width, seed=7)


def _accepts(function: FunctionType, inputs: Callable[[], tuple[Tensor, ...]], keywords: dict[str, Any]) -> bool:
    try:
        tensors = inputs()
        rotated = function(*tensors, **keywords)
    except Exception:  # the model's function may refuse with any error
        return False
    first = rotated[0] if isinstance(rotated, tuple) else rotated
    return isinstance(first, Tensor) and first.shape == tensors[0].shape
