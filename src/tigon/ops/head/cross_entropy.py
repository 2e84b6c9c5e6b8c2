"""Linear + cross entropy: the loss of `hidden @ weight.T + bias` without holding all the logits at once.

Tokens are processed in chunks. For each chunk, one matrix product writes the logits into a reused buffer, in fp32 (in
fp64 for fp64 inputs). One pass turns them into their gradient (kernels/cross_entropy.py), and two products reduce
that to the gradients of hidden and weight. On Hopper the product of bf16 may write exponentials instead
(`exponentials.py`). On GPUs, cuBLAS computes the other products. The products take most of the time.

`chunks.py` chooses the chunks, and what is kept for backward.

Ignored tokens are dropped before the products, so they cost no time. The host needs the number of the remaining tokens.
This one small copy waits for the device, unless `prepare_targets` has started it before the model's forward. Under
torch.compile and CUDA graphs the host cannot wait, so every row is kept.

The calls of one loss, in order; files without a folder are in ops/head/. Every forward begins alike:

    ops/dispatch.py: by_vocabulary                  takes a divided head to divided_cross_entropy.py
    cross_entropy.py: linear_cross_entropy
    inputs.py: Head.of, LossArguments.of            check, promote, flatten (ops/losses/inputs.py)
    cross_entropy.py: LinearCrossEntropy.forward    drops ignored tokens
    chunks.py: plan_for, chunk_loop                 choose the chunks, and one of the next two paths (exp_tile)

bf16 on Hopper, each chunk:

    chunks.py: _Chunks.run_exp, exp_logits
    kernels/linear_cross_entropy.py: exp_logits     three kernels: the labels' logits, the product, the rows' factors
    exponentials.py: hidden_grad, weight_grad_into  the gradients' products, except in mode "keep_grad"

Elsewhere, each chunk:

    chunks.py: _Chunks.run, compute_block           with block_loop.py: run_blocks
    inputs.py: Head.logits_into                     the logits' product (ops/products.py: product_into)
    ops/losses/cross_entropy_rows.py: rows_with_gradient
    kernels/cross_entropy.py: cross_entropy_fwd     without a kernel: cross_entropy_rows.py: _fwd_reference
    block_loop.py: GradientSums.add                 the gradients' products, except in mode "keep_grad"

Backward, by the plan's mode:

    cross_entropy.py: LinearCrossEntropy.backward
    "keep_grad": _backward_from_kept_grad           the products (exponentials.py: exp_hidden_grad, exp_weight_grad;
                                                    elsewhere ops/products.py: product_into)
    "stream": _backward_stream                      multiplies the forward's gradients by the loss's
    "recompute": _backward_recompute                runs chunks.py: chunk_loop again, with gradients
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops import dispatch
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.accumulation_fusion import LeafGradient, gradient_to_add_to
from tigon.ops.dispatch import Context, Differentiable, by_vocabulary, first_order, may_overwrite, no_autocast
from tigon.ops.gradient_sums import add_scaled_
from tigon.ops.head.chunks import TILE, ChunkOptions, chunk_loop, needs_fp32_logits, plan_for
from tigon.ops.head.divided_cross_entropy import divided_cross_entropy
from tigon.ops.head.exponentials import add_exp_weight_grad, exp_hidden_grad, exp_weight_grad
from tigon.ops.head.inputs import MIB, NOTHING, Head, LossArguments, Wanted, low_rank_hidden
from tigon.ops.losses.cross_entropy import Reduction, cross_entropy_oracle, loss_inputs
from tigon.ops.losses.cross_entropy_rows import scale_rows
from tigon.ops.losses.inputs import CountedTokens, TokenLabels, gradient_scales, sum_times
from tigon.ops.losses.prepared_targets import PreparedTargets
from tigon.ops.losses.results import LossOutput, LossResults
from tigon.ops.products import keeps_graph, product_into
from tigon.ops.vocab_parallel import VocabParallelOptions

# N tokens, n tokens that are not ignored, C tokens of a chunk, H hidden, V vocabulary, R rank of an adapter.

# Bytes alive at once of an fp32 product that is then scaled and rounded. This has enough tiles for the product's full
# rate; a whole 128256 x 2048 product would take 1 GiB on top of the kept logits.
_PRODUCT_BYTES = 64 * MIB


# --- autograd ---------------------------------------------------------------------------------------------------------


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, *args: Any) -> LossResults:
        """args: the tensors of a `Head`, the other arguments, whether gradients are enabled, the leaf of the weight."""
        *tensors, call, grad_enabled, ctx.leaf = args
        wanted, head = Wanted.of(ctx.needs_input_grad[:5], grad_enabled), Head(*tensors)
        counted = CountedTokens(call.index, head.tokens)
        ctx.b_dtype = None if head.lora_b_VR is None else head.lora_b_VR.dtype
        if head.lora_b_VR is not None:
            head = head._replace(lora_b_VR=head.lora_b_VR.to(head.dtype))
        head, target, token_weight = head.at(counted), counted.take(call.target), counted.take(call.token_weight)
        assert target is not None
        other_outputs = wanted.want_bias or call.entropy or call.predicted or head.low_NR is not None
        fp32_logits = needs_fp32_logits(head.hidden_NH, head.weight_VH, call.options, other_outputs)
        plan = plan_for(head, call.limits, wanted, per_row=call.per_row, fp32_logits=fp32_logits)
        inverse, class_weight = call.inv_denominator, call.class_weight
        stored, remaining_scale = gradient_scales(head.dtype, inverse, token_weight, class_weight, call.options)
        chunks = chunk_loop(
            head,
            TokenLabels(target, class_weight, token_weight, stored),
            ChunkOptions(
                loss=call.options,
                chunk=plan.chunk,
                logit_tokens=plan.logit_tokens,
                keep=plan.mode == "keep_grad",
                fp32_accumulate=plan.fp32_accumulate,
                wanted=wanted if plan.mode in ("keep_grad", "stream") else NOTHING,
                entropy=call.entropy,
                predicted=call.predicted,
            ),
        )
        ctx.plan, ctx.options, ctx.wanted = plan, call.options, wanted
        ctx.tokens, ctx.dtype = counted.tokens, head.dtype
        if plan.mode == "keep_grad":
            ctx.save_for_backward(
                chunks.kept_NV, chunks.factors, target, chunks.db_V, remaining_scale, counted.index_N, *head
            )
        elif plan.mode == "stream":
            # Not a saved tensor, because a dW in its final dtype is scaled in place and returned.
            ctx.dw = chunks.dw_VH
            ctx.save_for_backward(
                chunks.dx_NH, chunks.db_V, chunks.dlow_NR, chunks.dlora_b_VR, remaining_scale, counted.index_N,
                target if call.per_row else None,
            )  # fmt: skip
        elif plan.mode == "recompute":
            ctx.save_for_backward(target, class_weight, token_weight, inverse, counted.index_N, *head)
        # Without a reduction, the losses return to their original positions.
        stats = chunks.stats
        if counted.index_N is not None:
            stats = stats.new_zeros((3, counted.tokens)).index_copy_(1, counted.index_N, stats)
        results = LossResults(
            loss=counted.spread(chunks.loss, 0) if call.per_row else sum_times(chunks.loss, inverse),
            stats=stats,
            entropy=counted.spread(chunks.entropy, 0) if call.entropy else chunks.entropy,
            predicted=(
                counted.spread(chunks.predicted, call.options.ignore_index) if call.predicted else chunks.predicted
            ),
        )
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @first_order
    def backward(ctx: Context, dloss: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        grads = _BACKWARD[ctx.plan.mode](ctx, dloss)
        return *(g if want else None for g, want in zip(grads, ctx.wanted, strict=True)), None, None, None


_Grads = tuple[Tensor | None, ...]
"""The gradients of a head's five tensors."""


