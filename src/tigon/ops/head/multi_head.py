"""Linear + cross entropy for several heads that predict several tokens ahead (Medusa, arXiv 2401.10774, eq. 1).

    L = Σ_k c_k · linear_cross_entropy(blocks_k(hidden_k), weight_k, target shifted left by s_k)
    blocks_k: x ← x + SiLU(x Wᵀ + b), as often as head k has blocks

Head k at position t is scored against target[t + s_k], unless that lies past the end or in another document. The
forward computes all gradients chunk by chunk (`multi_head_loop`), for an upstream gradient of 1; a scalar loss is
linear in it. It keeps one gradient per distinct tensor for the backward, whatever the number of heads. A tensor that
needs no gradient costs no product and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import (
    Context,
    Differentiable,
    check_dtype,
    check_number,
    first_order,
    may_overwrite,
    product_dtype,
)
from tigon.ops.head.cross_entropy import linear_cross_entropy_oracle, scaled_in_place
from tigon.ops.head.inputs import default_chunk_bytes
from tigon.ops.head.multi_head_loop import HeadLayout, LoopCall, WantedGradients, multi_head_loop
from tigon.ops.losses.cross_entropy import Reduction, make_target
from tigon.ops.losses.cross_entropy_rows import scale_rows
from tigon.ops.losses.inputs import (
    LossOptions,
    check_chunk_bytes,
    check_devices,
    check_options,
    check_target,
    check_vector,
    check_vocabulary,
    gradient_scales,
    may_wait,
    number_on,
    tokens_that_count,
)
from tigon.ops.losses.prepared_targets import PreparedTargets, check_shifts, scored
from tigon.ops.products import keeps_graph

# B batch, T positions, N = B·T tokens, H hidden, V vocabulary, K heads.

OUTPUTS = ("losses", "counts", "accuracy")
Block = tuple[Tensor, Tensor]
"""Weight (H, H) and bias (H,) of a residual block."""


class MultiHeadOutput(NamedTuple):
    """The result of `multi_head_linear_cross_entropy` with `outputs`; only `loss` is differentiable.

    loss: 0-dim fp32, Σ_k c_k · loss_k.
    losses: (K,) fp32, each head's loss.
    counts: (K,) int64, the number of tokens that each head was scored on.
    accuracy: (K, 5) fp32, the share of these tokens whose target is among the head's 1, 2, ... 5 largest logits; ties
        count as among them. 0 for a head that was scored on no token.
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


@dataclass(frozen=True, kw_only=True)
class MultiHeadCall:
    """The arguments of one call that are not differentiated."""

    target: Tensor
    positions: Tensor | None
    rows: Tensor | None
    """Flat positions of the tokens that any head is scored on; None for all."""
    inverses: Tensor
    """(K,), 1 / D of each head."""
    factors: Tensor
    """(K,), the heads' weights."""
    layout: HeadLayout
    options: LossOptions
    chunk_bytes: Sequence[int]
    """(least, most)"""
    top: bool


class MultiHeadResults(NamedTuple):
    """The result of the operator."""

    loss: Tensor
    losses: Tensor
    hits: Tensor


class MultiHeadLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, call: MultiHeadCall, counts: tuple[int, int], grad_enabled: bool, *tensors: Tensor
    ) -> MultiHeadResults:
        """`tensors` are hiddens, weights and blocks; `counts` are the numbers of the first two."""
        weights_at, blocks_at = counts[0], sum(counts)
        hiddens, weights, blocks = tensors[:weights_at], tensors[weights_at:blocks_at], tensors[blocks_at:]
        want = [grad_enabled and need for need in ctx.needs_input_grad[-len(tensors) :]]
        stored_K, left = _common_scale(hiddens[0].dtype, call.inverses * call.factors, call.options)
        sums_K, hits, dx, dw, db = multi_head_loop(
            hiddens, weights, blocks,
            LoopCall(
                target=call.target, positions=call.positions, rows=call.rows, stored=stored_K, layout=call.layout,
                wanted=WantedGradients(want[:weights_at], want[weights_at:blocks_at], want[blocks_at:]),
                options=call.options, chunk_bytes=call.chunk_bytes, top=call.top,
            ),
        )  # fmt: skip
        ctx.want, ctx.dtypes = want, [t.dtype for t in tensors]
        # Not saved tensors, because they are scaled in place and returned. `left` is a saved tensor, so that autograd
        # refuses a second backward of a graph that was not retained.
        ctx.gradients = [*dx, *dw, *db]
        ctx.save_for_backward(left)
        losses_K = sums_K * call.inverses
        ctx.mark_non_differentiable(losses_K, hits)
        return MultiHeadResults((losses_K * call.factors).sum(), losses_K, hits)

    @staticmethod
    @first_order
    def backward(ctx: Context, dloss: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        (left,) = ctx.saved_tensors
        scale, gradients, once = dloss * left, ctx.gradients, not keeps_graph()
        if once:
            ctx.gradients = None  # the rest of the model's backward needs their memory
        grads: list[Tensor | None] = []
        for i, (wanted, dtype) in enumerate(zip(ctx.want, ctx.dtypes, strict=True)):
            gradient, gradients[i] = gradients[i], gradients[i] if not once else None
            if not wanted:
                grads.append(None)
            elif once and gradient.dtype == dtype and gradient.ndim == 2 and may_overwrite(gradient):
                grads.append(scaled_in_place(gradient, scale))
            elif gradient.ndim == 1:
                grads.append((gradient * scale).to(dtype))
            else:
                grads.append(scale_rows(gradient, scale, None, gradient.shape[0], dtype))
            del gradient
        return None, None, None, *grads


def _common_scale(dtype: torch.dtype, scales_K: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """(scale of each head's stored gradients, factor still to multiply by).

    In fp16, the head with the largest scale stores its gradients as `gradient_scales` says. The others store theirs in
    proportion, so that one remaining factor fits all heads.
    """
    if dtype != torch.float16:
        return scales_K, torch.ones_like(scales_K[0])
    stored, left = gradient_scales(dtype, torch.ones_like(scales_K[0]), None, None, options)
    assert left is not None, "fp16 always leaves a factor"
    largest = scales_K.abs().amax()
    largest = torch.where(largest > 0, largest, 1.0)
    return scales_K / largest * stored, left * largest


def _apply(
    hiddens: Sequence[Tensor], weights: Sequence[Tensor], blocks: Sequence[Tensor], call: MultiHeadCall
) -> MultiHeadResults:
    counts = len(hiddens), len(weights)
    results = MultiHeadLinearCrossEntropy.apply(call, counts, torch.is_grad_enabled(), *hiddens, *weights, *blocks)
    return MultiHeadResults(*results)


_multi_head = Differentiable("multi_head_linear_cross_entropy", _apply)


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
    """Compute the weighted sum of K heads' losses, where head k predicts `shifts[k]` positions ahead.

    Args:
        hiddens: K tensors (B, T, H), or one that all heads share.
        weights: K tensors (V, H), or one that all heads share.
        target: (B, T), int64 or int32; head k at position t is scored against target[t + shifts[k]]. Or the result of
            `prepare_targets` with the same shifts and positions.
        shifts: K offsets >= 0. For labels that are not shifted, Medusa's head k (k = 1, 2, ...) has the offset k + 1.
        blocks: K lists with the residual blocks between each head's hidden state and its output weight. Each block is
            a weight (H, H) and a bias (H,). None: no blocks.
        positions: (B, T), positions inside documents, for packed sequences. A head is not scored if t and
            t + shifts[k] belong to different documents.
        head_weights: K factors c_k, 1 by default. A tensor (K,) can change from step to step without recompilation.
        reduction: "mean" (of each head over its own tokens, or over `num_items`) or "sum".
        outputs: values to return in addition: "losses", "counts", "accuracy"; see `MultiHeadOutput`. "accuracy" adds
            one product per head to the forward.
        ignore_index, label_smoothing, softcap, logit_scale, z_loss, num_items, chunk_bytes: as in
            `linear_cross_entropy`.

    Returns:
        0-dim fp32, or a `MultiHeadOutput` if `outputs` names anything.

    Raises:
        ShapeError: the lists do not all have K >= 1 entries; a hidden is not (B, T, H), a weight not (V, H), a block
            not (H, H) and (H,); target, positions, head_weights or num_items has the wrong shape; H or V is 0; or the
            tensors are on several devices.
        DtypeError: a hidden, weight or block is none of the four floats, target is not int64 or int32, or
            head_weights or num_items is complex.
        OptionError: as in `linear_cross_entropy`; reduction is "none"; a shift is negative or not an integer; a head
            weight is not a finite number; or target was prepared with other shifts, positions or ignore_index.
        LabelError: as in `cross_entropy`.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    prepared = target if isinstance(target, PreparedTargets) else None
    labels: Tensor = prepared.target if prepared is not None else target  # type: ignore[assignment]
    shifts = check_shifts(shifts)
    hidden_list = [hiddens] * len(shifts) if isinstance(hiddens, Tensor) else list(hiddens)
    weight_list = [weights] * len(shifts) if isinstance(weights, Tensor) else list(weights)
    block_lists = [()] * len(shifts) if blocks is None else [tuple(of_head) for of_head in blocks]
    options, num_items = check_options(
        LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss),
        reduction=reduction,
        num_items=num_items,
        outputs=outputs,
        names=OUTPUTS,
    )
    if reduction == "none":
        raise OptionError("reduction='none' is not defined for a sum over heads; call linear_cross_entropy per head.")
    _check_shifts_and_factors(shifts, head_weights)
    n_factors = len(shifts) if head_weights is None else len(head_weights)
    if not shifts or not len(hidden_list) == len(weight_list) == len(block_lists) == n_factors == len(shifts):
        raise ShapeError(
            f"{len(hidden_list)} hiddens, {len(weight_list)} weights, {len(block_lists)} blocks, {len(shifts)} shifts, "
            f"{n_factors} head_weights; there must be one of each per head."
        )
    _check_heads(hidden_list, weight_list, block_lists, labels)
    if positions is not None and positions.shape != labels.shape:
        raise ShapeError(f"positions is {tuple(positions.shape)}, target is {tuple(labels.shape)}; they must agree.")
    check_devices(target=labels, positions=positions)
    if prepared is not None:
        _check_prepared(prepared, tuple(shifts), positions, ignore_index)
    hidden_unique, hidden_of = _unique(hidden_list)
    weight_unique, weight_of = _unique(weight_list)
    dtype = product_dtype(*hidden_unique, *weight_unique)  # one dtype, because all heads use the same buffer
    settled = [w.to(dtype) for w in weight_unique]
    flat = [h.to(dtype).reshape(-1, h.shape[-1]) for h in hidden_unique]
    flat_blocks = [t.to(dtype) for of_head in block_lists for block in of_head for t in block]
    acc = torch.promote_types(dtype, torch.float32)
    counts_K, any_N = scored(labels, positions, shifts, ignore_index)
    check_chunk_bytes(chunk_bytes)
    call = MultiHeadCall(
        target=labels,
        positions=positions,
        inverses=_inverses(counts_K, num_items, reduction, acc),
        factors=_factors(head_weights, counts_K, acc),
        rows=_rows_scored(labels, prepared, any_N),  # last, because it may wait for everything queued on the device
        layout=HeadLayout(list(shifts), hidden_of, weight_of, [len(of_head) for of_head in block_lists]),
        options=options,
        chunk_bytes=default_chunk_bytes(flat[0], chunk_bytes),
        top="accuracy" in outputs,
    )
    apply = _multi_head if torch.compiler.is_compiling() else _apply
    loss, losses, hits = apply(flat, settled, flat_blocks, call)
    if not outputs:
        return loss
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
    """Whether a and b are the same tensor, or views of the same elements."""
    if a is None or b is None or a is b or torch.compiler.is_compiling():
        return (a is None) == (b is None)
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _rows_scored(labels: Tensor, prepared: PreparedTargets | None, any_N: Tensor) -> Tensor | None:
    """Flat positions that at least one head is scored on; None for all, if nearly all are or the host cannot wait."""
    if prepared is not None:
        return prepared.rows() if may_wait(labels) else None
    return tokens_that_count(labels, lambda: any_N)


def _inverses(counts_K: Tensor, num_items: Tensor | float | None, reduction: str, dtype: torch.dtype) -> Tensor:
    """1 / D of each head, 0 if D is 0; never read on the host."""
    if reduction != "mean":
        return torch.ones_like(counts_K, dtype=dtype)
    if num_items is not None:
        denominators = number_on(num_items, dtype, counts_K.device).reshape(-1).expand(counts_K.shape[0])
    else:
        denominators = counts_K.to(dtype)
    inverses: Tensor = torch.where(denominators == 0, 0.0, 1.0 / denominators)
    return inverses


def _factors(head_weights: Tensor | Sequence[float] | None, like_K: Tensor, dtype: torch.dtype) -> Tensor:
    if head_weights is None:
        return torch.ones_like(like_K, dtype=dtype)
    if isinstance(head_weights, Tensor):
        return number_on(head_weights, dtype, like_K.device)
    numbers = [f if isinstance(f, Tensor) else check_number("head_weights", f) for f in head_weights]
    return torch.stack([number_on(number, dtype, like_K.device) for number in numbers])


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


def _check_shifts_and_factors(shifts: Sequence[int], factors: Tensor | Sequence[float] | None) -> None:
    """Raise unless no shift is negative, and there is one finite factor per head or None."""
    if isinstance(factors, Tensor):
        check_vector("head_weights", factors, (len(shifts),))
    for factor in () if factors is None or isinstance(factors, Tensor) else factors:
        # compared, because Dynamo cannot trace math.isfinite
        if not isinstance(factor, Tensor) and not abs(check_number("head_weights", factor)) < math.inf:
            raise OptionError(f"head_weights={list(factors or ())} must be finite.")
    if shifts and min(shifts) < 0:
        raise OptionError(f"shifts={list(shifts)} must not be negative; a head cannot be scored on the past.")


def _check_heads(
    hiddens: list[Tensor], weights: list[Tensor], blocks: Sequence[Sequence[Block]], target: Tensor
) -> None:
    """Raise unless the tensors of the heads fit each other and the target."""
    check_dtype(*hiddens, *weights)
    for hidden, weight, of_head in zip(hiddens, weights, blocks, strict=True):
        if hidden.ndim != 3 or weight.ndim != 2 or weight.shape[1] != hidden.shape[2] or not weight.shape[1]:
            raise ShapeError(
                f"hidden is {tuple(hidden.shape)}, weight is {tuple(weight.shape)}; they must be (B, T, H) and (V, H), "
                "H >= 1."
            )
        H = hidden.shape[2]
        check_vocabulary(weight.shape[0])
        for block, bias in of_head:
            check_dtype(block, bias)
            check_devices(hidden=hidden, block=block, bias=bias)
            if block.shape != (H, H) or bias.shape != (H,):
                raise ShapeError(
                    f"a block is {tuple(block.shape)} with a bias {tuple(bias.shape)}; with hidden "
                    f"{tuple(hidden.shape)} they must be {(H, H)} and {(H,)}."
                )
        check_target(target, hidden.shape[:-1], "hidden")
        check_devices(hidden=hidden, weight=weight, target=target)


# --- the record: the generic tests and benchmarks differentiate named tensors, so the lists are spelled out -----------


def _gather(inputs: dict[str, Any], name: str) -> list[Tensor]:
    return [inputs.pop(key) for key in sorted(k for k in inputs if k.startswith(name + "_"))]


def _operands(inputs: dict[str, Any]) -> tuple[Any, Any, list[list[Block]]]:
    """(hiddens, weights, blocks). Head k gets block k, or none if there are fewer blocks."""
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
    target: Tensor,
    *,
    shifts: Sequence[int],
    head_weights: Sequence[float],
    chunk_bytes: int | None = None,
    **inputs: Any,
) -> Tensor:
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


MULTI_HEAD_LINEAR_CROSS_ENTROPY = Op(
    name="multi_head_linear_cross_entropy",
    call=_call,
    oracle=_oracle,
    make=_make,
    grads=tuple(f"{name}_{k}" for name in _TENSORS for k in range(3)),
    case=Case(
        id="own-heads",
        shape=(2, 21, 24, 100),
        options={
            "hiddens": 3,
            "weights": 3,
            "shifts": (1, 2, 3),
            "head_weights": (1.0, 0.8, 0.64),
            "chunk_bytes": 11 * 100 * 4,
        },
    ),
    cost=_cost,
    errors={"fp32": 4.2e-06, "bf16": 3.8e-03, "fp16": 1.9e-03},
)
