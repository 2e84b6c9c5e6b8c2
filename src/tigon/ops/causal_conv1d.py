"""The short causal convolution of hybrid models: one filter of up to four taps per channel, and its activation.

    z_t = b + Σ_k w_k · x_{t-k}        y = silu(z) or z

The filter stays inside a document (`seq_idx`). Tokens before the first are zero, or those of `initial_state`. The
unfused model stores z, and PyTorch's convolution wants the channels before the tokens. The op saves x alone. The
formulas of the backward are at the top of `kernels/causal_conv1d.py`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, Differentiable, Primitive, check_dtype, first_order

KERNELS = "tigon.kernels.causal_conv1d"
MAX_TAPS = 4
ConvActivation = Literal["silu"]

# B rows, T tokens, D channels, W taps. The weight of token t - k is weight[:, W - 1 - k].


class ConvGradients(NamedTuple):
    """A gradient that is not wanted, or has no input, is empty."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor
    dstate: Tensor


def _padded(x: Tensor, state: Tensor | None, width: int) -> Tensor:
    """x in fp32 or fp64 after its state, or after as many zeros: (B, W - 1 + T, D)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    before = wide.new_zeros((x.shape[0], width - 1, x.shape[2])) if state is None else state.to(wide.dtype)
    return torch.cat((before, wide), dim=1)


def _same_document(seq_idx: Tensor | None, k: int) -> Tensor | None:
    """(B, T, 1) whether the token k before each one is in its document; None if all are. A state is in the first."""
    if seq_idx is None or k == 0:
        return None
    before = torch.cat((seq_idx[:, :1].expand(-1, k), seq_idx), dim=1)[:, : seq_idx.shape[1]]
    return (before == seq_idx)[..., None]


def _taps(padded: Tensor, seq_idx: Tensor | None, width: int) -> list[Tensor]:
    """x_{t-k} for each k, zero where it is in another document."""
    tokens = padded.shape[1] - (width - 1)
    shifted = [padded[:, width - 1 - k : width - 1 - k + tokens] for k in range(width)]
    same = [_same_document(seq_idx, k) for k in range(width)]
    return [x if mask is None else x.where(mask, 0.0) for x, mask in zip(shifted, same, strict=True)]


def _linear(taps: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    w = weight.to(taps[0].dtype)
    z = sum(w[:, -1 - k] * x for k, x in enumerate(taps))
    return z if bias is None else z + bias.to(w.dtype)  # type: ignore[return-value]


def _fwd_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, state: Tensor | None, silu: bool
) -> Tensor:
    width = weight.shape[1]
    z = _linear(_taps(_padded(x, state, width), seq_idx, width), weight, bias)
    return (F.silu(z) if silu else z).to(x.dtype).contiguous()


def _bwd_reference(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    state: Tensor | None,
    silu: bool,
    want_dw: bool,
) -> ConvGradients:
    width, tokens = weight.shape[1], x.shape[1]
    padded = _padded(x, state, width)
    taps, e = _taps(padded, seq_idx, width), dy.to(padded.dtype)
    if silu:
        z = _linear(taps, weight, bias)
        s = z.sigmoid()
        e = e * s * (1 + z * (1 - s))
    dpadded = torch.zeros_like(padded)
    for k in range(width):
        mask = _same_document(seq_idx, k)
        product = e * weight[:, -1 - k].to(e.dtype)
        dpadded[:, width - 1 - k : width - 1 - k + tokens] += product if mask is None else product.where(mask, 0.0)
    dweight, dbias = weight.new_empty(0), weight.new_empty(0)
    if want_dw:
        dweight = torch.stack([(e * tap).sum((0, 1)) for tap in reversed(taps)], dim=1).to(weight.dtype)
        dbias = dbias if bias is None else e.sum((0, 1)).to(bias.dtype)
    dense = torch.contiguous_format  # slices of one row count as contiguous
    dstate = x.new_empty(0) if state is None else dpadded[:, : width - 1].clone(memory_format=dense).to(state.dtype)
    return ConvGradients(dpadded[:, width - 1 :].clone(memory_format=dense).to(x.dtype), dweight, dbias, dstate)


def _fwd_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, state: Tensor | None, silu: bool
) -> Tensor:
    return x.new_empty(x.shape)


def _bwd_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    state: Tensor | None,
    silu: bool,
    want_dw: bool,
) -> ConvGradients:
    return ConvGradients(
        x.new_empty(x.shape),
        weight.new_empty(weight.shape if want_dw else (0,)),
        (weight if bias is None else bias).new_empty(bias.shape if want_dw and bias is not None else (0,)),
        (x if state is None else state).new_empty((0,) if state is None else state.shape),
    )


def _complete_bwd(results: Any, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> Any:
    dx, dweight, dbias, dstate = results
    missing = (weight, weight if bias is None else bias, x)
    given = zip((dweight, dbias, dstate), missing, strict=True)
    return dx, *(like.new_empty(0) if gradient is None else gradient for gradient, like in given)


causal_conv1d_fwd = Primitive(
    "causal_conv1d_fwd", reference=_fwd_reference, kernel=f"{KERNELS}:causal_conv1d_fwd", fake=_fwd_fake
)
causal_conv1d_bwd = Primitive(
    "causal_conv1d_bwd",
    reference=_bwd_reference,
    kernel=f"{KERNELS}:causal_conv1d_bwd",
    complete=_complete_bwd,
    fake=_bwd_fake,
)


class CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        seq_idx: Tensor | None,
        state: Tensor | None,
        silu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, seq_idx, state)
        ctx.silu = silu
        return causal_conv1d_fwd(x, weight, bias, seq_idx, state, silu)  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        want_dx, want_dw, want_db, _, want_dstate, _ = ctx.needs_input_grad
        gradients = causal_conv1d_bwd(dy, *ctx.saved_tensors, ctx.silu, want_dw or want_db)
        wanted = (want_dx, want_dw, want_db, want_dstate)
        dx, dw, db, dstate = (g if want else None for g, want in zip(gradients, wanted, strict=True))
        return dx, dw, db, None, dstate, None


_causal_conv1d = Differentiable(
    "causal_conv1d",
    CausalConv1d.apply,
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? state, bool silu) -> Tensor",
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ConvActivation | None = None,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> Tensor:
    """The causal convolution of each channel with its own short filter, and its activation.

    Args:
        x: (B, T, D), fp16, bf16, fp32 or fp64, any strides; never written to. The last W - 1 tokens are the final
            state.
        weight: (D, W) with 1 ... 4 taps; the last one is that of the token itself. Its dtype may differ from x's.
        bias: (D,) or None.
        activation: "silu", or None for none.
        seq_idx: (B, T), whole numbers: the document of each token. Tokens of other documents count as zeros.
        initial_state: (B, W - 1, D): the tokens before the first, which belong to its document. None for zeros.

    Returns:
        (B, T, D), contiguous, in x's dtype. Gradients have the dtype of their input.

    Raises:
        ShapeError: a tensor has another shape or is on another device, or the filter has more than 4 taps.
        DtypeError: a dtype is not supported, or some are fp64 and x is not.
        OptionError: activation is neither "silu" nor None.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    if activation not in (None, "silu"):
        raise OptionError(f'activation={activation!r} is not known; the limit is "silu" or None.')
    _check(x, weight, bias, seq_idx, initial_state)
    arguments = (x, weight, bias, seq_idx, initial_state, activation == "silu")
    if torch.compiler.is_compiling():
        return _causal_conv1d(*arguments)  # type: ignore[no-any-return]
    return CausalConv1d.apply(*arguments)  # type: ignore[no-any-return]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, state: Tensor | None) -> None:
    check_dtype(x, weight, bias, state)
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2] or not 1 <= weight.shape[1] <= MAX_TAPS:
        raise ShapeError(
            f"x is {tuple(x.shape)} and weight is {tuple(weight.shape)}; they must be (B, T, D) and (D, W) with "
            f"1 ... {MAX_TAPS} taps."
        )
    (B, T, D), W = x.shape, weight.shape[1]
    shapes = {"bias": (bias, (D,)), "seq_idx": (seq_idx, (B, T)), "initial_state": (state, (B, W - 1, D))}
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ShapeError(f"{name} is {tuple(tensor.shape)}; for this x and weight it must be {shape}.")
    for name, tensor in {"weight": weight, "bias": bias, "seq_idx": seq_idx, "initial_state": state}.items():
        if tensor is not None and tensor.device != x.device:
            raise ShapeError(f"{name} is on {tensor.device} and x on {x.device}; move them to one device.")
    if seq_idx is not None and (seq_idx.is_floating_point() or seq_idx.is_complex()):
        raise DtypeError(f"seq_idx is {seq_idx.dtype}; the limit is whole numbers.")
    for name, tensor in {"weight": weight, "bias": bias, "initial_state": state}.items():
        if tensor is not None and tensor.dtype is torch.float64 and x.dtype is not torch.float64:
            raise DtypeError(f"{name} is float64 and x is {x.dtype}; cast one of them.")


