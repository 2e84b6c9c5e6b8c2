"""`linear_logprobs` for a head divided by vocabulary: the kernels of a whole head on each process's rows, one exchange.

A process computes the statistics of its own logits. For the share P_r = exp(lse_r - lse) of the probability that is
process r's, with the labels' rows in one process each,

    lse = log Σ_r exp(lse_r)      log p(id) = log p_r(id) + log P_r      entropy = Σ_r P_r · (entropy_r - log P_r)

In the backward, a process's logits have the gradients of a whole head's if the kernels get the group's statistics. An
id of another process adds to the factor A of `kernels/logprobs.py` alone, as a gradient of -lse would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import LabelError
from tigon.ops.dispatch import first_order
from tigon.ops.lm_head import may_wait, settle_dtypes, worth_gathering
from tigon.ops.logprobs.blocks import (
    BackwardOptions,
    ForwardResults,
    Gradients,
    HeadTensors,
    keeps_logits,
    linear_logprobs_bwd,
    linear_logprobs_fwd,
)
from tigon.ops.logprobs.results import Results, finished, spread_results
from tigon.ops.logprobs.rows import LogprobOptions, Upstream, contiguous, fp16_scales, joined_upstream
from tigon.ops.losses import common
from tigon.ops.vocab_parallel import DividedHead, VocabParallelOptions, exchange, outside_graphs

# N tokens, H hidden, U rows of the weight in this process, K ids of a token, J largest logits of a token.

_LEFT_OUT = -1
"""The local id of an id that is left out."""
_NOT_MINE = float("inf")
"""Stands for the log-probability of an id of another process; no log-probability is as large."""


@dataclass(frozen=True, kw_only=True)
class DividedLogprobsCall:
    """The arguments of one call that are not differentiated."""

    ids_NK: Tensor
    """int64, ids of the whole vocabulary."""
    index: Tensor | None
    """Flat positions of the tokens that count; None for all. The same in each process."""
    options: LogprobOptions
    chunk_bytes: tuple[int, int]
    part: VocabParallelOptions


class LocalIds(NamedTuple):
    """Ids as columns of this process's logits."""

    local_NK: Tensor
    """`_LEFT_OUT` for an id that is left out, 0 for an id of another process."""
    mine_NK: Tensor
    """bool"""


def local_ids(ids_NK: Tensor, left_out_NK: Tensor, part: VocabParallelOptions) -> LocalIds:
    mine_NK = (ids_NK >= part.start) & (ids_NK < part.stop) & ~left_out_NK
    return LocalIds(torch.where(mine_NK, ids_NK - part.start, 0).masked_fill_(left_out_NK, _LEFT_OUT), mine_NK)


def local_options(options: LogprobOptions, columns: int) -> LogprobOptions:
    """The options with which the kernels read `LocalIds`."""
    return options._replace(ignore_index=_LEFT_OUT, top_k=min(options.top_k, columns))


class Parted(NamedTuple):
    """The ids with those of the largest logits, and the whole head's statistics, for the backward."""

    local_NK: Tensor
    mine_NK: Tensor
    unknown_NK: Tensor
    """bool, ids that no process has; without those of the largest logits."""
    stats_2N: Tensor
    entropy_N: Tensor


def local_upstream(parted: Parted, upstreams: Sequence[Tensor | None], sizes: tuple[int, int]) -> Upstream:
    """The gradients with which the kernels give this process's logits those of the whole head.

    upstreams: of logprob, lse, entropy and topk_logprob. sizes: (K, J).
    """
    dlogprob, dlse, dentropy, dtopk = upstreams
    local_NK, mine_NK, unknown_NK, stats_2N, entropy_N = parted
    u_NK = joined_upstream(dlogprob, dtopk, stats_2N, sizes)
    u_NK = u_NK.masked_fill(unknown_NK.any(1, keepdim=True), float("nan")).masked_fill(local_NK == _LEFT_OUT, 0.0)
    of_others_N = torch.where(mine_NK, 0.0, u_NK).sum(1)
    dlse_N = -of_others_N if dlse is None else dlse.to(stats_2N.dtype) - of_others_N
    u_NK, dentropy_N = torch.where(mine_NK, u_NK, 0.0), contiguous(dentropy, stats_2N.dtype)
    return Upstream(local_NK, stats_2N, entropy_N, u_NK, dlse_N, dentropy_N, None)


class DividedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_UH: Tensor, bias: Tensor | None, call: DividedLogprobsCall,
        grad_enabled: bool,
    ) -> Results:  # fmt: skip
        ctx.want = tuple(grad_enabled and need for need in ctx.needs_input_grad[:3])
        options, index, ids_NK, rows = call.options, call.index, call.ids_NK, hidden_NH.shape[0]
        if index is not None:
            hidden_NH, ids_NK = hidden_NH.index_select(0, index), ids_NK.index_select(0, index)
        tensors = HeadTensors(hidden_NH, weight_UH, bias)
        local = local_ids(ids_NK, ids_NK == options.ignore_index, call.part)
        block_bytes, most_kept = call.chunk_bytes
        N, U = hidden_NH.shape[0], weight_UH.shape[0]
        keep = any(ctx.want) and keeps_logits(N, U, tensors.logit_bytes, most_kept)
        of_local = local_options(options, U)
        computed = local_forward(tensors, local.local_NK, of_local, keep, block_bytes)
        results, parted = combined(computed, local, options, call.part)
        check_known(ids_NK, parted.unknown_NK, hidden_NH)
        if any(ctx.want):
            kept = computed.kept_NV if keep else None
            ctx.save_for_backward(hidden_NH, weight_UH, bias, *parted, kept, index)
        ctx.options, ctx.rows, ctx.part = of_local, rows, call.part
        ctx.block_bytes = most_kept if keep else block_bytes
        ctx.sizes = (ids_NK.shape[1], options.top_k)
        ctx.set_materialize_grads(False)
        results = spread_results(results, index, rows, options, lse=True)
        ctx.mark_non_differentiable(results.predicted_N, results.topk_ids_NJ)
        return results

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dlogprob: Tensor | None, dlse: Tensor | None, dentropy: Tensor | None, _dpredicted: Any,
        dtopk: Tensor | None, _dids: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        hidden_NH, weight_UH, bias, *parted, kept_NV, index = ctx.saved_tensors
        upstreams = tuple(
            g if g is None or index is None else g.index_select(0, index) for g in (dlogprob, dlse, dentropy, dtopk)
        )
        upstream = local_upstream(Parted(*parted), upstreams, ctx.sizes)
        gradients, left = _local_backward(ctx, HeadTensors(hidden_NH, weight_UH, bias), upstream, kept_NV)
        x_dtype, U = hidden_NH.dtype, weight_UH.shape[0]
        want_hidden, want_weight, want_bias = ctx.want
        dx = None
        if want_hidden:
            dx = gradients.dx_NH if left is None else gradients.dx_NH.mul_(left)
            ctx.part.sum_hidden_grad(dx)
            dx = finished(dx, None, index, ctx.rows, x_dtype)
        return (
            dx,
            finished(gradients.dw_VH, left, None, U, x_dtype) if want_weight else None,
            finished(gradients.db_V.unsqueeze(1), left, None, U, x_dtype).squeeze(1) if want_bias else None,
            None,
            None,
        )


def local_forward(
    tensors: HeadTensors, local_NK: Tensor, options: LogprobOptions, keep: bool, block_bytes: int
) -> ForwardResults:
    """The results of a softmax over this process's rows alone."""
    x_NH, U = tensors.hidden_NH, tensors.weight_VH.shape[0]
    if U:
        return linear_logprobs_fwd(tensors, local_NK, options, keep, block_bytes)  # type: ignore[no-any-return]
    N, acc = x_NH.shape[0], torch.promote_types(x_NH.dtype, torch.float32)
    nothing = x_NH.new_full((2, N), -torch.inf, dtype=acc)
    return ForwardResults(
        logprob_NK=nothing.new_zeros(local_NK.shape),
        stats_2N=nothing,
        entropy_N=nothing.new_zeros(N if options.entropy else 0),
        predicted_N=local_NK.new_zeros(N if options.predicted else 0),
        topk_logprob_NJ=nothing.new_empty((N, 0)),
        topk_ids_NJ=local_NK.new_empty((N, 0)),
        kept_NV=nothing.new_empty((N, 0)),
    )


