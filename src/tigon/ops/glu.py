"""Gated linear units (Shazeer 2020, arXiv 2002.05202, eq. 5-6): swiglu and geglu.

    y = f(gate) · up        f = silu (swiglu), gelu or its tanh approximation (geglu)

f is computed in fp32 and not rounded before the product. The unfused model rounds once more, because it stores f(gate)
in the model's dtype. The op saves gate and up, and its backward recomputes f. The projections that produced gate and up
do not need to save them.

`swiglu(gate_up)` takes a packed projection (..., 2F). It reads the two halves in place and writes one packed gradient.
A split with `chunk` would cost a copy of the gradient.

`inplace=True` lets the backward write dgate and dup over gate and up. This saves two tensors at the memory peak of an
MLP's backward. The caller guarantees that nothing else reads gate and up; `alone` checks this for a tensor that the
caller has just created. A backward that keeps the graph (`retain_graph=True`) does not overwrite gate and up.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops import known_amax
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, Differentiable, Primitive, check_dtype, first_order

Approximate = Literal["tanh", "none"]
# PyTorch's value of `approximate` -> the kernel's activation
_GELU = {"tanh": "gelu_tanh", "none": "gelu"}


def _split(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def _activation(g: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """f(g) and f'(g), as at the top of `kernels/glu.py`."""
    if activation == "gelu":
        cdf = torch.special.ndtr(g)
        return g * cdf, cdf + g * torch.exp(-0.5 * g * g) * 0.3989422804014327
    if activation == "silu":
        s, slope = torch.sigmoid(g), torch.ones((), dtype=g.dtype, device=g.device)
    else:
        scale, cubic = 1.5957691216057308, 0.044715
        s, slope = torch.sigmoid(scale * (g + cubic * g**3)), scale * (1 + 3 * cubic * g * g)
    f = g * s
    return f, s + f * (1 - s) * slope


def _fwd_reference(gate: Tensor, up: Tensor | None, activation: str, amax: Tensor | None = None) -> Tensor:
    g, u = _split(gate, up)
    y_dtype = torch.promote_types(g.dtype, u.dtype)
    acc = torch.promote_types(y_dtype, torch.float32)
    y = (_activation(g.to(acc), activation)[0] * u.to(acc)).to(y_dtype)
    known_amax.search(amax, 0, y)
    return y if y.is_contiguous() else y.contiguous()  # the fake and the kernel return contiguous tensors


