"""Linear + cross entropy: the loss of `hidden @ weight.T + bias` without holding all the logits at once.

Tokens are processed in chunks. For each chunk, one matrix product writes the logits into a reused buffer, in fp32 (in
fp64 for fp64 inputs). One pass turns them into their gradient (kernels/cross_entropy.py), and two products reduce
that to the gradients of hidden and weight. On Hopper the product of bf16 may write exponentials instead
(`chunk_loop.py`). The products take most of the time; they are the vendor's and run at the hardware's rate.

`chunk_plan.py` chooses the chunks, and what is kept for backward.

Ignored tokens are dropped before the products, so they cost no time. The host needs the number of the remaining tokens.
This one small copy waits for the device, unless `prepare_targets` has started it before the model's forward. Under
torch.compile and CUDA graphs the host cannot wait, so every row is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError
from tigon.ops import dispatch
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.accumulation_fusion import LeafGradient, gradient_to_add_to
from tigon.ops.dispatch import Differentiable, can_bypass_dispatcher, first_order
from tigon.ops.gradient_sums import add_scaled_
from tigon.ops.lm_head import (
    check_head,
    keeps_graph,
    may_wait,
    no_autocast,
    product_into,
    settle_dtypes,
    spread,
    worth_gathering,
)  # fmt: skip
from tigon.ops.losses import common
from tigon.ops.losses.chunk_loop import (
    ChunkOptions,
    ChunkTensors,
    add_exp_weight_grad,
    chunk_loop,
    exp_hidden_grad,
    exp_weight_grad,
    needs_fp32_logits,
)
from tigon.ops.losses.chunk_plan import MIB, TILE, default_chunk_bytes, plan_for
from tigon.ops.losses.common import LossOutput, LossResults
from tigon.ops.losses.cross_entropy import LOSS_OPTIONS, Reduction, cross_entropy_oracle, loss_inputs
from tigon.ops.losses.divided_cross_entropy import DividedLoss, divided_cross_entropy
from tigon.ops.losses.head_adapter import check_adapter, low_rank_hidden
from tigon.ops.losses.options import LossOptions, check_chunk_bytes, check_options, check_vector
from tigon.ops.losses.prepared_targets import PreparedTargets
from tigon.ops.vocab_parallel import VocabParallelOptions, divided_head, refuse_options

# N tokens, n tokens that are not ignored, C tokens of a chunk, H hidden, V vocabulary, R rank of an adapter.

# Bytes alive at once of an fp32 product that is then scaled and rounded. This has enough tiles for the product's full
# rate; a whole 128256 x 2048 product would take 1 GiB on top of the kept logits.
_PRODUCT_BYTES = 64 * MIB

# Reading the count on the host leaves the GPU idle for 0.7 ms (H200, 4096 x 2048 x 50264: the time of the step minus
# that of its kernels, commit a3809ce). Three products with this many operations take about as long.
_WORTH_A_WAIT_FLOPS = 5 * 10**11


def rows_that_count(
    target: Tensor, prepared: PreparedTargets | None, ignore_index: int, weight_VH: Tensor
) -> Tensor | None:
    """Flat positions of the labels that are not ignored, or None to use all rows.

    All rows are used if few are ignored, if the host cannot wait for the count, or if waiting takes longer than the
    products of all rows.
    """
    if not may_wait(target):
        return None
    if prepared is not None:
        return prepared.rows()
    if target.is_cuda and 6 * target.numel() * weight_VH.numel() < _WORTH_A_WAIT_FLOPS:
        return None
    index_N = (target.reshape(-1) != ignore_index).nonzero().squeeze(1)
    return worth_gathering(index_N, target.numel())


# --- autograd ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropyCall:
    """The arguments of one call that are not differentiated."""

    target: Tensor
    class_weight: Tensor | None
    token_weight: Tensor | None
    inv_denominator: Tensor
    index: Tensor | None
    """Flat positions of the tokens that count; None for all."""
    options: LossOptions
    per_row: bool
    entropy: bool
    predicted: bool
    chunk_bytes: Sequence[int]
    """(least, most)"""
    fp32_accumulate: bool
    memory_bytes: int
    """The most bytes of logits and of the weight's gradient; 0 for no limit."""

    def gathered(self) -> tuple[Tensor, Tensor | None]:
        """(target, token_weight) of the tokens that count."""
        if self.index is None:
            return self.target, self.token_weight
        weight = None if self.token_weight is None else self.token_weight.index_select(0, self.index)
        return self.target.index_select(0, self.index), weight


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias: Tensor | None, low_NR: Tensor | None,
        lora_b_VR: Tensor | None, call: LinearCrossEntropyCall, grad_enabled: bool, leaf: LeafGradient | None,
    ) -> LossResults:  # fmt: skip
        want = tuple(grad_enabled and need for need in ctx.needs_input_grad[:5])
        rows, index, class_weight = hidden_NH.shape[0], call.index, call.class_weight
        if index is not None:
            hidden_NH = hidden_NH.index_select(0, index)
            low_NR = None if low_NR is None else low_NR.index_select(0, index)
        b_dtype = None if lora_b_VR is None else lora_b_VR.dtype
        lora_b_VR = None if lora_b_VR is None else lora_b_VR.to(hidden_NH.dtype)
        target, token_weight = call.gathered()
        other_outputs = want[2] or call.entropy or call.predicted or low_NR is not None
        plan = plan_for(
            hidden_NH, weight_VH, call.per_row, want, call.chunk_bytes, call.fp32_accumulate, call.memory_bytes,
            fp32_logits=needs_fp32_logits(hidden_NH, weight_VH, call.options, other_outputs),
        )  # fmt: skip
        stored, left = common.gradient_scales(
            hidden_NH.dtype, call.inv_denominator, token_weight, class_weight, call.options
        )
        in_forward = plan.mode in ("keep", "stream")
        want_hidden, want_weight, want_bias, want_low, want_lora_b = (w and in_forward for w in want)
        chunks = chunk_loop(
            ChunkTensors(
                hidden_NH=hidden_NH, weight_VH=weight_VH, bias=bias, target=target, class_weight=class_weight,
                token_weight=token_weight, grad_scale=stored, low_NR=low_NR, lora_b_VR=lora_b_VR,
            ),
            ChunkOptions(
                loss=call.options, chunk=plan.chunk, logit_tokens=plan.logit_tokens, keep=plan.mode == "keep",
                fp32_accumulate=plan.fp32_accumulate,
                want_hidden=want_hidden, want_weight=want_weight, want_bias=want_bias, entropy=call.entropy,
                predicted=call.predicted, want_low=want_low, want_lora_b=want_lora_b,
            ),
        )  # fmt: skip
        ctx.plan, ctx.options, ctx.want, ctx.rows, ctx.leaf = plan, call.options, want, rows, leaf
        ctx.dtypes = (hidden_NH.dtype, weight_VH.dtype, None if bias is None else bias.dtype, b_dtype)
        if plan.mode == "keep":
            ctx.save_for_backward(
                chunks.kept_NV, chunks.factors, hidden_NH, weight_VH, target, chunks.db_V, left, index, low_NR,
                lora_b_VR,
            )  # fmt: skip
        elif plan.mode == "stream":
            # Not a saved tensor, because a dW in its final dtype is scaled in place and returned.
            ctx.dw = chunks.dw_VH
            ctx.save_for_backward(chunks.dx_NH, chunks.db_V, left, index, chunks.dlow_NR, chunks.dlora_b_VR)
        elif plan.mode == "recompute":
            ctx.save_for_backward(
                hidden_NH, weight_VH, bias, target, class_weight, token_weight, call.inv_denominator, index, low_NR,
                lora_b_VR,
            )  # fmt: skip
        # Without a reduction, the losses return to their original positions.
        per_row, inverse, stats = call.per_row, call.inv_denominator, chunks.stats
        results = LossResults(
            loss=spread(chunks.loss, index, rows, 0) if per_row else common.sum_times(chunks.loss, inverse),
            stats=stats if index is None else stats.new_zeros((3, rows)).index_copy_(1, index, stats),
            entropy=spread(chunks.entropy, index, rows, 0) if call.entropy else chunks.entropy,
            predicted=(
                spread(chunks.predicted, index, rows, call.options.ignore_index) if call.predicted else chunks.predicted
            ),
        )
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grads = _BACKWARD[ctx.plan.mode](ctx, dloss)
        return *(g if want else None for g, want in zip(grads, ctx.want, strict=True)), None, None, None