def _local_backward(
    ctx: Any, tensors: HeadTensors, upstream: Upstream, kept_NV: Tensor | None
) -> tuple[Gradients, Tensor | None]:
    """The gradients of this process's rows, and the factor that they lack or None."""
    x_NH, weight_UH = tensors.hidden_NH, tensors.weight_VH
    (N, H), U, acc = x_NH.shape, weight_UH.shape[0], upstream.stats_2N.dtype
    if not U:
        dx = x_NH.new_zeros((N if ctx.want[0] else 0, H), dtype=acc)
        return Gradients(dx, weight_UH.new_zeros((0, H)), weight_UH.new_zeros(0)), None
    scale = left = None
    if x_NH.dtype == torch.float16 and N:
        scale, left = fp16_scales(upstream.dlogprob_NK, upstream.dlse_N, upstream.dentropy_N, ctx.options)
    want_hidden, want_weight, want_bias = ctx.want
    options = BackwardOptions(want_hidden, want_weight, want_bias, ctx.block_bytes, fp32_hidden=True)
    scaled = Upstream(**{**vars(upstream), "scale": scale})
    return linear_logprobs_bwd(tensors, scaled, kept_NV, ctx.options, options), left


# --- the exchange -----------------------------------------------------------------------------------------------------


def combined(
    computed: Any, local: LocalIds, options: LogprobOptions, part: VocabParallelOptions
) -> tuple[Results, Parted]:
    """(the whole head's results of the tokens that count, what the backward needs)

    computed: the results for this process's columns, with the fields of `Results` but `stats_2N` for lse.
    """
    left_out_NK, acc = local.local_NK == _LEFT_OUT, computed.stats_2N.dtype
    m_N = computed.stats_2N[0]
    nothing_N1 = (m_N == -torch.inf).unsqueeze(1)  # a softmax of -inf alone has no log-probabilities
    logprob_NK = torch.where(nothing_N1, -torch.inf, computed.logprob_NK).masked_fill_(~local.mine_NK, _NOT_MINE)
    topk_NJ = torch.where(nothing_N1, -torch.inf, computed.topk_logprob_NJ)
    N, missing = len(m_N), options.top_k - computed.topk_ids_NJ.shape[1]
    columns = [
        computed.stats_2N.t(),
        logprob_NK,
        _column(computed.entropy_N, N, options.entropy),
        _column(computed.predicted_N + part.start, N, options.predicted),
        F.pad(topk_NJ, (0, missing), value=-torch.inf),
        F.pad(computed.topk_ids_NJ + part.start, (0, missing), value=-1),
    ]
    stats, logprob, entropy, predicted, topk, topk_ids = exchange(part, columns, acc)
    m, log_s = stats.unbind(2)
    top_N = m.amax(0)
    base_N = torch.where(top_N == -torch.inf, 0.0, top_N)
    lse = (m - base_N) + log_s
    log_total_N = torch.logsumexp(lse, 0)
    log_share = lse - log_total_N
    ignored_N = left_out_NK.all(1)
    known = logprob != _NOT_MINE
    unknown_NK = ~known.any(0) & ~left_out_NK
    whole_NK = torch.where(known, logprob + log_share.unsqueeze(2), 0.0).sum(0)
    whole_NK = whole_NK.masked_fill_(left_out_NK, 0.0).masked_fill_(unknown_NK, float("nan"))
    stats_2N = torch.stack([top_N, log_total_N]).masked_fill_(ignored_N, 0.0)
    results = Results(
        whole_NK,
        stats_2N.sum(0),
        _entropy(entropy, log_share).masked_fill_(ignored_N, 0.0) if options.entropy else m_N.new_empty(0),
        _first_of_largest(m, predicted).masked_fill_(ignored_N, options.ignore_index)
        if options.predicted
        else left_out_NK.new_empty(0, dtype=torch.int64),
        *_largest(topk + log_share.unsqueeze(2), topk_ids, ignored_N, options),
    )
    if options.top_k:
        top = local_ids(results.topk_ids_NJ, ignored_N.unsqueeze(1).expand_as(results.topk_ids_NJ), part)
        local = LocalIds(*(torch.cat(both, 1) for both in zip(local, top, strict=True)))
    return results, Parted(*local, unknown_NK, stats_2N, results.entropy_N)