def _bwd_reference(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    want_dgate: bool,
    want_dup: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dgate, dup = _bwd_fake(dy, gate, up, activation, want_dgate, want_dup)
    dg, du = _split(dgate, None) if up is None else (dgate, dup)
    _write_grads(dy, gate, up, activation, dg if want_dgate else None, du if want_dup or up is None else None, amax)
    return dgate, dup


def _bwd_inplace_reference(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str, amax: Tensor | None = None
) -> None:
    _write_grads(dy, gate, up, activation, *_split(gate, up), amax)


def _write_grads(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    dg: Tensor | None,
    du: Tensor | None,
    amax: Tensor | None,
) -> None:
    """Write the gradients into dg and du, which may be gate and up themselves."""
    g, u = _split(gate, up)
    acc = torch.promote_types(dy.dtype, torch.float32)
    f, df = _activation(g.to(acc), activation)
    dy = dy.to(acc)
    if dg is not None:
        dg.copy_(dy * u.to(acc) * df)
        known_amax.search(amax, 0, dg)
    if du is not None:
        du.copy_(dy * f)
        known_amax.search(amax, 0 if up is None else 1, du)


def _fwd_fake(gate: Tensor, up: Tensor | None, activation: str, amax: Tensor | None = None) -> Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _bwd_fake(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    want_dgate: bool,
    want_dup: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    other = gate if up is None else up
    return gate.new_empty(gate.shape if want_dgate else (0,)), other.new_empty(other.shape if want_dup else (0,))


glu_fwd = Primitive(
    "glu_fwd",
    "(Tensor gate, Tensor? up, str activation) -> Tensor",
    reference=_fwd_reference,
    kernel="tigon.kernels.glu:glu_fwd",
    fake=_fwd_fake,
)
glu_bwd = Primitive(
    "glu_bwd",
    "(Tensor dy, Tensor gate, Tensor? up, str activation, bool want_dgate, bool want_dup) -> (Tensor, Tensor)",
    reference=_bwd_reference,
    kernel="tigon.kernels.glu:glu_bwd",
    fake=_bwd_fake,
)
# Their own operators, because torch.compile wraps operators that write to an argument.
glu_fwd_amax = Primitive(
    "glu_fwd_amax",
    "(Tensor gate, Tensor? up, str activation, Tensor(a!) amax) -> Tensor",
    reference=_fwd_reference,
    kernel="tigon.kernels.glu:glu_fwd",
    fake=_fwd_fake,
)
"""As `glu_fwd`; the maximum of amax (1, parts), which is 0 before, becomes that of |y|."""
glu_bwd_amax = Primitive(
    "glu_bwd_amax",
    "(Tensor dy, Tensor gate, Tensor? up, str activation, bool want_dgate, bool want_dup, Tensor(a!) amax)"
    " -> (Tensor, Tensor)",
    reference=_bwd_reference,
    kernel="tigon.kernels.glu:glu_bwd",
    fake=_bwd_fake,
)
"""As `glu_bwd`; the maximum of a row of amax, which is 0 before, becomes that of a gradient's magnitudes."""
glu_bwd_inplace = Primitive(
    "glu_bwd_inplace",
    "(Tensor dy, Tensor(a!) gate, Tensor(b!)? up, str activation, Tensor(c!)? amax=None) -> ()",
    reference=_bwd_inplace_reference,
    kernel="tigon.kernels.glu:glu_bwd_inplace",
    fake=lambda dy, gate, up, activation, amax=None: None,
)


def _apart(gate: Tensor, up: Tensor | None) -> bool:
    """Whether gate and up have separate memory, so that each can be overwritten with its gradient."""
    return up is None or gate.untyped_storage()._cdata != up.untyped_storage()._cdata  # fakes have no address


def _may_overwrite(gate: Tensor, up: Tensor | None, needs_input_grad: tuple[bool, ...]) -> bool:
    """Whether the gradients have room in gate and up, which nobody else needs."""
    # A leaf belongs to the caller. If only one gradient is wanted, the other input must stay readable.
    both = needs_input_grad[0] and (up is None or needs_input_grad[1])
    free = all(t is None or (not t.is_leaf and t.is_contiguous()) for t in (gate, up))
    return both and free and _apart(gate, up)


class GLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, gate: Tensor, up: Tensor | None, activation: str, inplace: bool, find_amax: bool = False
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.find_amax = activation, find_amax
        ctx.inplace = inplace and _may_overwrite(gate, up, ctx.needs_input_grad)
        amax = known_amax.parts_for_result(gate) if find_amax else None
        if amax is None:
            return glu_fwd(gate, up, activation)  # type: ignore[no-any-return]
        y: Tensor = glu_fwd_amax(gate, up, activation, amax)
        known_amax.note(y, amax[0])
        return y

    @staticmethod
    @first_order
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        want_dgate, want_dup = ctx.needs_input_grad[:2]
        found = known_amax.parts_for(gate, 1 if up is None else 2) if ctx.find_amax else None
        amax = () if found is None else (found,)
        # With activation checkpointing, each node that saved the tensor gets a separate alias when it is recomputed.
        shared = ctx.inplace and any(t is not None and _sharers(t) != _UNSHARED for t in (gate, up))
        if ctx.inplace and not shared and not torch._C._autograd._get_current_graph_task_keep_graph():
            dgate, dup = gate.detach(), None if up is None else up.detach()
            glu_bwd_inplace(dy, dgate, dup, ctx.activation, *amax)
            # If another node saved them after all, autograd's version check raises.
            torch.autograd.graph.increment_version([t for t in (dgate, dup) if t is not None])
        else:
            run = glu_bwd if found is None else glu_bwd_amax
            dgate, dup = run(dy, gate, up, ctx.activation, want_dgate, want_dup, *amax)
            dgate, dup = dgate if want_dgate else None, dup if want_dup else None
        if found is not None:
            for gradient, parts in zip((dgate, dup), found, strict=False):
                if gradient is not None:
                    known_amax.note(gradient, parts)
        return (dgate, dup, None, None, None)[: len(ctx.needs_input_grad)]


_glu = Differentiable("glu", GLU.apply, "(Tensor gate, Tensor? up, str activation, bool inplace) -> Tensor")


def _sharers(x: Tensor) -> int:
    """The number of tensors (views, detached tensors) that share the memory of x."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


_UNSHARED = _sharers(torch.empty(1))


def _holders(x: Tensor) -> tuple[int, int, int]:
    """Counts for x: references to the Python object, tensors that share its memory, and C++ references.

    The C++ references include those of autograd nodes that saved x.
    """
    return sys.getrefcount(x), _sharers(x), x._use_count()  # type: ignore[attr-defined]


def _counted_for_a_caller(x: Tensor) -> tuple[int, int, int]:
    return _holders(x)


def _of_a_new_tensor() -> tuple[int, int, int]:
    x = torch.empty(1)
    return _counted_for_a_caller(x)


_CAN_TELL = hasattr(torch.Tensor, "_use_count")
# The counts of this Python and PyTorch for a tensor that only one local variable holds.
_ALONE = _of_a_new_tensor() if _CAN_TELL else (0, 0, 0)


def alone(x: Tensor) -> bool:
    """Whether only one local variable of the calling function refers to `x` or its memory.

    Call this before the call that `x` is passed to, because arguments of a call count as references too.
    """
    return _CAN_TELL and not torch.compiler.is_compiling() and _holders(x) == _ALONE


def _gated(gate: Tensor, up: Tensor | None, activation: str, inplace: bool, find_amax: bool) -> Tensor:
    check_dtype(gate, up)
    if up is None:
        if gate.ndim == 0 or gate.shape[-1] % 2:
            raise ShapeError(f"packed gate_up is {tuple(gate.shape)}; its last dimension must be even: [gate | up].")
    else:
        if gate.shape != up.shape:
            raise ShapeError(f"gate is {tuple(gate.shape)} and up is {tuple(up.shape)}; they must agree.")
        if gate.device != up.device:
            raise ShapeError(f"gate is on {gate.device} and up on {up.device}; move them to one device.")
        if gate.dtype is torch.float64 or up.dtype is torch.float64:
            # No kernel computes in fp64, and the dtype of gate decides whether a kernel runs. So cast both to fp64.
            gate, up = gate.double(), up.double()
    if torch.compiler.is_compiling():
        return _glu(gate, up, activation, False)  # type: ignore[no-any-return]  # the compiler plans the buffers
    return GLU.apply(gate, up, activation, inplace, find_amax)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor | None = None, *, inplace: bool = False, find_amax: bool = False) -> Tensor:
    """Compute `silu(gate) * up` in one pass.

    Args:
        gate: (..., F), fp16, bf16, fp32 or fp64, any strides; or both halves packed, (..., 2F) = [gate | up].
        up: (..., F), the shape of gate; its dtype may differ. None if gate is packed.
        inplace: let the backward overwrite gate and up with their gradients. Use this only if no other code reads them.
        find_amax: let the kernels also find the largest magnitudes of the result and of both gradients, for the
            tensorwise `fp8_linear` layers that read them. torch.compile ignores it.

    Returns:
        (..., F), in the promoted dtype of gate and up. Gradients have the dtype of their input.

    Raises:
        ShapeError: gate and up differ in shape or device, or a packed gate has an odd width or no dimensions.
        DtypeError: a dtype is not fp16, bf16, fp32 or fp64.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    return _gated(gate, up, "silu", inplace, find_amax)


def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: Approximate = "tanh",
    inplace: bool = False,
    find_amax: bool = False,
) -> Tensor:
    """Compute `gelu(gate) * up` in one pass.

    Args:
        gate, up, inplace, find_amax: as in `swiglu`.
        approximate: "tanh" (Gemma's) or "none" (the error function), as in `torch.nn.functional.gelu`.

    Returns:
        (..., F), in the promoted dtype of gate and up. Gradients have the dtype of their input.

    Raises:
        ShapeError: gate and up differ in shape or device, or a packed gate has an odd width or no dimensions.
        DtypeError: a dtype is not fp16, bf16, fp32 or fp64.
        OptionError: approximate is neither "tanh" nor "none".
        DoubleBackwardError: in backward, with create_graph=True.
    """
    if approximate not in _GELU:
        raise OptionError(f"approximate={approximate!r} is not known; choose one of {', '.join(_GELU)}.")
    return _gated(gate, up, _GELU[approximate], inplace, find_amax)


def swiglu_oracle(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The unfused formula."""
    gate, up = _split(gate, up)
    return F.silu(gate) * up


def geglu_oracle(gate: Tensor, up: Tensor | None = None, *, approximate: Approximate = "tanh") -> Tensor:
    """The unfused formula."""
    gate, up = _split(gate, up)
    return F.gelu(gate, approximate=approximate) * up


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    options = dict(case.options)
    scale = options.pop("scale", 1.0)
    gate_dtype, up_dtype = options.pop("gate_dtype", dtype), options.pop("up_dtype", dtype)
    if options.pop("packed", False):
        return {"gate": randn(*case.shape, dtype=dtype, device=device, scale=scale), "up": None, **options}
    return {
        "gate": randn(*case.shape, dtype=gate_dtype, device=device, scale=scale),
        "up": randn(*case.shape, dtype=up_dtype, device=device),
        **options,
    }


def _cost(gate: Tensor, up: Tensor | None = None, **_: object) -> Cost:
    inputs = gate.nbytes if up is None else gate.nbytes + up.nbytes
    y = inputs // 2
    # forward gate, up -> y; backward dy, gate, up -> dgate, dup
    return Cost(moved_bytes=3 * inputs + 2 * y, saved_bytes=inputs)


SWIGLU = Op(
    name="swiglu",
    call=swiglu,
    oracle=swiglu_oracle,
    make=_make,
    grads=("gate", "up"),
    case=Case(id="separate", shape=(3, 5, 64)),
    cost=_cost,
    errors={"fp32": 2.1e-07, "bf16": 1.9e-03, "fp16": 2.4e-04},
)
GEGLU = Op(
    name="geglu",
    call=geglu,
    oracle=geglu_oracle,
    make=_make,
    grads=("gate", "up"),
    case=Case(id="separate", shape=(3, 5, 64)),
    cost=_cost,
    errors={"fp32": 1.1e-07, "bf16": 1.8e-03, "fp16": 2.9e-04},
)