def causal_conv1d_oracle(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ConvActivation | None = None,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> Tensor:
    """The unfused formula: PyTorch's convolution of each document by itself, and the activation."""
    width = weight.shape[1]
    numbers = torch.zeros(x.shape[:2], dtype=torch.int64) if seq_idx is None else seq_idx.cpu()
    rows = []
    for row, index in enumerate(numbers):
        parts = x[row].split(index.unique_consecutive(return_counts=True)[1].tolist())
        for place, part in enumerate(parts):
            before = part.new_zeros((width - 1, x.shape[2]))
            if place == 0 and initial_state is not None:
                before = initial_state[row].to(x.dtype)
            tokens = torch.cat((before, part)).to(weight.dtype)
            rows.append(F.conv1d(tokens.t()[None], weight[:, None], bias, groups=len(weight))[0].t())
    y = torch.cat(rows).view(x.shape) if rows else x * weight.sum()
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


# --- the record ---


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A case's shape is (B, T, D). documents: their sizes; the last one goes up to the end."""
    options = dict(case.options)
    (B, T, D), W = case.shape, options.pop("taps", MAX_TAPS)
    weight_dtype = options.pop("weight_dtype", dtype)
    sizes = options.pop("documents", None)
    has_bias, has_state = options.pop("bias", False), options.pop("state", False)
    seq_idx = None
    if sizes is not None:
        numbers = torch.bucketize(torch.arange(T), torch.tensor(sizes).cumsum(0), right=True)
        seq_idx = numbers.int().expand(B, T).contiguous().to(device)
    return {
        "x": randn(B, T, D, dtype=dtype, device=device),
        "weight": randn(D, W, dtype=weight_dtype, device=device, scale=0.5),
        "bias": randn(D, dtype=weight_dtype, device=device) if has_bias else None,
        "seq_idx": seq_idx,
        "initial_state": randn(B, W - 1, D, dtype=dtype, device=device) if has_state else None,
        **options,
    }


def _cost(x: Tensor, weight: Tensor, *_: object, **__: object) -> Cost:
    # forward x -> y; backward dy, x -> dx
    return Cost(moved_bytes=5 * x.nbytes, saved_bytes=x.nbytes)


CAUSAL_CONV1D = Op(
    name="causal_conv1d",
    call=causal_conv1d,
    oracle=causal_conv1d_oracle,
    make=_make,
    grads=("x", "weight", "bias", "initial_state"),
    case=Case(id="delta-rule", shape=(2, 21, 40), options={"activation": "silu"}),
    cost=_cost,
    # These are errors of all cases on a CPU.
    errors={"fp32": 1.4e-07, "bf16": 2.4e-03, "fp16": 3.1e-04},
)
