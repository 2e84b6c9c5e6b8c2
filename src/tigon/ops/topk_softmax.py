"""The router of a mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): softmax, top-k and normalisation.

    p = softmax(logits)        w_k = p_{e_k} / s        s = Σ_k p_{e_k} if normalised, else 1

A softmax over the k largest logits, as in GPT-OSS, is the same with normalisation. The unfused model stores p, its k
largest values, their sum and their quotient. The op stores the weights and the experts. The first of equal logits is
chosen. The backward computes the softmax again from the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, Differentiable, Primitive, check_dtype, check_whole, first_order

KERNELS = "tigon.kernels.topk_softmax"
MAX_EXPERTS = 4096
"""A program of the kernel holds a row."""

# T tokens, E experts, K experts per token.


def largest(logits: Tensor, top_k: int) -> Tensor:
    """(T, K) the experts with the largest logits, of equal ones the first; `topk` may choose any."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()


def _fwd_fake(logits: Tensor, top_k: int, normalised: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def _fwd_reference(logits: Tensor, top_k: int, normalised: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    index = largest(wide, top_k)
    weights = wide.gather(1, index).softmax(-1) if normalised else wide.softmax(-1).gather(1, index)
    return weights.to(dtype), index


def _bwd_reference(dweights: Tensor, logits: Tensor, index: Tensor, normalised: bool) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    g = torch.zeros_like(wide).scatter_(1, index, dweights.to(wide.dtype))
    if normalised:
        top = wide.gather(1, index).softmax(-1)
        p = torch.zeros_like(wide).scatter_(1, index, top)
    else:
        p = wide.softmax(-1)
    d: Tensor = (p * (g - (p * g).sum(-1, keepdim=True))).to(logits.dtype)
    return d.contiguous()


topk_softmax_fwd = Primitive(
    "topk_softmax_fwd",
    "(Tensor logits, int top_k, bool normalised, ScalarType dtype) -> (Tensor, Tensor)",
    reference=_fwd_reference,
    kernel=f"{KERNELS}:topk_softmax_fwd",
    fake=_fwd_fake,
)
topk_softmax_bwd = Primitive(
    "topk_softmax_bwd",
    "(Tensor dweights, Tensor logits, Tensor index, bool normalised) -> Tensor",
    reference=_bwd_reference,
    kernel=f"{KERNELS}:topk_softmax_bwd",
    fake=lambda dweights, logits, index, normalised: logits.new_empty(logits.shape),
)


class TopkSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, logits: Tensor, top_k: int, normalised: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        weights, index = topk_softmax_fwd(logits, top_k, normalised, dtype)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(logits, index)
        ctx.normalised = normalised
        return weights, index

    @staticmethod
    @first_order
    def backward(ctx: Context, dweights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        logits, index = ctx.saved_tensors
        return topk_softmax_bwd(dweights, logits, index, ctx.normalised), None, None, None


_topk_softmax = Differentiable(
    "topk_softmax",
    TopkSoftmax.apply,
    "(Tensor logits, int top_k, bool normalised, ScalarType dtype) -> (Tensor, Tensor)",
)


def topk_softmax(
    logits: Tensor, top_k: int, *, normalised: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights: softmax over all experts, and its k largest values.

    Args:
        logits: (T, E), fp16, bf16, fp32 or fp64, the router's scores.
        top_k: the number of experts per token, 1 ... E.
        normalised: the weights of a token are divided by their sum, as with `norm_topk_prob`.
        dtype: of the weights; None: that of the logits. The softmax is computed in fp32, or fp64 for fp64.

    Returns:
        The weights (T, K) in descending order, and the experts (T, K), int64. The first of equal logits comes first.

    Raises:
        ShapeError: logits is not (T, E) with 1 ... 4096 experts.
        OptionError: top_k is not a whole number of 1 ... E.
        DtypeError: a dtype is not supported.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    check_dtype(logits)
    check_whole("top_k", top_k)
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ShapeError(f"logits is {tuple(logits.shape)}; it must be (T, E) with 1 ... {MAX_EXPERTS} experts.")
    if not 1 <= top_k <= logits.shape[1]:
        raise OptionError(f"top_k={top_k} must be in 1 ... {logits.shape[1]}, the number of experts.")
    arguments = (logits, int(top_k), bool(normalised), logits.dtype if dtype is None else dtype)
    if torch.compiler.is_compiling():
        return _topk_softmax(*arguments)  # type: ignore[no-any-return]
    return TopkSoftmax.apply(*arguments)  # type: ignore[no-any-return]


def topk_softmax_oracle(
    logits: Tensor, top_k: int, *, normalised: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The unfused formula, with the softmax in fp32 as in transformers."""
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    index = largest(logits.detach(), top_k)
    weights = p.gather(1, index)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype if dtype is None or logits.dtype is torch.float64 else dtype), index


# --- the record ---


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A case's shape is (T, E)."""
    options = dict(case.options)
    scale = options.pop("scale", 1.0)
    if options.pop("wide_weights", False):
        options["dtype"] = torch.promote_types(dtype, torch.float32)
    return {"logits": randn(*case.shape, dtype=dtype, device=device, scale=scale), **options}


def _cost(logits: Tensor, top_k: int, **options: object) -> Cost:
    T = logits.shape[0]
    slots = T * top_k * (8 + logits.itemsize)
    return Cost(moved_bytes=3 * logits.nbytes + 2 * slots, saved_bytes=logits.nbytes + 8 * T * top_k)


TOPK_SOFTMAX = Op(
    name="topk_softmax",
    call=topk_softmax,
    oracle=topk_softmax_oracle,
    make=_make,
    grads=("logits",),
    case=Case(id="normalised", shape=(37, 16), options={"top_k": 4, "normalised": True}),
    cost=_cost,
    # These are errors of all cases on a CPU. Tests on an H200 passed (73e3e25, 2026-11-26), and kept no numbers.
    errors={"fp32": 3.1e-07, "bf16": 2.3e-03, "fp16": 3.3e-04},
)
