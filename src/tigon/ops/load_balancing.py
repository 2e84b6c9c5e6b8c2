"""The load-balancing loss of mixtures (Fedus et al. 2021, arXiv 2101.03961, eq. 4 to 6), over all layers.

    loss = E · Σ_e f_e P_e      f_e: choices of expert e per token      P_e: mean probability of expert e

`expert_load` reads the logits of a layer once and returns N · f and N · P. The unfused loss computes a softmax, its k
largest values, a histogram and a sum for each layer. f is a count, so only P is differentiated. The backward computes
the softmax again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, Differentiable, Primitive, check_dtype, check_whole, first_order
from tigon.ops.topk_softmax import MAX_EXPERTS, largest

KERNELS = "tigon.kernels.expert_load"

# T tokens, E experts, K experts per token.


def _load_fake(logits: Tensor, mask: Tensor | None, top_k: int) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty((2, logits.shape[1]), dtype=wide)


def _load_reference(logits: Tensor, mask: Tensor | None, top_k: int) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    p, chosen = wide.softmax(-1), torch.zeros_like(wide).scatter_(1, largest(wide, top_k), 1.0)
    if mask is not None:
        weight = mask.to(wide.dtype)[:, None]
        p, chosen = (p * weight).where(weight != 0, 0.0), chosen * weight
    return torch.stack([p.sum(0), chosen.sum(0)])


def _bwd_reference(dsums: Tensor, logits: Tensor, mask: Tensor | None) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    p, d = wide.softmax(-1), dsums.to(wide.dtype)
    dx = p * (d - (p * d).sum(-1, keepdim=True))
    if mask is not None:
        weight = mask.to(wide.dtype)[:, None]
        dx = (dx * weight).where(weight != 0, 0.0)
    return dx.to(logits.dtype).contiguous()


expert_load_fwd = Primitive(
    "expert_load_fwd",
    "(Tensor logits, Tensor? mask, int top_k) -> Tensor",
    reference=_load_reference,
    kernel=f"{KERNELS}:expert_load",
    fake=_load_fake,
)
expert_load_bwd = Primitive(
    "expert_load_bwd",
    "(Tensor dsums, Tensor logits, Tensor? mask) -> Tensor",
    reference=_bwd_reference,
    kernel=f"{KERNELS}:expert_load_bwd",
    fake=lambda dsums, logits, mask: logits.new_empty(logits.shape),
)


class ExpertLoad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, logits: Tensor, mask: Tensor | None, top_k: int) -> Tensor:
        ctx.save_for_backward(logits, mask)
        return expert_load_fwd(logits, mask, top_k)  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Context, dload: Tensor) -> tuple[Tensor | None, ...]:
        logits, mask = ctx.saved_tensors
        return expert_load_bwd(dload[0], logits, mask), None, None  # the counts have no gradient


_expert_load = Differentiable("expert_load", ExpertLoad.apply, "(Tensor logits, Tensor? mask, int top_k) -> Tensor")


def load_balancing_loss(gate_logits: Sequence[Tensor], top_k: int, *, mask: Tensor | None = None) -> Tensor:
    """The loss that is smallest if all experts get equally many tokens: 1 per expert of a token, if they do.

    Args:
        gate_logits: the logits (T, E) of each layer's router, fp16, bf16, fp32 or fp64. The softmax is computed in
            fp32, or in fp64 for fp64.
        top_k: the number of experts per token.
        mask: (T,) or any shape of T elements: 0 for a token that does not count, otherwise its weight. None: all count.

    Returns:
        A scalar, fp32 or fp64.

    Raises:
        ShapeError: there are no logits, they are not all (T, E) with 1 ... 4096 experts on one device, or the mask has
            another number of elements or is elsewhere.
        OptionError: top_k is not a whole number of 1 ... E.
        DtypeError: a dtype is not supported, or the mask is complex.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    check_whole("top_k", top_k)
    weights = _checked(gate_logits, top_k, mask)
    run = _expert_load if torch.compiler.is_compiling() else ExpertLoad.apply
    loads = [run(logits, weights, int(top_k)) for logits in gate_logits]
    sums, counts = torch.stack(loads).sum(0).unbind()
    rows = sum(logits.shape[0] for logits in gate_logits)
    total: Any = max(rows, 1)
    if weights is not None:
        total = weights.sum() * len(loads)
        total = torch.where(total > 0, total, 1.0)  # a batch of padding alone has the loss 0
    return (sums * counts.detach()).sum() * (len(counts) / (total * total))  # type: ignore[no-any-return]


