"""Log-probabilities of ids, log-sum-exp and entropy of `hidden @ weight.T + bias`, without holding all the logits.

Every post-training loss is a function of these (`tigon.losses`). The gradient exists for any upstream gradient of each
of them; `blocks.py` says how it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, Differentiable, by_vocabulary, first_order, outside_graphs, runs_eagerly
from tigon.ops.head.autograd import finished, head_gradients
from tigon.ops.head.blocks import BackwardOptions, linear_logprobs_bwd, linear_logprobs_fwd
from tigon.ops.head.divided import DividedHead
from tigon.ops.head.frozen import is_frozen, linear_logprobs_frozen
from tigon.ops.head.inputs import Head, Wanted, default_chunk_bytes
from tigon.ops.head.plan import LogitBytes, keeps_logits
from tigon.ops.losses.inputs import CountedTokens, check_chunk_bytes, may_wait, tokens_that_count
from tigon.ops.losses.logprob_inputs import (
    LogprobInputs,
    LogprobOptions,
    check_ids,
)
from tigon.ops.losses.logprob_rows import fp16_scales
from tigon.ops.losses.logprobs import logprobs_oracle, make_ids
from tigon.ops.losses.results import Logprobs, Results, RowResults, wanted_gradients
from tigon.ops.losses.vocabulary import WHOLE, DividedVocabulary, Vocabulary
from tigon.ops.vocab_parallel import VocabParallelOptions, replicated

# N tokens, H hidden, V vocabulary, K ids of a token, J largest logits of a token.

# Reading the number of tokens that count leaves the GPU idle for 0.7 ms (H200, 4096 x 2048 x 128256, 2026-11-24), as
# long as products of 5e11 operations take. With a mask, some tokens do not count, and the wait is worth as much. Ids
# alone may all count: then the wait may cost at most 2 % of the products.
WORTH_A_WAIT_FLOPS = {"mask": 5 * 10**11, "ids": 2 * 10**13}


@dataclass(frozen=True, kw_only=True)
class LinearLogprobsCall:
    """The arguments of one call that are not differentiated."""

    ids_NK: Tensor
    index: Tensor | None
    """Flat positions of the tokens that count; None for all."""
    options: LogprobOptions
    lse: bool
    chunk_bytes: Sequence[int]
    """(most bytes of logits and of their gradient in a block, most bytes if logits are kept)"""


class LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias: Tensor | None,
        call: LinearLogprobsCall,
        vocabulary: Vocabulary,
        grad_enabled: bool,
    ) -> Results:
        ctx.wanted = wanted = Wanted.of(ctx.needs_input_grad[:3], grad_enabled)
        counted = CountedTokens(call.index, hidden_NH.shape[0])
        head, ids_NK = Head(hidden_NH, weight_VH, bias).at(counted), counted.take(call.ids_NK)
        assert ids_NK is not None
        block_bytes, most_kept = call.chunk_bytes
        # A symbolic token count must not decide anything, or every count would need a new compilation.
        known = any(wanted) and isinstance(head.tokens, int)
        at_once = known and vocabulary is WHOLE and has_gradient_per_token(head, ids_NK, call.options, wanted)
        keep = known and not at_once and keeps_logits(head.tokens, head.vocab, LogitBytes.of(head.dtype), most_kept)
        kept_NV = dx_NH = None

        def compute(ids_NK: Tensor, options: LogprobOptions) -> RowResults:
            nonlocal kept_NV, dx_NH
            if not head.vocab:
                return of_no_column(head, ids_NK, options)
            if at_once:
                made = linear_logprobs_frozen(head, ids_NK, options, block_bytes)
                dx_NH = made.dx_NH
                return made.rows  # type: ignore[no-any-return]
            computed = linear_logprobs_fwd(head, ids_NK, options, keep, block_bytes)
            kept_NV = computed.kept_NV if keep else None
            return computed.rows  # type: ignore[no-any-return]

        results, saved = vocabulary.results(compute, ids_NK, call.options, call.lse)
        if any(wanted):
            # The gradients of lse and entropy are not multiples of dx_NH. They compute the logits again.
            one_gradient = at_once and not (call.lse or call.options.entropy)
            ctx.save_for_backward(*((None,) * 3 if one_gradient else head[:3]), kept_NV, dx_NH, call.index, *saved)
        ctx.options, ctx.lse, ctx.vocabulary, ctx.tokens = call.options, call.lse, vocabulary, counted.tokens
        ctx.sizes, ctx.block_bytes = (ids_NK.shape[1], call.options.top_k), most_kept if keep else block_bytes
        ctx.set_materialize_grads(False)
        results = results.spread(counted, call.options, lse=call.lse)
        ctx.mark_non_differentiable(results.predicted_N, results.topk_ids_NJ)
        return results

    @staticmethod
    @first_order
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias, kept_NV, dx_NH, index, *saved = ctx.saved_tensors
        head, wanted, counted = Head(hidden_NH, weight_VH, bias), ctx.wanted, CountedTokens(index, ctx.tokens)
        wanted_grads = [counted.take(grad) for grad in wanted_gradients(grads, ctx.options, ctx.lse)]
        if dx_NH is not None and wanted_grads[1] is None and wanted_grads[2] is None:
            u_N = upstream_of_ids(wanted_grads[0], saved[0], ctx.options)
            return finished(dx_NH, u_N, counted, dx_NH.dtype), *(None,) * 5
        upstream, options = ctx.vocabulary.upstream(saved, wanted_grads, ctx.options, ctx.sizes)
        left = None
        if head.dtype == torch.float16 and head.tokens and head.vocab:
            scale, left = fp16_scales(upstream.dlogprob_NK, upstream.dlse_N, upstream.dentropy_N, options)
            upstream = replace(upstream, scale=scale)
        how = BackwardOptions(ctx.block_bytes, ctx.vocabulary is not WHOLE, index is not None)
        made = linear_logprobs_bwd(head, upstream, kept_NV, options, wanted, how)
        of_hidden = ctx.vocabulary.sum_hidden(made.dx_NH, left) if wanted.want_hidden else None
        return *head_gradients(made[:3], wanted, (of_hidden, left), counted, head.dtype), None, None, None


def has_gradient_per_token(head: Head, ids_NK: Tensor, options: LogprobOptions, wanted: Wanted) -> bool:
    """Whether hidden's gradient, the only one wanted, is a row per token times the gradient of its log-probability.

    fp16 would need a loss scale before the upstream gradient is known. Under torch.compile a result that was asked for
    and not used has an upstream gradient of zeros, so that the logits would be computed again.
    """
    one_id = ids_NK.shape[1] == 1 and not options.top_k and head.vocab > 0
    return one_id and is_frozen(wanted) and head.dtype != torch.float16 and runs_eagerly(head.hidden_NH)


def upstream_of_ids(dlogprob_N1: Tensor | None, ids_N1: Tensor, options: LogprobOptions) -> Tensor:
    """The gradient of each token's one log-probability, (N,); 0 for a token that is left out, whatever its own is."""
    left_out_N = ids_N1[:, 0] == options.ignore_index
    if dlogprob_N1 is None:
        return left_out_N.new_zeros(left_out_N.shape, dtype=torch.float32)
    return dlogprob_N1[:, 0].masked_fill(left_out_N, 0.0)