def _column(values: Tensor, tokens: int, wanted: bool) -> Tensor:
    """(N,) as (N, 1); what is not wanted as no column."""
    return values.unsqueeze(1) if wanted else values.new_empty((tokens, 0))


def _entropy(entropy: Tensor, log_share: Tensor) -> Tensor:
    share = log_share.exp()
    return torch.where(share > 0, share * (entropy.squeeze(2) - log_share), 0.0).sum(0)


def _first_of_largest(m: Tensor, predicted: Tensor) -> Tensor:
    """The lowest id of the largest logit."""
    return torch.where(m == m.amax(0), predicted.squeeze(2), torch.inf).amin(0).long()


def _largest(topk: Tensor, topk_ids: Tensor, ignored_N: Tensor, options: LogprobOptions) -> tuple[Tensor, Tensor]:
    """The `top_k` largest log-probabilities of all processes and their ids, (N, J) each."""
    J = options.top_k
    values, ids = topk.permute(1, 0, 2).flatten(1), topk_ids.permute(1, 0, 2).flatten(1).long()
    # The padding of a process with fewer than J rows comes after logits of -inf.
    real_first = (ids < 0).to(torch.uint8).argsort(dim=1, stable=True)
    values, ids = values.gather(1, real_first), ids.gather(1, real_first)
    values, order = values.sort(dim=1, descending=True, stable=True)
    values, ids = values[:, :J], ids.gather(1, order)[:, :J]
    ignored_N1 = ignored_N.unsqueeze(1)
    return values.masked_fill(ignored_N1, 0.0), ids.masked_fill(ignored_N1, options.ignore_index)


def check_known(ids_NK: Tensor, unknown_NK: Tensor, like: Tensor) -> None:
    """Raise `LabelError` for an id in no process, where labels are checked at all; all processes raise."""
    if common.wants_label_check(like) and bool(unknown_NK.any()):
        raise LabelError(
            f"id {int(ids_NK[unknown_NK][0])} is out of bounds: no process of the group holds its row, and it is not "
            "ignore_index. Does the tokenizer belong to this model?"
        )


def check_labels(head: DividedHead, ids_NK: Tensor, ignore_index: int) -> None:
    """Raise `LabelError` for an id outside the vocabulary, if that is known and labels are checked at all."""
    if head.vocab is not None and may_wait(ids_NK) and common.wants_label_check(head.hidden):
        common.check_labels(head.vocab, ids_NK, ignore_index)


@outside_graphs
def divided_logprobs(
    head: DividedHead, ids_NK: Tensor, options: LogprobOptions, chunk_bytes: tuple[int, int]
) -> Results:  # fmt: skip
    """The results of `linear_logprobs` for ids (N, K) of the whole vocabulary."""
    hidden, weight, bias = settle_dtypes(head.hidden, head.weight, head.bias)
    ids_NK = ids_NK.long()
    check_labels(head, ids_NK, options.ignore_index)
    call = DividedLogprobsCall(
        ids_NK=ids_NK,
        index=tokens_that_count(ids_NK, options.ignore_index),
        options=options,
        chunk_bytes=chunk_bytes,
        part=head.part,
    )
    hidden_NH = hidden.reshape(-1, hidden.shape[-1])
    return Results._make(DividedLogprobs.apply(hidden_NH, weight, bias, call, torch.is_grad_enabled()))


def tokens_that_count(ids_NK: Tensor, ignore_index: int) -> Tensor | None:
    """Flat positions of the tokens that count, or None to compute all.

    It depends on the ids alone: processes with different numbers of rows must drop the same tokens.
    """
    if not may_wait(ids_NK):
        return None
    index_N = (ids_NK != ignore_index).any(1).nonzero().squeeze(1)
    return worth_gathering(index_N, ids_NK.shape[0])
