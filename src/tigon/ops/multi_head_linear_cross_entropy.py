"""Linear + cross entropy for several heads that predict several tokens ahead (Medusa, arXiv 2401.10774, eq. 1).

    L = Σ_k c_k · linear_cross_entropy(hidden_k, weight_k, target shifted left by s_k)

Head k at position t is scored against target[t + s_k]; positions whose label lies past the end are ignored, and so
dropped before the products. The heads take turns with one chunk of logits, so K heads cost the memory of one. The
gradients are made in the forward for an upstream gradient of 1 (a scalar loss is linear in it), and what several heads
share, a trunk's hidden state or one lm_head, is summed over the heads in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops import _loss
from tigon.ops._chunk_loop import chunk_loop
from tigon.ops._dispatch import Differentiable, check_dtype, first_order
from tigon.ops._loss import LossOptions
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.cross_entropy import Reduction, gradient_scales, make_target
from tigon.ops.linear_cross_entropy import (
    _even_chunk,
    _rows_that_count,
    _settle_dtypes,
    default_chunk_bytes,
    linear_cross_entropy_oracle,
)

# B batch, T positions, N = B·T tokens, H hidden, V vocabulary, K heads.

OUTPUTS = ("losses", "accuracy")


class MultiHeadOutput(NamedTuple):
    """What `multi_head_linear_cross_entropy` returns when `outputs` names more than the loss; only `loss` is
    differentiable.

    loss: 0-dim fp32, Σ_k c_k · loss_k. losses: (K,) fp32, the heads' own losses. accuracy: (K,) fp32, each head's
    share of not ignored tokens whose largest logit is the target's.
    """

    loss: Tensor
    losses: Tensor | None = None
    accuracy: Tensor | None = None


def shift_left(target_BT: Tensor, shift: int, ignore_index: int) -> Tensor:
    """(B, T) labels whose position t holds target[t + shift], ignore_index past the end."""
    if shift == 0:
        return target_BT
    shifted = torch.full_like(target_BT, ignore_index)
    if shift < target_BT.shape[1]:
        shifted[:, :-shift] = target_BT[:, shift:]
    return shifted


class _Sums:
    """Gradients of tensors that several heads share: fp32 sums, rounded at once where only one head uses a tensor."""

    def __init__(self, tensors: Sequence[Tensor], users: Sequence[int], wanted: Sequence[bool]) -> None:
        self._tensors, self._wanted = tensors, wanted
        self._shared = [users.count(i) > 1 for i in range(len(tensors))]
        self.sums: list[Tensor | None] = [None] * len(tensors)

    def add(self, which: int, gradient: Tensor, left: Tensor, index: Tensor | None) -> None:
        if not self._wanted[which]:
            return
        like = self._tensors[which]
        # fp16 stays in fp32 until the loss scale is on.
        wide = self._shared[which] or like.dtype == torch.float16
        dtype = left.dtype if wide else like.dtype
        part = _loss.scale_rows(gradient, left, index, like.shape[0], dtype)
        total = self.sums[which]
        self.sums[which] = part if total is None else total.add_(part)


class MultiHeadLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_count: int, hidden_of: list[int], weight_of: list[int], targets: list[Tensor],
        inv_denominators: list[Tensor], head_weights: list[float], indices: list[Tensor | None],
        options: LossOptions, predicted: bool, chunk_bytes: int, grad_enabled: bool, *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        hiddens, weights = tensors[:hidden_count], tensors[hidden_count:]
        want = [grad_enabled and need for need in ctx.needs_input_grad[-len(tensors) :]]
        hidden_sums = _Sums(hiddens, hidden_of, want[:hidden_count])
        weight_sums = _Sums(weights, weight_of, want[hidden_count:])
        losses, hits = [], []
        for k, (h, w) in enumerate(zip(hidden_of, weight_of, strict=True)):
            x_NH, weight_VH, target, index = hiddens[h], weights[w], targets[k], indices[k]
            if index is not None:
                x_NH, target = x_NH.index_select(0, index), target.index_select(0, index)
            most = max(1, chunk_bytes // (weight_VH.shape[0] * x_NH.element_size()))
            tokens = x_NH.shape[0]
            chunk = _even_chunk(tokens, most) if isinstance(tokens, int) else most
            stored, left = gradient_scales(x_NH.dtype, inv_denominators[k] * head_weights[k], None, None, options)
            loss_N, _, _, argmax, dx, dw, _, _, _ = chunk_loop(
                x_NH, weight_VH, None, target, None, None, stored, *options, chunk, False, True,
                want[h], want[hidden_count + w], False, False, predicted,
            )  # fmt: skip
            losses.append(loss_N.sum() * inv_denominators[k])
            if predicted:
                hits.append(_loss.accuracy(argmax, target, options.ignore_index))
            if want[h]:
                hidden_sums.add(h, dx, left, index)
            if want[hidden_count + w]:
                weight_sums.add(w, dw, left, None)
            # Before the next head makes its own: at its peak this loop holds one fp32 dW.
            del dx, dw
        ctx.dtypes = [t.dtype for t in tensors]
        ctx.save_for_backward(*hidden_sums.sums, *weight_sums.sums)
        head_losses = torch.stack(losses)
        total = torch.stack([loss * c for loss, c in zip(losses, head_weights, strict=True)]).sum()
        accuracy = torch.stack(hits) if predicted else head_losses.new_empty(0)
        ctx.mark_non_differentiable(head_losses, accuracy)
        return total, head_losses, accuracy

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grads = (
            None if total is None else _loss.scale_rows(total, dloss, None, total.shape[0], dtype)
            for total, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *[None] * 11, *grads


def _apply(
    hiddens: Sequence[Tensor], weights: Sequence[Tensor], targets: Sequence[Tensor],
    inv_denominators: Sequence[Tensor], hidden_of: list[int], weight_of: list[int], head_weights: list[float],
    ignore_index: int, label_smoothing: float, softcap: float | None, logit_scale: float, z_loss: float,
    predicted: bool, chunk_bytes: int, indices: Sequence[Tensor | None] | None = None,
) -> Any:  # fmt: skip
    options = LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    return MultiHeadLinearCrossEntropy.apply(
        len(hiddens), hidden_of, weight_of, targets, inv_denominators, head_weights,
        indices if indices is not None else [None] * len(targets), options, predicted, chunk_bytes,
        torch.is_grad_enabled(), *hiddens, *weights,
    )  # fmt: skip


_multi_head = Differentiable(
    "multi_head_linear_cross_entropy",
    "(Tensor[] hiddens, Tensor[] weights, Tensor[] targets, Tensor[] inv_denominators, int[] hidden_of,"
    " int[] weight_of, float[] head_weights, int ignore_index, float label_smoothing, float? softcap,"
    " float logit_scale, float z_loss, bool predicted, int chunk_bytes) -> (Tensor, Tensor, Tensor)",
    _apply,
)


def multi_head_linear_cross_entropy(
    hiddens: Tensor | Sequence[Tensor],
    weights: Tensor | Sequence[Tensor],
    target: Tensor,
    *,
    shifts: Sequence[int],
    head_weights: Sequence[float] | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: Tensor | float | None = None,
    chunk_bytes: int | None = None,
    outputs: tuple[str, ...] = (),
) -> Tensor | MultiHeadOutput:
    """The weighted sum of K heads' losses, each head predicting `shifts[k]` positions ahead.

    Args:
        hiddens: K tensors (B, T, H), or one that all heads share.
        weights: K tensors (V, H), or one that all heads share.
        target: (B, T), int64 or int32; head k at position t is scored against target[t + shifts[k]].
        shifts: K offsets >= 0; Medusa's head k (k = 1, 2, ...) has k + 1 over unshifted labels.
        head_weights: K factors c_k, 1 each if left out.
        reduction: "mean" (of each head over its own tokens, or over `num_items`) or "sum".
        outputs: more to return: "losses", "accuracy"; see `MultiHeadOutput`.
        ignore_index, label_smoothing, softcap, logit_scale, z_loss, num_items, chunk_bytes: as in
            `linear_cross_entropy`.

    Returns:
        0-dim fp32, or a `MultiHeadOutput` if `outputs` names anything.

    Raises:
        ShapeError, DtypeError, OptionError: see their texts. LabelError: as in `cross_entropy`.
    """
    hidden_list = [hiddens] * len(shifts) if isinstance(hiddens, Tensor) else list(hiddens)
    weight_list = [weights] * len(shifts) if isinstance(weights, Tensor) else list(weights)
    factors = [1.0] * len(shifts) if head_weights is None else [float(c) for c in head_weights]
    options = _loss.check_options(reduction, ignore_index, label_smoothing, softcap, logit_scale, z_loss, num_items, ())
    _check_heads(hidden_list, weight_list, target, shifts, factors, reduction, outputs)
    hidden_unique, hidden_of = _unique(hidden_list)
    weight_unique, weight_of = _unique(weight_list)
    settled = [_settle_dtypes(hidden_unique[0], w, None)[1] for w in weight_unique]
    flat = [_settle_dtypes(h, settled[0], None)[0].reshape(-1, h.shape[-1]) for h in hidden_unique]
    shifted = [shift_left(target, s, ignore_index) for s in shifts]
    targets = [t.reshape(-1).contiguous() for t in shifted]
    acc = torch.promote_types(flat[0].dtype, torch.float32)
    inverses = [_loss.inverse_denominator(t, None, num_items, options, reduction, acc) for t in targets]
    if chunk_bytes is None:
        chunk_bytes, _ = default_chunk_bytes(flat[0])
    args = (
        flat, settled, targets, inverses, hidden_of, weight_of, factors, *options, "accuracy" in outputs, chunk_bytes,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        loss, losses, accuracy = _multi_head(*args)
    else:
        loss, losses, accuracy = _apply(*args, [_rows_that_count(t, None, ignore_index) for t in shifted])
    if not outputs:
        return loss  # type: ignore[no-any-return]
    return MultiHeadOutput(loss, losses if "losses" in outputs else None, accuracy if "accuracy" in outputs else None)


def _unique(tensors: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The distinct tensors, and for each head which of them it uses."""
    distinct: list[Tensor] = []
    which = []
    for tensor in tensors:
        # `is`, not id(): Dynamo guards on the aliasing, not on one object's address.
        known = [i for i, other in enumerate(distinct) if other is tensor]
        if not known:
            distinct.append(tensor)
        which.append(known[0] if known else len(distinct) - 1)
    return distinct, which