def of_no_column(head: Head, ids_NK: Tensor, options: LogprobOptions) -> RowResults:
    """The results of a process that holds no row of the weight: a softmax over nothing."""
    N, nothing = head.tokens, head.hidden_NH.new_full((2, head.tokens), -torch.inf, dtype=head.sum_dtype)
    return RowResults(
        logprob_NK=nothing.new_zeros(ids_NK.shape),
        stats_2N=nothing,
        entropy_N=nothing.new_zeros(N if options.entropy else 0),
        predicted_N=ids_NK.new_zeros(N if options.predicted else 0),
        topk_logprob_NJ=nothing.new_empty((N, 0)),
        topk_ids_NJ=ids_NK.new_empty((N, 0)),
    )


def _of_head(head: Head, call: LinearLogprobsCall, vocabulary: Vocabulary) -> Results:
    # The grad mode is passed in, because it is always off inside forward and needs_input_grad ignores no_grad.
    return Results(*LinearLogprobs.apply(*head[:3], call, vocabulary, torch.is_grad_enabled()))


def _apply(hidden: Tensor, weight: Tensor, bias: Tensor | None, call: LinearLogprobsCall) -> Results:
    return _of_head(Head(hidden, weight, bias), call, WHOLE)


_linear_logprobs = Differentiable("linear_logprobs", _apply)


