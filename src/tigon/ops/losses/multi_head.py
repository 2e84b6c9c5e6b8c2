"""Linear + cross entropy for several heads that predict several tokens ahead (Medusa, arXiv 2401.10774, eq. 1).

    L = Σ_k c_k · linear_cross_entropy(blocks_k(hidden_k), weight_k, target shifted left by s_k)
    blocks_k: x ← x + SiLU(x Wᵀ + b), as often as head k has blocks

Head k at position t is scored against target[t + s_k], unless that lies past the end or in another document. All of it
happens in the forward, chunk by chunk (`_multi_head_loop`), for an upstream gradient of 1 (a scalar loss is linear in
it): what is kept for the backward is one gradient for each distinct tensor, whatever the number of heads. A tensor that
wants no gradient costs no product and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops._dispatch import Differentiable, check_dtype, check_number, check_whole, first_order, unwatched
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.losses import common
from tigon.ops.losses.common import LossOptions
from tigon.ops.losses.cross_entropy import Reduction, gradient_scales, make_target
from tigon.ops.losses.linear_cross_entropy import (
    PreparedTargets,
    _keeps_graph,
    _may_wait,
    _product_dtype,
    _scaled_in_place,
    default_chunk_bytes,
    linear_cross_entropy_oracle,
    worth_gathering,
)
from tigon.ops.losses.multi_head_loop import multi_head_loop

# B batch, T positions, N = B·T tokens, H hidden, V vocabulary, K heads.

OUTPUTS = ("losses", "counts", "accuracy")
Block = tuple[Tensor, Tensor]
"""Weight (H, H) and bias (H,) of a residual block."""


class MultiHeadOutput(NamedTuple):
    """What `multi_head_linear_cross_entropy` returns when `outputs` names more than the loss; only `loss` is
    differentiable.

    loss: 0-dim fp32, Σ_k c_k · loss_k. losses: (K,) fp32, the heads' own losses. counts: (K,) int64, tokens that each
    head was scored on. accuracy: (K, 5) fp32, the share of them whose target is among the head's 1, 2, ... 5 largest
    logits, a tie counting as among them; 0 where a head was scored on none.
    """

    loss: Tensor
    losses: Tensor | None = None
    counts: Tensor | None = None
    accuracy: Tensor | None = None


def shift_left(target_BT: Tensor, shift: int, ignore_index: int) -> Tensor:
    """(B, T) labels whose position t holds target[t + shift], ignore_index past the end."""
    if shift == 0:
        return target_BT
    shifted = torch.full_like(target_BT, ignore_index)
    if shift < target_BT.shape[1]:
        shifted[:, :-shift] = target_BT[:, shift:]
    return shifted


class MultiHeadLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, target: Tensor, positions: Tensor | None, rows: Tensor | None, inverses_K: Tensor, factors_K: Tensor,
        layout: tuple[list[int], list[int], list[int], list[int]], hidden_count: int, weight_count: int,
        options: LossOptions, chunk_bytes: Sequence[int], top: bool, grad_enabled: bool, *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        heads_end = hidden_count + weight_count
        hiddens, weights, blocks = tensors[:hidden_count], tensors[hidden_count:heads_end], tensors[heads_end:]
        want = [grad_enabled and need for need in ctx.needs_input_grad[-len(tensors) :]]
        stored_K, left = _common_scale(hiddens[0].dtype, inverses_K * factors_K, options)
        sums_K, hits, dx, dw, db = multi_head_loop(
            target, positions, rows, stored_K, hiddens, weights, blocks, *layout,
            want[:hidden_count], want[hidden_count:heads_end], want[heads_end:], *options, chunk_bytes, top,
        )  # fmt: skip
        ctx.want, ctx.dtypes = want, [t.dtype for t in tensors]
        # Not saved tensors, which could not be given away: they are scaled where they lie. `left` is one, so that a
        # second backward of a graph that was not retained is refused.
        ctx.gradients = [*dx, *dw, *db]
        ctx.save_for_backward(left)
        losses_K = sums_K * inverses_K
        ctx.mark_non_differentiable(losses_K, hits)
        return (losses_K * factors_K).sum(), losses_K, hits

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (left,) = ctx.saved_tensors
        scale, gradients, once = dloss * left, ctx.gradients, not _keeps_graph()
        if once:
            ctx.gradients = None  # the rest of the model's backward needs their memory
        found: list[Tensor | None] = []
        for i, (wanted, dtype) in enumerate(zip(ctx.want, ctx.dtypes, strict=True)):
            gradient, gradients[i] = gradients[i], gradients[i] if not once else None
            if not wanted:
                found.append(None)
            elif once and gradient.dtype == dtype and gradient.ndim == 2 and unwatched((gradient,)):
                found.append(_scaled_in_place(gradient, scale))
            elif gradient.ndim == 1:
                found.append((gradient * scale).to(dtype))
            else:
                found.append(common.scale_rows(gradient, scale, None, gradient.shape[0], dtype))
            del gradient
        return *[None] * 12, *found


def _common_scale(dtype: torch.dtype, scales_K: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """(scale of each head's stored gradients, what is left to multiply by); fp16 stores those of the head with the
    largest scale as `gradient_scales` wants them, and the others' in proportion, so that one factor is left for all."""
    if dtype != torch.float16:
        return scales_K, torch.ones_like(scales_K[0])
    stored, left = gradient_scales(dtype, torch.ones_like(scales_K[0]), None, None, options)
    assert left is not None, "fp16 always leaves a factor"
    largest = scales_K.abs().amax()
    largest = torch.where(largest > 0, largest, 1.0)
    return scales_K / largest * stored, left * largest


def _apply(
    target: Tensor, positions: Tensor | None, rows: Tensor | None, inverses_K: Tensor, factors_K: Tensor,
    hiddens: Sequence[Tensor], weights: Sequence[Tensor], blocks: Sequence[Tensor],
    shifts: list[int], hidden_of: list[int], weight_of: list[int], block_counts: list[int],
    ignore_index: int, label_smoothing: float, softcap: float | None, logit_scale: float, z_loss: float,
    chunk_bytes: Sequence[int], top: bool,
) -> Any:  # fmt: skip
    options = LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    layout = (list(shifts), list(hidden_of), list(weight_of), list(block_counts))
    return MultiHeadLinearCrossEntropy.apply(
        target, positions, rows, inverses_K, factors_K, layout, len(hiddens), len(weights), options, chunk_bytes, top,
        torch.is_grad_enabled(), *hiddens, *weights, *blocks,
    )  # fmt: skip


_multi_head = Differentiable(
    "multi_head_linear_cross_entropy",
    "(Tensor target, Tensor? positions, Tensor? rows, Tensor inverses, Tensor factors, Tensor[] hiddens,"
    " Tensor[] weights, Tensor[] blocks, int[] shifts, int[] hidden_of, int[] weight_of, int[] block_counts,"
    " int ignore_index, float label_smoothing, float? softcap, float logit_scale, float z_loss, int[] chunk_bytes,"
    " bool top) -> (Tensor, Tensor, Tensor)",
    _apply,
)


def multi_head_linear_cross_entropy(
    hiddens: Tensor | Sequence[Tensor],
    weights: Tensor | Sequence[Tensor],
    target: Tensor | PreparedTargets,
    *,
    shifts: Sequence[int],
    blocks: Sequence[Sequence[Block]] | None = None,
    positions: Tensor | None = None,
    head_weights: Tensor | Sequence[float] | None = None,
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
        target: (B, T), int64 or int32; head k at position t is scored against target[t + shifts[k]]. Or what
            `prepare_targets` made of it, with the same shifts and positions.
        shifts: K offsets >= 0; Medusa's head k (k = 1, 2, ...) has k + 1 over unshifted labels.
        blocks: of each head, the residual blocks between its hidden state and its output weight, each a weight (H, H)
            and a bias (H,); none if left out.
        positions: (B, T), positions inside documents, for rows that hold several: a head is not scored where t and
            t + shifts[k] are of different ones.
        head_weights: K factors c_k, 1 each if left out; a tensor (K,) changes from step to step without a new graph.
        reduction: "mean" (of each head over its own tokens, or over `num_items`) or "sum".
        outputs: more to return: "losses", "counts", "accuracy"; see `MultiHeadOutput`. Accuracy costs each head
            another product of the forward.
        ignore_index, label_smoothing, softcap, logit_scale, z_loss, num_items, chunk_bytes: as in
            `linear_cross_entropy`.

    Returns:
        0-dim fp32, or a `MultiHeadOutput` if `outputs` names anything.

    Raises:
        ShapeError, DtypeError, OptionError: see their texts. LabelError: as in `cross_entropy`.
    """
    prepared = target if isinstance(target, PreparedTargets) else None
    labels: Tensor = prepared.target if prepared is not None else target  # type: ignore[assignment]
    hidden_list = [hiddens] * len(shifts) if isinstance(hiddens, Tensor) else list(hiddens)
    weight_list = [weights] * len(shifts) if isinstance(weights, Tensor) else list(weights)
    block_lists = [()] * len(shifts) if blocks is None else [tuple(of_head) for of_head in blocks]
    options = common.check_options(
        reduction, ignore_index, label_smoothing, softcap, logit_scale, z_loss, num_items, ()
    )
    _check_heads(hidden_list, weight_list, block_lists, labels, shifts, head_weights, reduction, outputs)
    if positions is not None and positions.shape != labels.shape:
        raise ShapeError(f"positions is {tuple(positions.shape)}, target is {tuple(labels.shape)}; they must agree.")
    common.check_devices(target=labels, positions=positions)
    if prepared is not None:
        _check_prepared(prepared, tuple(shifts), positions, ignore_index)
    hidden_unique, hidden_of = _unique(hidden_list)
    weight_unique, weight_of = _unique(weight_list)
    dtype = _product_dtype(*hidden_unique, *weight_unique)  # one for all: the heads take turns with one buffer
    settled = [w.to(dtype) for w in weight_unique]
    flat = [h.to(dtype).reshape(-1, h.shape[-1]) for h in hidden_unique]
    flat_blocks = [t.to(dtype) for of_head in block_lists for block in of_head for t in block]
    acc = torch.promote_types(dtype, torch.float32)
    counts_K, any_N = common.scored(labels, positions, shifts, ignore_index)
    common.check_chunk_bytes(chunk_bytes)
    least_most = default_chunk_bytes(flat[0]) if chunk_bytes is None else (chunk_bytes, chunk_bytes)
    inverses_K, factors_K = _inverses(counts_K, num_items, reduction, acc), _factors(head_weights, counts_K, acc)
    rows = _rows_scored(labels, prepared, any_N)  # last: it may wait for the device, which then has nothing left to do
    loss, losses, hits = _multi_head(
        labels, positions, rows, inverses_K, factors_K, flat, settled, flat_blocks, list(shifts), hidden_of, weight_of,
        [len(of_head) for of_head in block_lists], *options, list(least_most), "accuracy" in outputs,
    )  # fmt: skip
    if not outputs:
        return loss  # type: ignore[no-any-return]
    return MultiHeadOutput(
        loss,
        losses if "losses" in outputs else None,
        counts_K if "counts" in outputs else None,
        hits.to(acc) / counts_K.clamp(min=1).unsqueeze(1) if "accuracy" in outputs else None,
    )


def _check_prepared(
    prepared: PreparedTargets, shifts: tuple[int, ...], positions: Tensor | None, ignore_index: int
) -> None:
    was, now = (prepared.shifts, prepared.ignore_index), (shifts, ignore_index)
    if was != now or not _same(prepared.positions, positions):
        raise OptionError(
            f"target was prepared for shifts {was[0]} and ignore_index {was[1]}, the heads have {now[0]} and {now[1]}; "
            "or for other positions. Give prepare_targets the same."
        )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether they are one tensor, or views of the same elements."""
    if a is None or b is None or a is b or torch.compiler.is_compiling():
        return (a is None) == (b is None)
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _rows_scored(labels: Tensor, prepared: PreparedTargets | None, any_N: Tensor) -> Tensor | None:
    """Flat positions that any head is scored on; None for all, where hardly any is not or the host may not wait."""
    if not _may_wait(labels):
        return None
    if prepared is not None:
        return prepared.rows()
    return worth_gathering(any_N.nonzero().squeeze(1), any_N.numel())


def _inverses(counts_K: Tensor, num_items: Tensor | float | None, reduction: str, dtype: torch.dtype) -> Tensor:
    """1 / D of each head, 0 where D is 0; never read on the host."""
    if reduction != "mean":
        return torch.ones_like(counts_K, dtype=dtype)
    if num_items is not None:
        denominators = common.number_on(num_items, dtype, counts_K.device).reshape(-1).expand(counts_K.shape[0])
    else:
        denominators = counts_K.to(dtype)
    inverses: Tensor = torch.where(denominators == 0, 0.0, 1.0 / denominators)
    return inverses


def _factors(head_weights: Tensor | Sequence[float] | None, like_K: Tensor, dtype: torch.dtype) -> Tensor:
    if head_weights is None:
        return torch.ones_like(like_K, dtype=dtype)
    if isinstance(head_weights, Tensor):
        return common.number_on(head_weights, dtype, like_K.device)
    return torch.stack([common.number_on(factor, dtype, like_K.device) for factor in head_weights])


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
    hiddens: list[Tensor], weights: list[Tensor], blocks: Sequence[Sequence[Block]], target: Tensor,
    shifts: Sequence[int], factors: Tensor | Sequence[float] | None, reduction: str, outputs: tuple[str, ...],
) -> None:  # fmt: skip
    if isinstance(factors, Tensor):
        common.check_vector("head_weights", factors, (len(shifts),))
    n_factors = len(shifts) if factors is None else len(factors)
    if not shifts or not len(hiddens) == len(weights) == len(blocks) == n_factors == len(shifts):
        raise ShapeError(
            f"{len(hiddens)} hiddens, {len(weights)} weights, {len(blocks)} blocks, {len(shifts)} shifts, {n_factors} "
            "head_weights; each must be one a head."
        )
    if reduction == "none":
        raise OptionError("reduction='none' is not defined for a sum over heads; call linear_cross_entropy per head.")
    for shift in shifts:
        check_whole("shifts", shift)
    for factor in () if factors is None or isinstance(factors, Tensor) else factors:
        # compared, because Dynamo cannot trace math.isfinite
        if not isinstance(factor, Tensor) and not abs(check_number("head_weights", factor)) < math.inf:
            raise OptionError(f"head_weights={list(factors or ())} must be finite.")
    if min(shifts) < 0:
        raise OptionError(f"shifts={list(shifts)} must not be negative; a head cannot be scored on the past.")
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise OptionError(f"outputs names {unknown[0]!r}; choose from {', '.join(OUTPUTS)}.")
    check_dtype(*hiddens, *weights)
    for hidden, weight, of_head in zip(hiddens, weights, blocks, strict=True):
        if hidden.ndim != 3 or weight.ndim != 2 or weight.shape[1] != hidden.shape[2] or not weight.shape[1]:
            raise ShapeError(
                f"hidden is {tuple(hidden.shape)}, weight is {tuple(weight.shape)}; they must be (B, T, H) and (V, H), "
                "H >= 1."
            )
        H = hidden.shape[2]
        common.check_vocabulary(weight.shape[0])
        for block, bias in of_head:
            check_dtype(block, bias)
            common.check_devices(hidden=hidden, block=block, bias=bias)
            if block.shape != (H, H) or bias.shape != (H,):
                raise ShapeError(
                    f"a block is {tuple(block.shape)} with a bias {tuple(bias.shape)}; with hidden "
                    f"{tuple(hidden.shape)} they must be {(H, H)} and {(H,)}."
                )
        common.check_target(target, hidden.shape[:-1], "hidden")
        common.check_devices(hidden=hidden, weight=weight, target=target)


# --- the record: the generic tests and benchmarks differentiate named tensors, so the lists are spelled out -----------


def _gather(inputs: dict[str, Any], name: str) -> list[Tensor]:
    return [inputs.pop(key) for key in sorted(k for k in inputs if k.startswith(name + "_"))]


def _operands(inputs: dict[str, Any]) -> tuple[Any, Any, list[list[Block]]]:
    """(hiddens, weights, blocks); a single block is every head's."""
    hiddens, weights = _gather(inputs, "hidden"), _gather(inputs, "weight")
    blocks = list(zip(_gather(inputs, "block"), _gather(inputs, "bias"), strict=True))
    return (
        hiddens[0] if len(hiddens) == 1 else hiddens,
        weights[0] if len(weights) == 1 else weights,
        [[blocks[k]] if k < len(blocks) else [] for k in range(len(inputs["shifts"]))],
    )


def _call(target: Tensor, **inputs: Any) -> Any:
    hiddens, weights, blocks = _operands(inputs)
    return multi_head_linear_cross_entropy(hiddens, weights, target, blocks=blocks, **inputs)


def _oracle(
    target: Tensor, *, shifts: Sequence[int], head_weights: Sequence[float], chunk_bytes: int | None = None,
    **inputs: Any,
) -> Tensor:  # fmt: skip
    hiddens, weights, blocks = _operands({"shifts": shifts, **inputs})
    inputs = {name: value for name, value in inputs.items() if name.split("_")[0] not in _TENSORS}
    losses = []
    for k, (shift, factor) in enumerate(zip(shifts, head_weights, strict=True)):
        x = hiddens if isinstance(hiddens, Tensor) else hiddens[k]
        weight = weights if isinstance(weights, Tensor) else weights[k]
        for block, bias in blocks[k]:
            x = x + F.silu(F.linear(x, block, bias))
        labels = shift_left(target, shift, inputs.get("ignore_index", -100))
        losses.append(factor * linear_cross_entropy_oracle(x, weight, labels, **inputs))
    return torch.stack(losses).sum()


_TENSORS = ("hidden", "weight", "block", "bias")


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    B, T, H, V = case.shape
    options = dict(case.options)
    counts = {name: options.pop(f"{name}s", 0) for name in ("hidden", "weight", "block")}
    shapes = {"hidden": (B, T, H), "weight": (V, H), "block": (H, H), "bias": (H,)}
    counts["bias"] = counts["block"]
    scales = {"weight": 2.0 / H**0.5, "block": 1.0 / H**0.5}
    tensors = {
        f"{name}_{k}": randn(*shapes[name], dtype=dtype, device=device, scale=scales.get(name, 1.0))
        for name in _TENSORS
        for k in range(counts[name])
    }
    return {"target": make_target((B, T), V, 0.2, -100, device), **tensors, **options}


def _cost(target: Tensor, *, shifts: Sequence[int], **inputs: Any) -> Cost:
    hidden, weight = inputs["hidden_0"], inputs["weight_0"]
    N, H, V, K = target.numel(), hidden.shape[-1], weight.shape[0], len(shifts)
    blocks = sum(name.startswith("block_") for name in inputs)
    logits_bytes = N * V * hidden.element_size()
    return Cost(
        moved_bytes=K * (2 * (hidden.nbytes + weight.nbytes) + 2 * logits_bytes),
        saved_bytes=sum(t.nbytes for name, t in inputs.items() if name.split("_")[0] in _TENSORS),
        flops=6 * N * H * (K * V + blocks * H),
    )


_HEADS = {"shifts": (1, 2, 3), "head_weights": (1.0, 0.8, 0.64), "chunk_bytes": 11 * 100 * 4}

MULTI_HEAD_LINEAR_CROSS_ENTROPY = Op(
    name="multi_head_linear_cross_entropy",
    call=_call,
    oracle=_oracle,
    make=_make,
    grads=tuple(f"{name}_{k}" for name in _TENSORS for k in range(3)),
    cases=(
        Case(id="own-heads", shape=(2, 21, 24, 100), options={"hiddens": 3, "weights": 3, **_HEADS}),
        Case(id="shared-trunk", shape=(2, 21, 24, 100), options={"hiddens": 1, "weights": 3, **_HEADS}),
        Case(id="shared-lm-head", shape=(2, 21, 24, 100), options={"hiddens": 3, "weights": 1, **_HEADS}),
        Case(id="medusa", shape=(2, 21, 24, 100), options={"hiddens": 1, "weights": 3, "blocks": 3, **_HEADS}),
        Case(id="medusa-shared", shape=(2, 21, 24, 100), options={"hiddens": 1, "weights": 1, "blocks": 3, **_HEADS}),
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
            options={"hiddens": 1, "weights": 1, "blocks": 3, **_HEADS, "chunk_bytes": 1 << 27},
        ),
    ),
    cost=_cost,
    errors={"fp32": 4.2e-06, "bf16": 3.8e-03, "fp16": 1.9e-03},
)