def _checked(gate_logits: Sequence[Tensor], top_k: int, mask: Tensor | None) -> Tensor | None:
    """The mask as the weights of the rows, or None. Raises the errors of `load_balancing_loss`."""
    if not gate_logits:
        raise ShapeError("gate_logits is empty; it must hold the logits of each layer.")
    first = gate_logits[0]
    check_dtype(*gate_logits)
    if first.ndim != 2 or not 1 <= first.shape[1] <= MAX_EXPERTS:
        raise ShapeError(f"gate_logits has {tuple(first.shape)}; it must be (T, E) with 1 ... {MAX_EXPERTS} experts.")
    if not 1 <= top_k <= first.shape[1]:
        raise OptionError(f"top_k={top_k} must be in 1 ... {first.shape[1]}, the number of experts.")
    for other in gate_logits:
        if other.shape != first.shape or other.device != first.device:
            raise ShapeError(
                f"gate_logits has {tuple(first.shape)} on {first.device} and {tuple(other.shape)} on {other.device}; "
                "all layers must have one shape on one device."
            )
    if mask is None:
        return None
    if mask.is_complex():
        raise DtypeError(f"mask is {mask.dtype}; it must be bool, an integer or a float, not complex.")
    if mask.numel() != first.shape[0] or mask.device != first.device:
        raise ShapeError(
            f"mask has {mask.numel()} elements on {mask.device}; it must have {first.shape[0]} on {first.device}, one "
            "for each row of gate_logits."
        )
    return mask.reshape(-1).to(torch.promote_types(first.dtype, torch.float32))


def _oracle(*, top_k: int, mask: Tensor | None = None, **layers: Tensor) -> Tensor:
    """The unfused formula, with the softmax in fp32."""
    f: Any = 0
    P: Any = 0
    rows: Any = 0
    for logits in layers.values():
        p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weight = torch.ones_like(p[:, :1]) if mask is None else mask.reshape(-1, 1).to(p.dtype)
        chosen = torch.zeros_like(p).scatter_(1, largest(logits.detach(), top_k), 1.0)
        f, P, rows = f + (chosen * weight).sum(0), P + (p * weight).sum(0), rows + weight.sum()
    rows = torch.where(rows > 0, rows, 1.0)
    return (f / rows * (P / rows)).sum() * len(f)  # type: ignore[no-any-return]


# --- the record ---


def _call(*, top_k: int, mask: Tensor | None = None, **layers: Tensor) -> Tensor:
    return load_balancing_loss(tuple(layers.values()), top_k, mask=mask)


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A case's shape is (T, E)."""
    options = dict(case.options)
    layers = {f"logits_{i}": randn(*case.shape, dtype=dtype, device=device, scale=1.0 + i) for i in range(2)}
    mask = (torch.arange(case.shape[0], device=device) % 3 > 0).long() if options.pop("masked", False) else None
    return {**layers, "mask": mask, **options}


def _cost(**inputs: Any) -> Cost:
    logits = inputs["logits_0"]
    return Cost(moved_bytes=6 * logits.nbytes, saved_bytes=2 * logits.nbytes)


LOAD_BALANCING_LOSS = Op(
    name="load_balancing_loss",
    call=_call,
    oracle=_oracle,
    make=_make,
    grads=("logits_0", "logits_1"),
    case=Case(id="plain", shape=(37, 16), options={"top_k": 4}),
    cost=_cost,
    # These are errors of all cases on a CPU. Tests on an H200 passed (73e3e25, 2026-11-26), and kept no numbers.
    # Gradients of a mean over thousands of tokens are near fp16's smallest numbers.
    errors={"fp32": 2.9e-06, "bf16": 1.8e-03, "fp16": 2.9e-01},
)