def _backward_keep(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    g_NV, factors, x_NH, weight_VH, target, db, left, index, low_NR, lora_b_VR = ctx.saved_tensors
    want_hidden, want_weight, want_bias, want_low, want_lora_b = ctx.want
    x_dtype, w_dtype, bias_dtype, b_dtype = ctx.dtypes
    scale = dloss if left is None else dloss * left
    dx = dw = dlow = dlora_b = None
    grad_VH = gradient_to_add_to(ctx.leaf) if want_weight else None
    # dW first, so that the scaled X is freed before dX is allocated.
    if factors.numel():
        factors = factors * scale
        if grad_VH is not None:
            add_exp_weight_grad(g_NV, x_NH, factors, target, grad_VH)
        elif want_weight:
            dw = exp_weight_grad(g_NV, x_NH, factors, target)
        dx = exp_hidden_grad(g_NV, weight_VH, factors, target, index, ctx.rows) if want_hidden else None
        return dx, dw, None, None, None
    with no_autocast(g_NV):
        if grad_VH is not None:
            _weight_grad_into(g_NV, x_NH, scale, grad_VH, accumulate=True)
        elif want_weight:
            dw = _weight_grad(g_NV, x_NH, scale, w_dtype)
        if want_lora_b:
            dlora_b = _weight_grad(g_NV, low_NR, scale, b_dtype)
        if want_low:
            dlow = _hidden_grad(g_NV, lora_b_VR, scale, index, ctx.rows, x_dtype)
        if want_hidden:
            dx = _hidden_grad(g_NV, weight_VH, scale, index, ctx.rows, x_dtype)
    return dx, dw, (db * scale).to(bias_dtype) if want_bias else None, dlow, dlora_b


def _hidden_grad(
    g_NV: Tensor, weight_VH: Tensor, scale: Tensor, index: Tensor | None, rows: int, dtype: torch.dtype
) -> Tensor:
    """scale · G W in `dtype`, at the positions `index` of `rows` rows."""
    # An fp16 gradient stays in fp32 until the loss scale is applied.
    shape = (g_NV.shape[0], weight_VH.shape[1])
    product = g_NV.new_empty(shape, dtype=scale.dtype if dtype == torch.float16 else dtype)
    product_into(g_NV, weight_VH, product, accumulate=False)
    return common.scale_rows(product, scale, index, rows, dtype)  # type: ignore[no-any-return]


def _weight_grad(g_NV: Tensor, x_NH: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale · Gᵀ X in `dtype`."""
    dw_VH = x_NH.new_empty((g_NV.shape[1], x_NH.shape[1]), dtype=dtype)
    _weight_grad_into(g_NV, x_NH, scale, dw_VH, accumulate=False)
    return dw_VH


def _weight_grad_into(g_NV: Tensor, x_NH: Tensor, scale: Tensor, out_VH: Tensor, *, accumulate: bool) -> None:
    """out (+)= scale · Gᵀ X.

    The scale is applied to X, which is V / N times smaller than dW. In fp16 a loss scale on X would overflow, so the
    product is computed in fp32 and scaled, a block of rows at a time.
    """
    V, H = out_VH.shape
    if x_NH.dtype != torch.float16:
        scaled = common.scale_rows(x_NH, scale, None, x_NH.shape[0], x_NH.dtype)
        product_into(g_NV.t(), scaled, out_VH, accumulate=accumulate)
        return
    most = max(TILE, _PRODUCT_BYTES // (H * scale.element_size()) // TILE * TILE)
    product = x_NH.new_empty((min(most, V), H), dtype=scale.dtype)
    for start in range(0, V, most):
        rows = out_VH[start : start + most]
        product_into(g_NV.t()[start : start + most], x_NH, product[: len(rows)], accumulate=False)
        if accumulate:
            add_scaled_(rows, product[: len(rows)], scale)
        else:
            torch.mul(product[: len(rows)], scale, out=rows)


def _backward_stream(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    # Raises in a second backward of a graph that was not retained.
    dx, db, left, index, dlow, dlora_b = ctx.saved_tensors
    want_hidden, want_weight, want_bias, want_low, want_lora_b = ctx.want
    x_dtype, w_dtype, bias_dtype, b_dtype = ctx.dtypes
    scale = dloss if left is None else dloss * left
    dw, once = ctx.dw, not keeps_graph()
    if once:
        ctx.dw = None  # the rest of the model's backward needs its memory
    grad_VH = gradient_to_add_to(ctx.leaf) if want_weight else None
    if grad_VH is not None:
        add_scaled_(grad_VH, dw, scale)
        dw = None
    elif once and dw.dtype == w_dtype and can_bypass_dispatcher((dw,)):
        dw = _scaled_in_place(dw, scale)
    elif want_weight:
        dw = common.scale_rows(dw, scale, None, dw.shape[0], w_dtype)
    return (
        common.scale_rows(dx, scale, index, ctx.rows, x_dtype) if want_hidden else None,
        dw if want_weight else None,
        (db * scale).to(bias_dtype) if want_bias else None,
        common.scale_rows(dlow, scale, index, ctx.rows, x_dtype) if want_low else None,
        (dlora_b * scale).to(b_dtype) if want_lora_b else None,
    )


def _scaled_in_place(x_NH: Tensor, scale: Tensor) -> Tensor:
    if dispatch.uses_kernel(x_NH):
        from tigon.kernels.cross_entropy import scale_rows_

        return scale_rows_(x_NH, scale)  # type: ignore[no-any-return]
    return x_NH.mul_(scale)


def _backward_recompute(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    (
        x_NH, weight_VH, bias, target, class_weight, token_weight, inv_denominator, index, low_NR, lora_b_VR,
    ) = ctx.saved_tensors  # fmt: skip
    want_hidden, want_weight, want_bias, want_low, want_lora_b = ctx.want
    x_dtype, w_dtype, bias_dtype, b_dtype = ctx.dtypes
    per_token = (dloss if index is None else dloss.index_select(0, index)).contiguous()
    if token_weight is not None:
        per_token = per_token * token_weight
    stored, left = common.gradient_scales(x_dtype, inv_denominator, per_token, class_weight, ctx.options)
    left = torch.ones_like(stored) if left is None else left
    results = chunk_loop(
        ChunkTensors(
            hidden_NH=x_NH, weight_VH=weight_VH, bias=bias, target=target, class_weight=class_weight,
            token_weight=per_token, grad_scale=stored, low_NR=low_NR, lora_b_VR=lora_b_VR,
        ),
        ChunkOptions(
            loss=ctx.options, chunk=ctx.plan.chunk, logit_tokens=ctx.plan.logit_tokens,
            fp32_accumulate=ctx.plan.fp32_accumulate,
            want_hidden=want_hidden, want_weight=want_weight, want_bias=want_bias, want_low=want_low,
            want_lora_b=want_lora_b,
        ),
    )  # fmt: skip
    dx, dw, db = results.dx_NH, results.dw_VH, results.db_V
    grad_VH = gradient_to_add_to(ctx.leaf) if want_weight else None
    if grad_VH is not None:
        add_scaled_(grad_VH, dw, left)
    return (
        common.scale_rows(dx, left, index, ctx.rows, x_dtype) if want_hidden else None,
        common.scale_rows(dw, left, None, dw.shape[0], w_dtype) if want_weight and grad_VH is None else None,
        (db * left).to(bias_dtype) if want_bias else None,
        common.scale_rows(results.dlow_NR, left, index, ctx.rows, x_dtype) if want_low else None,
        (results.dlora_b_VR * left).to(b_dtype) if want_lora_b else None,
    )


_BACKWARD = {"keep": _backward_keep, "stream": _backward_stream, "recompute": _backward_recompute}


def _run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, lora_b: Tensor | None,
    call: LinearCrossEntropyCall, leaf: LeafGradient | None,
) -> LossResults:  # fmt: skip
    # The grad mode is passed in, because it is always off inside forward and needs_input_grad ignores no_grad.
    grad_enabled = torch.is_grad_enabled()
    return LossResults(*LinearCrossEntropy.apply(hidden, weight, bias, low, lora_b, call, grad_enabled, leaf))


def _apply(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, lora_b: Tensor | None,
    call: LinearCrossEntropyCall,
) -> LossResults:  # fmt: skip
    return _run(hidden, weight, bias, low, lora_b, call, None)


_linear_cross_entropy = Differentiable("linear_cross_entropy", _apply)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | PreparedTargets,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    chunk_bytes: int | None = None,
    fp32_accumulate: bool = True,
    memory_bytes: int | None = None,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    scaling: float = 1.0,
    adapter_hidden: Tensor | None = None,
    outputs: tuple[str, ...] = (),
    vocab_parallel: VocabParallelOptions | None = None,
) -> Tensor | LossOutput:
    """Compute `cross_entropy(hidden @ weight.T + bias, target)` without holding all the logits.

    A LoRA adapter of the head adds `scaling * (hidden @ lora_a.T) @ lora_b.T` to the logits.

    Args:
        hidden: (..., H), fp16, bf16, fp32 or fp64.
        weight: (V, H), the weight of `lm_head`. If its dtype differs from hidden's, both are promoted. Under autocast
            both are cast to autocast's dtype, as in F.linear.
        target: (...), int64 or int32 class indices, or the result of `prepare_targets`.
        bias: (V,) or None.
        class_weight: (V,), the `weight` of `cross_entropy`.
        chunk_bytes: largest number of bytes of logits and of their gradient alive at once. The default is 512 MiB on
            GPUs (up to 1 GiB if the fp32 weight gradient is as large) and 16 MiB on the CPU. All tokens are one chunk
            if that takes less memory than several chunks with an fp32 weight gradient.
        fp32_accumulate: False sums the chunks' bf16 weight gradients in bf16. This halves the memory of the largest
            tensor and adds one rounding per chunk. More than 7 chunks are summed in fp32 anyway, because the error
            would grow. Not available for fp16, where the sums would overflow.
        memory_bytes: the most bytes of logits and of the weight's gradient together, in place of the two options above.
            The fastest chunks that fit are taken. The default is the fastest, then smaller chunks, then bf16 weight
            gradients of up to 7 chunks summed in bf16. If nothing fits, the smallest are taken. hidden's gradient does
            not count.
        lora_a, lora_b: (R, H) and (V, R), the adapter's matrices, in any of the four dtypes; both or neither. They are
            cast to the products' dtype; each gradient has its matrix's own dtype.
        scaling: multiplies the adapter's result; PEFT's `lora_alpha / r`.
        adapter_hidden: (..., H), what the adapter reads instead of hidden, such as hidden after dropout.
        vocab_parallel: the rows of the weight that this process holds, if the head is divided by vocabulary. weight and
            bias are then these rows, class_weight is still (V,). A weight that is a DTensor of Shard(0) needs no such
            options, and hidden is a DTensor of Replicate().
        ignore_index, reduction, label_smoothing, softcap, logit_scale, z_loss, num_items, token_weight, outputs:
            as in `cross_entropy`.

    Returns:
        As `cross_entropy`: 0-dim fp32, or (...) for "none", or a `LossOutput`. Without gradients (eval) only the loss
        is computed. A frozen weight or hidden skips its product.

    Raises:
        ShapeError: a tensor or num_items has the wrong shape; V or H is 0 (a weight with 0 elements is sharded); or
            the tensors are on several devices.
        DtypeError: hidden, weight, bias or a matrix of the adapter is none of the four floats, or as in
            `cross_entropy`.
        OptionError: as in `cross_entropy`; chunk_bytes or memory_bytes is not a positive integer; memory_bytes together
            with chunk_bytes or fp32_accumulate=False; fp32_accumulate=False with fp16; target was prepared with shifts
            or another ignore_index; lora_a without lora_b or the other way round; adapter_hidden without them; or
            scaling is not finite.
        ShardingError: a DTensor has other placements, vocab_parallel is given without a process group, or a divided
            head has label_smoothing or an adapter.
        LabelError: as in `cross_entropy`.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    prepared = target if isinstance(target, PreparedTargets) else None
    labels: Tensor = prepared.target if prepared is not None else target  # type: ignore[assignment]
    if prepared is not None and prepared.shifts != (0,):
        raise OptionError(f"target was prepared for heads with shifts {prepared.shifts}; leave out the shifts.")
    if prepared is not None and prepared.ignore_index != ignore_index:
        raise OptionError(
            f"target was prepared with ignore_index {prepared.ignore_index}, the loss has {ignore_index}."
        )
    options, num_items = check_options(
        LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss),
        reduction=reduction, num_items=num_items, outputs=outputs,
    )  # fmt: skip
    check_chunk_bytes(chunk_bytes)
    check_chunk_bytes(memory_bytes, "memory_bytes")
    if memory_bytes is not None and (chunk_bytes is not None or not fp32_accumulate):
        raise OptionError("memory_bytes chooses the chunks and their sum; leave out chunk_bytes and fp32_accumulate.")
    divided = divided_head(hidden, weight, bias, vocab_parallel)
    if divided is not None:
        refuse_options(label_smoothing=bool(label_smoothing), lora_a=lora_a is not None, lora_b=lora_b is not None)
        loss = DividedLoss(
            target=labels, class_weight=class_weight, token_weight=token_weight, num_items=num_items,
            reduction=reduction, outputs=outputs, chunk_bytes=chunk_bytes, memory_bytes=memory_bytes,
        )  # fmt: skip
        return divided_cross_entropy(divided, options, loss)
    _check_linear(hidden, weight, bias, labels, class_weight, token_weight)
    check_adapter(hidden, weight, lora_a, lora_b, scaling, adapter_hidden)
    leaf = LeafGradient.of(weight)
    hidden, weight, bias = settle_dtypes(hidden, weight, bias)
    low = low_rank_hidden(hidden if adapter_hidden is None else adapter_hidden, lora_a, scaling, hidden.dtype)
    if not fp32_accumulate and hidden.dtype == torch.float16:
        raise OptionError(
            "fp32_accumulate=False is not for float16, whose range sums of gradients leave; use bfloat16."
        )
    target_N = labels.reshape(-1).contiguous()
    if may_wait(target_N) and common.wants_label_check(hidden):
        # Checked here so that the message names the caller's position: ignored rows are dropped below.
        common.check_labels(weight.shape[0], target_N, ignore_index)
    class_weight = None if class_weight is None else class_weight.contiguous()
    call = LinearCrossEntropyCall(
        target=target_N,
        class_weight=class_weight,
        token_weight=None if token_weight is None else token_weight.reshape(-1).contiguous(),
        inv_denominator=common.inverse_denominator(
            hidden, target_N, class_weight, num_items=num_items, ignore_index=ignore_index, reduction=reduction
        ),
        index=rows_that_count(labels, prepared, ignore_index, weight),
        options=options,
        per_row=reduction == "none",
        entropy=common.wants_entropy(outputs),
        predicted=common.wants_predicted(outputs),
        chunk_bytes=default_chunk_bytes(hidden) if chunk_bytes is None else (chunk_bytes, chunk_bytes),
        fp32_accumulate=fp32_accumulate,
        memory_bytes=memory_bytes or 0,
    )
    hidden_NH = hidden.reshape(-1, hidden.shape[-1])
    compiling = torch.compiler.is_compiling()
    results: LossResults = (
        _linear_cross_entropy(hidden_NH, weight, bias, low, lora_b, call)
        if compiling
        else _run(hidden_NH, weight, bias, low, lora_b, call, leaf)
    )
    return results.public(labels, call.per_row, outputs, ignore_index)


def _check_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    token_weight: Tensor | None,
) -> None:  # fmt: skip
    check_head(hidden, weight, bias)
    V = weight.shape[0]
    common.check_target(target, hidden.shape[:-1], "hidden")
    common.check_devices(
        hidden=hidden, weight=weight, bias=bias, target=target, class_weight=class_weight, token_weight=token_weight
    )
    check_vector("class_weight", class_weight, (V,))
    check_vector("token_weight", token_weight, target.shape)