@outside_graphs
def _divided(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    chunk_bytes: int | None = None,
    vocab_parallel: VocabParallelOptions | None = None,
    **options: Any,
) -> Tensor | Logprobs:
    """`linear_logprobs` for a head that is divided by vocabulary."""
    divided = DividedHead.of(hidden, weight, bias, vocab_parallel)
    ids, mask = replicated(ids, "ids"), replicated(mask, "mask")
    given = LogprobInputs.of("hidden", divided.hidden, ids, mask, divided.most_top_k, options)
    check_chunk_bytes(chunk_bytes)
    ids_NK, ignore_index = given.ids_NK.long(), given.options.ignore_index
    # The ids alone decide, because processes with different numbers of rows must drop the same tokens.
    index = tokens_that_count(ids_NK, lambda: (ids_NK != ignore_index).any(1))
    blocks = default_chunk_bytes(divided.hidden, chunk_bytes)
    return divided_logprobs(divided, ids_NK, given.options, blocks, index).public(given)


def divided_logprobs(
    divided: DividedHead, ids_NK: Tensor, options: LogprobOptions, chunk_bytes: tuple[int, int], index: Tensor | None
) -> Results:
    """The results for ids (N, K) of the whole vocabulary. index: the tokens that count."""
    check_divided_labels(divided, ids_NK, options.ignore_index)
    call = LinearLogprobsCall(ids_NK=ids_NK, index=index, options=options, lse=True, chunk_bytes=chunk_bytes)
    return _of_head(divided.head, call, DividedVocabulary(divided.part))


def check_divided_labels(divided: DividedHead, ids_NK: Tensor, ignore_index: int) -> None:
    """Raise `LabelError` for an id outside the vocabulary, if that is known and labels are checked at all."""
    if divided.vocab is not None and may_wait(ids_NK):
        check_ids(divided.hidden, ids_NK, divided.vocab, ignore_index)


