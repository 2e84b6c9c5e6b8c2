"""How a process holds the rows of logits whose log-probabilities it computes: whole, or some of their columns.

A process with some columns computes the statistics of its own logits. For the share P_r = exp(lse_r - lse) of the
probability that is process r's, with the labels' columns in one process each,

    lse = log Σ_r exp(lse_r)      log p(id) = log p_r(id) + log P_r      entropy = Σ_r P_r · (entropy_r - log P_r)

In the backward, a process's logits have the gradients of whole rows if the kernels get the group's statistics. An id of
another process adds to the factor A of `kernels/logprobs.py` alone, as a gradient of -lse would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import LabelError
from tigon.ops.losses.inputs import wants_label_check
from tigon.ops.losses.logprob_inputs import LogprobOptions
from tigon.ops.losses.logprob_rows import Upstream, backward_ids, backward_options, contiguous, joined_upstream
from tigon.ops.losses.results import Results, RowResults
from tigon.ops.vocab_parallel import VocabParallelOptions, exchange

# N tokens, K ids of a token, J largest logits of a token.

Compute = Callable[[Tensor, LogprobOptions], RowResults]
"""The results of this process's columns for ids (N, K)."""
Grads = Sequence[Tensor | None]
"""The gradients of logprob, lse, entropy and topk_logprob."""


class Vocabulary(Protocol):
    """How the columns are held."""

    def results(
        self, compute: Compute, ids_NK: Tensor, options: LogprobOptions, lse: bool
    ) -> tuple[Results, tuple[Tensor, ...]]:
        """(the results of whole rows, what `upstream` needs). lse: whether the log-sum-exp is wanted."""

    def upstream(
        self, saved: Sequence[Tensor], grads: Grads, options: LogprobOptions, sizes: tuple[int, int]
    ) -> tuple[Upstream, LogprobOptions]:
        """The gradients of this process's columns, and the options to read them with. sizes: (K, J)"""

    def sum_hidden(self, dx_NH: Tensor, left: Tensor | None) -> Tensor | None:
        """Add up the gradient of hidden over all columns, in place; returns the factor that it still lacks."""


class WholeVocabulary:
    """All columns are in this process."""

    def results(
        self, compute: Compute, ids_NK: Tensor, options: LogprobOptions, lse: bool
    ) -> tuple[Results, tuple[Tensor, ...]]:
        rows = compute(ids_NK, options)
        lse_N = rows.stats_2N.sum(0) if lse else rows.entropy_N.new_empty(0)
        all_ids = backward_ids(ids_NK, rows.topk_ids_NJ, options)
        return Results(rows.logprob_NK, lse_N, *rows[2:]), (all_ids, rows.stats_2N, rows.entropy_N)

    def upstream(
        self, saved: Sequence[Tensor], grads: Grads, options: LogprobOptions, sizes: tuple[int, int]
    ) -> tuple[Upstream, LogprobOptions]:
        (ids_NK, stats_2N, entropy_N), (dlogprob, dlse, dentropy, dtopk), acc = saved, grads, saved[1].dtype
        dlogprob_NK = joined_upstream(dlogprob, dtopk, stats_2N, sizes)
        upstream = Upstream(
            ids_NK, stats_2N, entropy_N, dlogprob_NK, contiguous(dlse, acc), contiguous(dentropy, acc), None
        )
        return upstream, backward_options(options)

    def sum_hidden(self, dx_NH: Tensor, left: Tensor | None) -> Tensor | None:
        return left


WHOLE = WholeVocabulary()

_LEFT_OUT = -1
"""The local id of an id that is left out."""
_NOT_MINE = float("inf")
"""Stands for the log-probability of an id of another process; no log-probability is as large."""


@dataclass(frozen=True)
class DividedVocabulary:
    """This process has the columns `part`; each process of the group calls the same methods."""

    part: VocabParallelOptions

    def results(
        self, compute: Compute, ids_NK: Tensor, options: LogprobOptions, lse: bool
    ) -> tuple[Results, tuple[Tensor, ...]]:
        local = _local_ids(ids_NK, ids_NK == options.ignore_index, self.part)
        computed = compute(local.local_NK, self._local(options))
        results, parted = _combined(computed, local, options, self.part)
        _check_known(ids_NK, parted.unknown_NK, computed.stats_2N)
        return results, tuple(parted)

    def upstream(
        self, saved: Sequence[Tensor], grads: Grads, options: LogprobOptions, sizes: tuple[int, int]
    ) -> tuple[Upstream, LogprobOptions]:
        (local_NK, mine_NK, unknown_NK, stats_2N, entropy_N), (dlogprob, dlse, dentropy, dtopk) = saved, grads
        u_NK = joined_upstream(dlogprob, dtopk, stats_2N, sizes)
        u_NK = u_NK.masked_fill(unknown_NK.any(1, keepdim=True), float("nan")).masked_fill(local_NK == _LEFT_OUT, 0.0)
        of_others_N = torch.where(mine_NK, 0.0, u_NK).sum(1)
        dlse_N = -of_others_N if dlse is None else dlse.to(stats_2N.dtype) - of_others_N
        u_NK, dentropy_N = torch.where(mine_NK, u_NK, 0.0), contiguous(dentropy, stats_2N.dtype)
        return Upstream(local_NK, stats_2N, entropy_N, u_NK, dlse_N, dentropy_N, None), self._local(options)

    def _local(self, options: LogprobOptions) -> LogprobOptions:
        """The options with which the kernels read `LocalIds`."""
        columns = self.part.stop - self.part.start
        return options._replace(ignore_index=_LEFT_OUT, top_k=min(options.top_k, columns))

    def sum_hidden(self, dx_NH: Tensor, left: Tensor | None) -> None:
        self.part.sum_hidden_grad(dx_NH if left is None else dx_NH.mul_(left))


class LocalIds(NamedTuple):
    """Ids as columns of this process's logits."""

    local_NK: Tensor
    """`_LEFT_OUT` for an id that is left out, 0 for an id of another process."""
    mine_NK: Tensor
    """bool"""


class Parted(NamedTuple):
    """The ids with those of the largest logits, and the whole head's statistics, for the backward."""

    local_NK: Tensor
    mine_NK: Tensor
    unknown_NK: Tensor
    """bool, ids that no process has; without those of the largest logits."""
    stats_2N: Tensor
    entropy_N: Tensor


def _local_ids(ids_NK: Tensor, left_out_NK: Tensor, part: VocabParallelOptions) -> LocalIds:
    mine_NK = (ids_NK >= part.start) & (ids_NK < part.stop) & ~left_out_NK
    return LocalIds(torch.where(mine_NK, ids_NK - part.start, 0).masked_fill_(left_out_NK, _LEFT_OUT), mine_NK)


def _combined(
    computed: RowResults, local: LocalIds, options: LogprobOptions, part: VocabParallelOptions
) -> tuple[Results, Parted]:
    """(the whole rows' results of the tokens that count, what the backward needs), by one exchange."""
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
        top = _local_ids(results.topk_ids_NJ, ignored_N.unsqueeze(1).expand_as(results.topk_ids_NJ), part)
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


def _check_known(ids_NK: Tensor, unknown_NK: Tensor, like: Tensor) -> None:
    """Raise `LabelError` for an id in no process, where labels are checked at all; all processes raise."""
    if wants_label_check(like) and bool(unknown_NK.any()):
        raise LabelError(
            f"id {int(ids_NK[unknown_NK][0])} is out of bounds: no process of the group holds its row, and it is not "
            "ignore_index. Does the tokenizer belong to this model?"
        )