def _backward_from_kept_grad(ctx: Context, dloss: Tensor) -> _Grads:
    g_NV, factors, target, db, remaining_scale, index, *tensors = ctx.saved_tensors
    head, wanted, counted = Head(*tensors), ctx.wanted, CountedTokens(index, ctx.tokens)
    scale, x_NH = dloss if remaining_scale is None else dloss * remaining_scale, head.hidden_NH
    dx = dw = dlow = dlora_b = None
    grad_VH = gradient_to_add_to(ctx.leaf) if wanted.want_weight else None
    # dW first, so that the scaled X is freed before dX is allocated.
    if factors.numel():
        factors = factors * scale
        if grad_VH is not None:
            add_exp_weight_grad(g_NV, x_NH, factors, target, grad_VH)
        elif wanted.want_weight:
            dw = exp_weight_grad(g_NV, x_NH, factors, target)
        if wanted.want_hidden:
            dx = exp_hidden_grad(g_NV, head.weight_VH, factors, target, counted.index_N, counted.tokens)
        return dx, dw, None, None, None
    with no_autocast(g_NV):
        if grad_VH is not None:
            _weight_grad_into(g_NV, x_NH, scale, grad_VH, accumulate=True)
        elif wanted.want_weight:
            dw = _weight_grad(g_NV, x_NH, scale, ctx.dtype)
        if wanted.want_lora_b and head.low_NR is not None:
            dlora_b = _weight_grad(g_NV, head.low_NR, scale, ctx.b_dtype)
        if wanted.want_low and head.lora_b_VR is not None:
            dlow = _hidden_grad(g_NV, head.lora_b_VR, scale, counted)
        if wanted.want_hidden:
            dx = _hidden_grad(g_NV, head.weight_VH, scale, counted)
    return dx, dw, (db * scale).to(ctx.dtype) if wanted.want_bias else None, dlow, dlora_b