def _check_heads(
    hiddens: list[Tensor], weights: list[Tensor], target: Tensor, shifts: Sequence[int], factors: list[float],
    reduction: str, outputs: tuple[str, ...],
) -> None:  # fmt: skip
    if not shifts or not len(hiddens) == len(weights) == len(shifts) == len(factors):
        raise ShapeError(
            f"{len(hiddens)} hiddens, {len(weights)} weights, {len(shifts)} shifts, {len(factors)} head_weights; "
            "each must be one a head."
        )
    if reduction == "none":
        raise OptionError("reduction='none' is not defined for a sum over heads; call linear_cross_entropy per head.")
    if min(shifts) < 0:
        raise OptionError(f"shifts={list(shifts)} must not be negative; a head cannot be scored on the past.")
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise OptionError(f"outputs names {unknown[0]!r}; choose from {', '.join(OUTPUTS)}.")
    check_dtype(*hiddens, *weights)
    for hidden, weight in zip(hiddens, weights, strict=True):
        if hidden.ndim != 3 or weight.ndim != 2 or weight.shape[1] != hidden.shape[2]:
            raise ShapeError(
                f"hidden is {tuple(hidden.shape)}, weight is {tuple(weight.shape)}; they must be (B, T, H) and (V, H)."
            )
        _loss.check_target(target, hidden.shape[:-1], "hidden")