# --- the record -------------------------------------------------------------------------------------------------------


def linear_cross_entropy_oracle(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    chunk_bytes: int | None = None, fp32_accumulate: bool = True, memory_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, scaling: float = 1.0,
    adapter_hidden: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The unfused formula: one product, logits in the product's dtype, then the loss in at least fp32.

    An adapter adds the product of its low-rank hidden states to the logits, which are rounded before and after it. PEFT
    rounds twice more; of two sums of roundings that differ, either may be twice the other by chance.
    """
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    logits = F.linear(hidden.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype))
    if lora_a is not None and lora_b is not None:
        low_NR = low_rank_hidden(hidden if adapter_hidden is None else adapter_hidden, lora_a, scaling, dtype)
        assert low_NR is not None
        logits = torch.addmm(logits.flatten(0, -2), low_NR, lora_b.to(dtype).t()).view_as(logits)
    return cross_entropy_oracle(logits, target, weight=class_weight, **options)


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    *rows, H, V = case.shape
    options = dict(case.options)
    has_bias, weight_dtype = options.pop("bias", False), options.pop("weight_dtype", dtype)
    rank, adapter_dtype = options.pop("rank", 0), options.pop("adapter_dtype", dtype)
    scaling, apart = options.pop("scaling", 1.0), options.pop("adapter_hidden", False)
    plain = Case(id=case.id, shape=case.shape, options=options)
    inputs = {
        "hidden": randn(*rows, H, dtype=dtype, device=device),
        "weight": randn(V, H, dtype=weight_dtype, device=device, scale=2.0 / H**0.5),
        "bias": randn(V, dtype=weight_dtype, device=device) if has_bias else None,
        **loss_inputs(plain, tuple(rows), V, device),
    }
    if not rank:
        return inputs
    return {
        **inputs,
        "lora_a": randn(rank, H, dtype=adapter_dtype, device=device, scale=H**-0.5),
        "lora_b": randn(V, rank, dtype=adapter_dtype, device=device, scale=2.0 / rank**0.5),
        "scaling": scaling,
        "adapter_hidden": randn(*rows, H, dtype=dtype, device=device) if apart else None,
    }


def _cost(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Cost:
    # Three products of 2·N·H·V operations; operands move once, logits are written and read once.
    N, H, V = target.numel(), hidden.shape[-1], weight.shape[0]
    logits_bytes = N * V * hidden.element_size()
    return Cost(
        moved_bytes=2 * (hidden.nbytes + weight.nbytes) + 2 * logits_bytes,
        saved_bytes=hidden.nbytes + 4 * V * H,
        flops=6 * N * H * V,
    )


LORA_OPTIONS: dict[str, dict[str, Any]] = {
    "keep": {"scaling": 2.0, "adapter_dtype": torch.float32},
    "chunks": {"scaling": 2.0, "adapter_hidden": True, "chunk_bytes": 11 * 100 * 4},
    "each-token": {"scaling": 0.75, "reduction": "none", "bias": True, "chunk_bytes": 11 * 100 * 4},
}

LINEAR_CROSS_ENTROPY = Op(
    name="linear_cross_entropy",
    call=linear_cross_entropy,
    oracle=linear_cross_entropy_oracle,
    make=_make,
    grads=("hidden", "weight", "bias", "lora_a", "lora_b", "adapter_hidden"),
    cases=(
        # One chunk, or chunks of 11 tokens (fp32) or 22 with a smaller last one. There are enough tokens that no single
        # rounding of a logit decides the error of a gradient.
        *(
            Case(id=f"{name}-{mode}", shape=(2, 21, 24, 100), options={**options, "bias": bias, "chunk_bytes": chunk})
            for name, options in LOSS_OPTIONS.items()
            for mode, bias, chunk in (("keep", False, 1 << 20), ("chunks-bias", True, 11 * 100 * 4))
        ),
        Case(id="fp32-weight", shape=(2, 21, 24, 100), options={"weight_dtype": torch.float32}),
        # A head with a LoRA adapter. Its factors are rounded too, and the loss may be exact by luck in one order.
        *(
            Case(id=f"lora-{mode}", shape=(2, 21, 24, 100), options={"rank": 4, **options}, product_orders=8)
            for mode, options in LORA_OPTIONS.items()
        ),
        Case(id="odd-vocab", shape=(9, 16, 4099), options={"chunk_bytes": 40_000}),
        Case(id="nothing-ignored", shape=(12, 16, 64), options={"ignored": 0.0, "chunk_bytes": 500}),
        Case(id="within-memory", shape=(2, 21, 24, 100), options={"memory_bytes": (24 + 10) * 100 * 2}),
        Case(id="16-chunks", shape=(2048, 64, 4000), options={"chunk_bytes": 1 << 20}, small=False),
        Case(id="llama-1b-head", shape=(4, 512, 2048, 128256), options={"chunk_bytes": 128 * MIB}, small=False),
    ),
    cost=_cost,
    errors={"fp32": 3.2e-06, "bf16": 6.1e-03, "fp16": 5.2e-03},
)