def _hidden_grad(g_NV: Tensor, weight_VH: Tensor, scale: Tensor, counted: CountedTokens) -> Tensor:
    """scale · G W in G's dtype, in the rows of its tokens."""
    # An fp16 gradient stays in fp32 until the loss scale is applied.
    shape = (g_NV.shape[0], weight_VH.shape[1])
    product = g_NV.new_empty(shape, dtype=scale.dtype if g_NV.dtype == torch.float16 else g_NV.dtype)
    product_into(g_NV, weight_VH, product, accumulate=False)
    return scale_rows(product, scale, counted.index_N, counted.tokens, g_NV.dtype)  # type: ignore[no-any-return]


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
        scaled = scale_rows(x_NH, scale, None, x_NH.shape[0], x_NH.dtype)
        product_into(g_NV.t(), scaled, out_VH, accumulate=accumulate)
        return
    block_rows = max(TILE, _PRODUCT_BYTES // (H * scale.element_size()) // TILE * TILE)
    product = x_NH.new_empty((min(block_rows, V), H), dtype=scale.dtype)
    for start in range(0, V, block_rows):
        rows = out_VH[start : start + block_rows]
        product_into(g_NV.t()[start : start + block_rows], x_NH, product[: len(rows)], accumulate=False)
        if accumulate:
            add_scaled_(rows, product[: len(rows)], scale)
        else:
            torch.mul(product[: len(rows)], scale, out=rows)


def _backward_stream(ctx: Context, dloss: Tensor) -> _Grads:
    # Raises in a second backward of a graph that was not retained.
    dx, db, dlow, dlora_b, remaining_scale, index, target = ctx.saved_tensors
    if target is not None:
        # A token that is left out has no gradient, even if its own is NaN.
        counted = dloss if index is None else dloss.index_select(0, index)
        dloss = counted.masked_fill(target == ctx.options.ignore_index, 0.0)
    scale = dloss if remaining_scale is None else dloss * remaining_scale
    dw, is_last_backward = ctx.dw, not keeps_graph()
    if is_last_backward:
        ctx.dw = None  # the rest of the model's backward needs its memory
    grad_VH = gradient_to_add_to(ctx.leaf) if ctx.wanted.want_weight else None
    if grad_VH is not None:
        add_scaled_(grad_VH, dw, scale)
        dw = None
    elif ctx.wanted.want_weight and is_last_backward and dw.dtype == ctx.dtype and may_overwrite(dw):
        dw = scaled_in_place(dw, scale)
    elif ctx.wanted.want_weight:
        dw = scale_rows(dw, scale, None, dw.shape[0], ctx.dtype)
    return _scale_grads(ctx, index, scale, (dx, dw, db, dlow, dlora_b))


def _scale_grads(ctx: Context, index: Tensor | None, scale: Tensor, unscaled_grads: tuple[Any, ...]) -> _Grads:
    """The chunk loop's gradients times the scale; dW is scaled already."""
    wanted, tokens, (dx, dw, db, dlow, dlora_b) = ctx.wanted, ctx.tokens, unscaled_grads
    return (
        scale_rows(dx, scale, index, tokens, ctx.dtype) if wanted.want_hidden else None,
        dw,
        (db * scale).to(ctx.dtype) if wanted.want_bias else None,
        scale_rows(dlow, scale, index, tokens, ctx.dtype) if wanted.want_low else None,
        (dlora_b * scale).to(ctx.b_dtype) if wanted.want_lora_b else None,
    )


def scaled_in_place(x_NH: Tensor, scale: Tensor) -> Tensor:
    """x times the scale, in x's memory."""
    if dispatch.uses_kernel(x_NH):
        from tigon.kernels.scale_rows import scale_rows_

        return scale_rows_(x_NH, scale)  # type: ignore[no-any-return]
    return x_NH.mul_(scale)


def _backward_recompute(ctx: Context, dloss: Tensor) -> _Grads:
    target, class_weight, token_weight, inverse, index, *tensors = ctx.saved_tensors
    head, wanted, plan = Head(*tensors), ctx.wanted, ctx.plan
    per_token = (dloss if index is None else dloss.index_select(0, index)).contiguous()
    if token_weight is not None:
        per_token = per_token * token_weight
    stored, remaining_scale = gradient_scales(ctx.dtype, inverse, per_token, class_weight, ctx.options)
    remaining_scale = torch.ones_like(stored) if remaining_scale is None else remaining_scale
    unscaled_grads = chunk_loop(
        head,
        TokenLabels(target, class_weight, per_token, stored),
        ChunkOptions(
            loss=ctx.options,
            chunk=plan.chunk,
            logit_tokens=plan.logit_tokens,
            fp32_accumulate=plan.fp32_accumulate,
            wanted=wanted,
        ),
    ).gradients
    grad_VH, dw = gradient_to_add_to(ctx.leaf) if wanted.want_weight else None, None
    if grad_VH is not None:
        add_scaled_(grad_VH, unscaled_grads.dw_VH, remaining_scale)
    elif wanted.want_weight:
        dw = scale_rows(unscaled_grads.dw_VH, remaining_scale, None, head.vocab, ctx.dtype)
    return _scale_grads(ctx, index, remaining_scale, unscaled_grads._replace(dw_VH=dw))


_BACKWARD = {"keep_grad": _backward_from_kept_grad, "stream": _backward_stream, "recompute": _backward_recompute}


def _apply_with_leaf(head: Head, call: LossArguments, leaf: LeafGradient | None = None) -> LossResults:
    # The grad mode is passed in, because it is always off inside forward and needs_input_grad ignores no_grad.
    return LossResults(*LinearCrossEntropy.apply(*head, call, torch.is_grad_enabled(), leaf))


def _apply(head: Head, call: LossArguments) -> LossResults:
    return _apply_with_leaf(head, call)


_linear_cross_entropy = Differentiable("linear_cross_entropy", _apply)


@by_vocabulary(divided_cross_entropy, weight=1)
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
        memory_bytes: the most bytes of logits and of the weight's gradient together; hidden's gradient does not count.
            Replaces chunk_bytes and fp32_accumulate. Tries in order: default chunks, smaller chunks, up to 7 chunks
            summed in bf16 (only for bf16), still smaller chunks. If nothing fits, the plan with the least bytes is
            taken.
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
    head = Head.of(hidden, weight, bias)
    call = LossArguments.of(
        head, hidden.shape[:-1], target, class_weight=class_weight, ignore_index=ignore_index, reduction=reduction,
        softcap=softcap, label_smoothing=label_smoothing, logit_scale=logit_scale, z_loss=z_loss, num_items=num_items,
        token_weight=token_weight, chunk_bytes=chunk_bytes, fp32_accumulate=fp32_accumulate, memory_bytes=memory_bytes,
        outputs=outputs,
    )  # fmt: skip
    plain = type(scaling) is float and scaling == 1.0 and lora_a is lora_b is adapter_hidden is None
    if not plain:
        head = head.with_adapter(hidden, lora_a, lora_b, scaling, adapter_hidden)
    if torch.compiler.is_compiling():
        results: LossResults = _linear_cross_entropy(head, call)
    else:
        results = _apply_with_leaf(head, call, LeafGradient.of(weight))
    labels = target.target if isinstance(target, PreparedTargets) else target
    loss = results.loss.view(labels.shape) if call.per_row else results.loss
    return results.with_outputs(loss, labels, outputs, ignore_index) if outputs else loss


# --- the op's registry entry ------------------------------------------------------------------------------------------


def linear_cross_entropy_oracle(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    chunk_bytes: int | None = None, fp32_accumulate: bool = True, memory_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, scaling: float = 1.0,
    adapter_hidden: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The unfused formula: one product, logits in the product's dtype, then the loss in at least fp32.

    An adapter adds the product of its low-rank hidden states to the logits, which are rounded before and after it. PEFT
    rounds twice more, so either error may be twice the other by chance.
    """
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    logits = F.linear(hidden.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype))
    if lora_a is not None and lora_b is not None:
        low_NR = low_rank_hidden(hidden if adapter_hidden is None else adapter_hidden, lora_a, scaling, dtype)
        logits = torch.addmm(logits.flatten(0, -2), low_NR, lora_b.to(dtype).t()).view_as(logits)
    return cross_entropy_oracle(logits, target, weight=class_weight, **options)


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    *rows, H, V = case.shape
    options = dict(case.options)
    has_bias, weight_dtype = options.pop("bias", False), options.pop("weight_dtype", dtype)
    rank, adapter_dtype = options.pop("rank", 0), options.pop("adapter_dtype", dtype)
    scaling, separate_adapter_hidden = options.pop("scaling", 1.0), options.pop("adapter_hidden", False)
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
        "adapter_hidden": randn(*rows, H, dtype=dtype, device=device) if separate_adapter_hidden else None,
    }


def _cost(hidden: Tensor, weight: Tensor, target: Tensor, **options: object) -> Cost:
    # Three products of 2·N·H·V operations. Each operand is read once and its gradient written once. The logits are
    # written once and read once.
    N, H, V = target.numel(), hidden.shape[-1], weight.shape[0]
    logits_bytes = N * V * hidden.element_size()
    return Cost(
        moved_bytes=2 * (hidden.nbytes + weight.nbytes) + 2 * logits_bytes,
        saved_bytes=hidden.nbytes + 4 * V * H,
        flops=6 * N * H * V,
    )


LINEAR_CROSS_ENTROPY = Op(
    name="linear_cross_entropy",
    call=linear_cross_entropy,
    oracle=linear_cross_entropy_oracle,
    make=_make,
    grads=("hidden", "weight", "bias", "lora_a", "lora_b", "adapter_hidden"),
    case=Case(id="mean-keep", shape=(2, 21, 24, 100), options={"bias": False, "chunk_bytes": 1 << 20}),
    cost=_cost,
    errors={"fp32": 3.2e-06, "bf16": 6.1e-03, "fp16": 5.2e-03},
)