# --- the record: the generic tests and benchmarks differentiate named tensors, so the lists are spelled out -----------


def _gather(inputs: dict[str, Any], name: str) -> Tensor | list[Tensor]:
    found = [inputs.pop(key) for key in sorted(k for k in inputs if k.startswith(name + "_"))]
    return found[0] if len(found) == 1 else found


def _call(target: Tensor, **inputs: Any) -> Any:
    return multi_head_linear_cross_entropy(_gather(inputs, "hidden"), _gather(inputs, "weight"), target, **inputs)


def _oracle(
    target: Tensor, *, shifts: Sequence[int], head_weights: Sequence[float], chunk_bytes: int | None = None,
    **inputs: Any,
) -> Tensor:  # fmt: skip
    hiddens, weights = _gather(inputs, "hidden"), _gather(inputs, "weight")
    losses = []
    for k, (shift, factor) in enumerate(zip(shifts, head_weights, strict=True)):
        hidden = hiddens if isinstance(hiddens, Tensor) else hiddens[k]
        weight = weights if isinstance(weights, Tensor) else weights[k]
        labels = shift_left(target, shift, inputs.get("ignore_index", -100))
        losses.append(factor * linear_cross_entropy_oracle(hidden, weight, labels, **inputs))
    return torch.stack(losses).sum()


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    B, T, H, V = case.shape
    options = dict(case.options)
    hiddens, weights = options.pop("hiddens"), options.pop("weights")
    return {
        "target": make_target((B, T), V, 0.2, -100, device),
        **{f"hidden_{k}": randn(B, T, H, dtype=dtype, device=device) for k in range(hiddens)},
        **{f"weight_{k}": randn(V, H, dtype=dtype, device=device, scale=2.0 / H**0.5) for k in range(weights)},
        **options,
    }


