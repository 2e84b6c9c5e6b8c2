"""The router of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), GLM, Kimi and MiniMax: sigmoid scores and a bias.

    s = σ(logits)        w_k = scale · s_{e_k} / D        D = Σ_k s_{e_k} + eps if normalised, else 1

The experts are chosen by s + bias, which balances their load and gets no gradient. With groups, a token chooses first
the groups with the largest sums of their two largest scores, and its experts among those. The first of equal scores is
chosen. The unfused model stores s, the choice's scores, masks, and each step of the weights. The op stores the weights
and the experts, and computes s again in the backward.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import (
    Context,
    Differentiable,
    Primitive,
    check_dtype,
    check_number,
    check_whole,
    first_order,
)
from tigon.ops.topk_softmax import MAX_EXPERTS, largest

KERNELS = "tigon.kernels.topk_sigmoid"
MAX_GROUPS = 32

# T tokens, E experts, K experts per token, G groups of experts.


class TopkSigmoidOptions(NamedTuple):
    """The options besides the tensors."""

    top_k: int
    groups: int
    top_groups: int
    normalised: bool
    scale: float
    eps: float


class RouterResults(NamedTuple):
    """The weights and the experts, (T, K)."""

    weights: Tensor
    experts: Tensor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _chosen(scores: Tensor, bias: Tensor | None, options: TopkSigmoidOptions) -> Tensor:
    """(T, K) the experts."""
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if options.groups > 1:
        parts = choice.unflatten(1, (options.groups, -1))
        groups = largest(parts.sort(dim=-1, descending=True).values[..., :2].sum(-1), options.top_groups)
        allowed = torch.zeros_like(parts[..., 0], dtype=torch.bool).scatter_(1, groups, True)
        choice = parts.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    return largest(choice, options.top_k)


def _weights(scores: Tensor, index: Tensor, options: TopkSigmoidOptions) -> Tensor:
    weights = scores.gather(1, index)
    if options.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + options.eps)
    return weights * options.scale


def _fwd_reference(logits: Tensor, bias: Tensor | None, options: TopkSigmoidOptions) -> RouterResults:
    scores = _wide(logits).sigmoid()
    index = _chosen(scores, bias, options)
    return RouterResults(_weights(scores, index, options).contiguous(), index)


def _bwd_reference(dweights: Tensor, logits: Tensor, index: Tensor, options: TopkSigmoidOptions) -> Tensor:
    scores = _wide(logits).sigmoid()
    g, top = dweights.to(scores.dtype), scores.gather(1, index)
    if options.normalised:
        total = top.sum(-1, keepdim=True) + options.eps
        g = (g - (g * top).sum(-1, keepdim=True) / total) / total
    return torch.zeros_like(scores).scatter_(1, index, g * options.scale * top * (1 - top)).to(logits.dtype)


def _fwd_fake(logits: Tensor, bias: Tensor | None, options: TopkSigmoidOptions) -> RouterResults:
    shape = (logits.shape[0], options.top_k)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return RouterResults(logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64))


def _bwd_fake(dweights: Tensor, logits: Tensor, index: Tensor, options: TopkSigmoidOptions) -> Tensor:
    return logits.new_empty(logits.shape)


topk_sigmoid_fwd = Primitive(
    "topk_sigmoid_fwd", reference=_fwd_reference, kernel=f"{KERNELS}:topk_sigmoid_fwd", fake=_fwd_fake
)
topk_sigmoid_bwd = Primitive(
    "topk_sigmoid_bwd", reference=_bwd_reference, kernel=f"{KERNELS}:topk_sigmoid_bwd", fake=_bwd_fake
)


class TopkSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        groups: int,
        top_groups: int,
        normalised: bool,
        scale: float,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.options = TopkSigmoidOptions(top_k, groups, top_groups, normalised, scale, eps)
        weights, index = topk_sigmoid_fwd(logits, bias, ctx.options)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(logits, index)
        return weights, index

    @staticmethod
    @first_order
    def backward(ctx: Context, dweights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return topk_sigmoid_bwd(dweights, *ctx.saved_tensors, ctx.options), *[None] * 7


_topk_sigmoid = Differentiable(
    "topk_sigmoid",
    TopkSigmoid.apply,
    "(Tensor logits, Tensor? bias, int top_k, int groups, int top_groups, bool normalised, float scale, float eps)"
    " -> (Tensor, Tensor)",
)


def topk_sigmoid(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    normalised: bool = True,
    scale: float = 1.0,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights: sigmoid scores, chosen with a bias and perhaps by groups.

    Args:
        logits: (T, E), fp16, bf16, fp32 or fp64, the router's scores.
        bias: (E,) or None, the correction of the scores for the choice. It gets no gradient.
        top_k: the number of experts per token.
        groups: the experts are in this many groups of equal size.
        top_groups: the number of groups among which a token chooses.
        normalised: the weights of a token are divided by their sum and eps.
        scale: multiplies the weights, as `routed_scaling_factor`.
        eps: added to the sum of the weights.

    Returns:
        The weights (T, K), fp32 (fp64 for fp64), by descending score of the choice, and the experts (T, K), int64.

    Raises:
        ShapeError: logits is not (T, E) with 1 ... 4096 experts, bias is not (E,) or is on another device, or groups do
            not divide E into parts of at least two.
        OptionError: a number is not in its range: top_k in 1 ... E · top_groups / groups, groups in 1 ... 32,
            top_groups in 1 ... groups.
        DtypeError: a dtype is not supported.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    check_dtype(logits, bias)
    _check(logits, bias, top_k, groups, top_groups)
    scale, eps = float(check_number("scale", scale)), float(check_number("eps", eps))
    # compared, because Dynamo cannot trace math.isfinite
    if not -math.inf < scale < math.inf or not 0 <= eps < math.inf:
        raise OptionError(f"scale is {scale} and eps is {eps}; give finite numbers, and an eps of at least 0.")
    arguments = (logits, bias, int(top_k), int(groups), int(top_groups), bool(normalised), scale, eps)
    if torch.compiler.is_compiling():
        return _topk_sigmoid(*arguments)  # type: ignore[no-any-return]
    return TopkSigmoid.apply(*arguments)  # type: ignore[no-any-return]


def _check(logits: Tensor, bias: Tensor | None, top_k: int, groups: int, top_groups: int) -> None:
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ShapeError(f"logits is {tuple(logits.shape)}; it must be (T, E) with 1 ... {MAX_EXPERTS} experts.")
    E = logits.shape[1]
    if bias is not None and (tuple(bias.shape) != (E,) or bias.device != logits.device):
        where = f"bias is {tuple(bias.shape)} on {bias.device}"
        raise ShapeError(f"{where}; for these logits it must be ({E},) on {logits.device}.")
    for name, value in {"top_k": top_k, "groups": groups, "top_groups": top_groups}.items():
        check_whole(name, value)
    if not 1 <= groups <= MAX_GROUPS or not 1 <= top_groups <= groups:
        given = f"groups={groups} and top_groups={top_groups}"
        raise OptionError(f"{given} must be in 1 ... {MAX_GROUPS}, and not more chosen than there are.")
    if E % groups or (groups > 1 and E // groups < 2):
        raise ShapeError(f"{E} experts cannot be in groups={groups} of equal size with at least two experts each.")
    if not 1 <= top_k <= E // groups * top_groups:
        raise OptionError(f"top_k={top_k} must be in 1 ... {E // groups * top_groups}, the experts to choose from.")


def topk_sigmoid_oracle(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    normalised: bool = True,
    scale: float = 1.0,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The unfused formula, with the sigmoid in fp32 as in transformers."""
    options = TopkSigmoidOptions(top_k, groups, top_groups, normalised, scale, eps)
    scores = _wide(logits).sigmoid()
    index = _chosen(scores.detach(), bias, options)
    return _weights(scores, index, options), index


# --- the record ---


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A case's shape is (T, E)."""
    options = dict(case.options)
    has_bias = options.pop("biased", True)
    logits = randn(*case.shape, dtype=dtype, device=device, scale=options.pop("spread", 1.0))
    bias = randn(case.shape[1], dtype=torch.promote_types(dtype, torch.float32), device=device, scale=0.2)
    return {"logits": logits, "bias": bias if has_bias else None, **options}


def _cost(logits: Tensor, bias: Tensor | None, top_k: int, **options: object) -> Cost:
    slots = logits.shape[0] * top_k
    return Cost(moved_bytes=3 * logits.nbytes + 24 * slots, saved_bytes=logits.nbytes + 8 * slots)


TOPK_SIGMOID = Op(
    name="topk_sigmoid",
    call=topk_sigmoid,
    oracle=topk_sigmoid_oracle,
    make=_make,
    grads=("logits",),
    case=Case(
        id="deepseek",
        shape=(37, 16),
        options={"top_k": 4, "groups": 4, "top_groups": 2, "scale": 2.5, "eps": 1e-20},
    ),
    cost=_cost,
    # These are errors of all cases on a CPU.
    errors={"fp32": 1.4e-07, "bf16": 2.8e-03, "fp16": 2.5e-04},
)