@by_vocabulary(_divided, weight=1)
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    outputs: tuple[str, ...] = (),
    top_k: int = 0,
    chunk_bytes: int | None = None,
    vocab_parallel: VocabParallelOptions | None = None,
) -> Tensor | Logprobs:
    """Log-probabilities of `ids` under softmax(z), z = softcap(logit_scale · (hidden @ weight.T + bias)) / temperature.

    Args:
        hidden: (..., H), fp16, bf16, fp32 or fp64.
        weight: (V, H), the weight of `lm_head`. If its dtype differs from hidden's, both are promoted. Under autocast
            both are cast to autocast's dtype, as in F.linear.
        ids: (...) for one id of each token, or (..., K); int64 or int32. They are not shifted.
        bias: (V,) or None.
        temperature: divides the logits, after the softcap.
        softcap: c > 0; the logits become c·tanh(logits / c).
        logit_scale: multiplies the logits before the softcap; not 0.
        ignore_index: an id that is left out: its log-probability and gradient are 0. A token is left out if all its ids
            are.
        mask: (...) bool; tokens where it is False are left out. Those take no time, because they are dropped before the
            products. To know their number, the host waits for the device once (without a mask only if the products
            take longer than 25 ms). Under torch.compile and CUDA graphs every token is computed.
        outputs: values to return in addition: "lse", "entropy", "predicted"; see `Logprobs`.
        top_k: also return the `top_k` largest log-probabilities of each token and their ids.
        chunk_bytes: largest number of bytes of logits and of their gradient alive at once. Logits are fp32, 4 bytes
            each, also for 16-bit inputs. Logits of all tokens are kept for backward if they fit together with an
            eighth of their gradient, which saves a product. The default is 512 MiB for logits that are computed again,
            and 1 GiB for logits that are kept, on GPUs; 16 MiB on the CPU.
        vocab_parallel: the rows of the weight that this process holds, if the head is divided by vocabulary. weight and
            bias are then these rows. A weight that is a DTensor of Shard(0) needs no such options, and hidden is a
            DTensor of Replicate().

    Returns:
        Log-probabilities of the shape of ids, fp32 (fp64 for fp64 inputs); with `outputs` or `top_k`, a `Logprobs`.
        Each is differentiable for any upstream gradient. A frozen weight or hidden skips its product.

    Raises:
        ShapeError: hidden, weight, bias, ids or mask has the wrong shape; V or H is 0 (a weight with 0 elements is
            sharded); or the tensors are on several devices.
        DtypeError: hidden, weight or bias is none of the four floats, or ids are neither int64 nor int32.
        OptionError: an option is unknown, is not a number or is outside its range.
        ShardingError: a DTensor has other placements, or vocab_parallel is given without a process group.
        LabelError: an id is outside [0, V) and is not ignore_index. Checked on the CPU, and on a GPU only with
            TIGON_CHECK=1; otherwise the log-probability on a GPU is NaN.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    head = Head.of(hidden, weight, bias)
    options = {"ignore_index": ignore_index, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    given = LogprobInputs.of("hidden", hidden, ids, mask, head.vocab, {**options, "top_k": top_k, "outputs": outputs})
    check_chunk_bytes(chunk_bytes)
    ids_NK = given.ids_NK
    if may_wait(ids_NK):
        # Checked here so that the message names the caller's position: tokens are dropped below.
        check_ids(head.hidden_NH, ids_NK, head.vocab, ignore_index)
    pays = 6 * head.tokens * head.weight_VH.numel() >= WORTH_A_WAIT_FLOPS["ids" if mask is None else "mask"]
    index = tokens_that_count(ids_NK, lambda: (ids_NK != ignore_index).any(1), wait_pays=pays)
    blocks = default_chunk_bytes(hidden, chunk_bytes)
    call = LinearLogprobsCall(ids_NK=ids_NK, index=index, options=given.options, lse=given.lse, chunk_bytes=blocks)
    apply = _linear_logprobs if torch.compiler.is_compiling() else _apply
    return apply(head.hidden_NH, head.weight_VH, head.bias, call).public(given)


# --- the record -------------------------------------------------------------------------------------------------------


def linear_logprobs_oracle(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_bytes: int | None = None,
    **options: Any,
) -> Any:
    """The unfused formula: one product, logits in the product's dtype, then `logprobs_oracle`."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    logits = F.linear(hidden.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype))
    return logprobs_oracle(logits, ids, **options)


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    *rows, H, V = case.shape
    options = dict(case.options)
    has_bias, peaked = options.pop("bias", False), options.pop("peaked", False)
    weight = randn(V, H, dtype=dtype, device=device, scale=2.0 / H**0.5)
    ids = make_ids(options, tuple(rows), V, device)
    hidden = randn(*rows, H, dtype=dtype, device=device)
    if peaked:
        # Each token's hidden state points at the weight of its id, so that its probability is near 1.
        one_id = ids if ids.ndim == len(rows) else ids[..., 0]
        hidden = (hidden * 0.1 + 6.0 * weight[one_id.clamp(0, V - 1).long()]).to(dtype)
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": randn(V, dtype=dtype, device=device) if has_bias else None,
        "ids": ids,
        **options,
    }


def _cost(hidden: Tensor, weight: Tensor, ids: Tensor, **options: object) -> Cost:
    # Four products of 2·N·H·V operations; operands move once in each pass. Logits are written and read twice, their
    # gradient is written once and read twice.
    H, V = weight.shape[1], weight.shape[0]
    N, size = hidden.numel() // H, LogitBytes.of(hidden.dtype)
    return Cost(
        moved_bytes=3 * (hidden.nbytes + weight.nbytes) + N * V * (4 * size.logits + 3 * size.gradients),
        saved_bytes=hidden.nbytes + weight.nbytes,
        flops=8 * N * H * V,
    )


LINEAR_LOGPROBS = Op(
    name="linear_logprobs",
    call=linear_logprobs,
    oracle=linear_logprobs_oracle,
    make=_make,
    grads=("hidden", "weight", "bias"),
    case=Case(id="one-id-keep", shape=(2, 21, 24, 100), options={"chunk_bytes": 1 << 20}),
    cost=_cost,
    errors={"fp32": 2.4e-06, "bf16": 1.0e-02, "fp16": 2.6e-03},
)