def _cost(target: Tensor, *, shifts: Sequence[int], **inputs: Any) -> Cost:
    hidden, weight = inputs["hidden_0"], inputs["weight_0"]
    N, H, V, K = target.numel(), hidden.shape[-1], weight.shape[0], len(shifts)
    logits_bytes = N * V * hidden.element_size()
    return Cost(
        moved_bytes=K * (2 * (hidden.nbytes + weight.nbytes) + 2 * logits_bytes),
        saved_bytes=sum(t.nbytes for name, t in inputs.items() if name.startswith(("hidden_", "weight_"))),
        flops=6 * K * N * H * V,
    )


_HEADS = {"shifts": (1, 2, 3), "head_weights": (1.0, 0.8, 0.64), "chunk_bytes": 11 * 100 * 4}

MULTI_HEAD_LINEAR_CROSS_ENTROPY = Op(
    name="multi_head_linear_cross_entropy",
    call=_call,
    oracle=_oracle,
    make=_make,
    grads=("hidden_0", "hidden_1", "hidden_2", "weight_0", "weight_1", "weight_2"),
    cases=(
        Case(id="own-heads", shape=(2, 21, 24, 100), options={"hiddens": 3, "weights": 3, **_HEADS}),
        Case(id="shared-trunk", shape=(2, 21, 24, 100), options={"hiddens": 1, "weights": 3, **_HEADS}),
        Case(id="shared-lm-head", shape=(2, 21, 24, 100), options={"hiddens": 3, "weights": 1, **_HEADS}),
        Case(
            id="sum-softcap",
            shape=(2, 21, 24, 100),
            options={"hiddens": 3, "weights": 3, **_HEADS, "reduction": "sum", "softcap": 5.0, "label_smoothing": 0.1},
        ),
        Case(id="num-items", shape=(2, 21, 24, 100), options={"hiddens": 3, "weights": 1, **_HEADS, "num_items": 13}),
        Case(
            id="medusa-1b",
            shape=(2, 512, 2048, 128256),
            small=False,
            options={"hiddens": 3, "weights": 1, **_HEADS, "chunk_bytes": 1 << 27},
        ),
    ),
    cost=_cost,
    errors={"fp32": 2.2e-06, "bf16": 3.9e-03, "fp16": 4.6e-03},
)
