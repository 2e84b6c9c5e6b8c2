"""The results of the losses and log-probabilities: as an operator returns them, and as the caller gets them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.losses.inputs import CountedTokens
from tigon.ops.losses.logprob_inputs import LogprobInputs, LogprobOptions

# N tokens, K ids of a token, J largest logits of a token.


class LossOutput(NamedTuple):
    """The result of a loss with `outputs`. Only `loss` is differentiable.

    loss: 0-dim fp32, or the target's shape for reduction="none".
    logprob: log p(target), fp32, the target's shape; 0 where ignored.
    entropy: -Σ p log p in nats, fp32, the target's shape; 0 where ignored.
    accuracy: 0-dim fp32, the share of tokens, without ignored ones, whose largest logit is the target's; 0 if all are
        ignored.
    predicted: index of the largest logit, int64, the target's shape; ignore_index where ignored.
    """

    loss: Tensor
    logprob: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None
    predicted: Tensor | None = None


def accuracy(predicted: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Share of the tokens (without ignored ones) that were predicted, 0-dim fp32; 0 if all are ignored."""
    valid = target != ignore_index
    return ((predicted == target) & valid).sum().float() / valid.sum().clamp(min=1)


class LossResults(NamedTuple):
    """The result of an operator of a loss."""

    loss: Tensor
    """0-dim, or (N,) for reduction="none"."""
    stats: Tensor
    """(3, N): m, log Σ exp(z - m) and z_y."""
    entropy: Tensor
    predicted: Tensor

    def with_outputs(self, loss: Tensor, target: Tensor, outputs: Collection[str], ignore_index: int) -> LossOutput:
        """The public function's result if `outputs` names anything. loss: in the public shape."""
        predicted = self.predicted
        return LossOutput(
            loss,
            logprob=logprob_of(self.stats).view(target.shape) if "logprob" in outputs else None,
            entropy=self.entropy.view(target.shape) if "entropy" in outputs else None,
            accuracy=accuracy(predicted.view(target.shape), target, ignore_index) if "accuracy" in outputs else None,
            predicted=predicted.view(target.shape) if "predicted" in outputs else None,
        )


def logprob_of(stats: Tensor) -> Tensor:
    """log p(target) from (3, N) statistics; z_y is subtracted from m before log_s is, for accuracy."""
    m, log_s, z_y = stats.unbind(0)
    return (z_y - m) - log_s


class Logprobs(NamedTuple):
    """The result of `logprobs` and `linear_logprobs` with `outputs` or `top_k`. Results not asked for are None.

    All are 0 (ids: ignore_index) where a token is left out. All but `predicted` and `topk_ids` are differentiable.

    logprob: log p(id), fp32, the shape of ids.
    lse: log-sum-exp of the logits, fp32, (...).
    entropy: -Σ p log p in nats, fp32, (...).
    predicted: index of the largest logit, int64, (...).
    topk_logprob: log p of the `top_k` largest logits, largest first, fp32, (..., top_k).
    topk_ids: their indices, int64, (..., top_k).
    """

    logprob: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    predicted: Tensor | None = None
    topk_logprob: Tensor | None = None
    topk_ids: Tensor | None = None


class RowResults(NamedTuple):
    """The results of some rows, as the operators return them; what is not wanted is empty."""

    logprob_NK: Tensor
    stats_2N: Tensor
    """m and log Σ exp(z - m)."""
    entropy_N: Tensor
    predicted_N: Tensor
    topk_logprob_NJ: Tensor
    topk_ids_NJ: Tensor

    @classmethod
    def joined(cls, parts: Sequence[RowResults]) -> RowResults:
        """The results of several parts, whose rows are the last dimension of stats_2N, the first of the others."""
        dims = (0, 1, 0, 0, 0, 0)
        return cls(*(torch.cat(fields, dim) for fields, dim in zip(zip(*parts, strict=True), dims, strict=True)))


class Results(NamedTuple):
    """The results of each token; what is not wanted is empty."""

    logprob_NK: Tensor
    lse_N: Tensor
    entropy_N: Tensor
    predicted_N: Tensor
    topk_logprob_NJ: Tensor
    topk_ids_NJ: Tensor

    def spread(self, counted: CountedTokens, options: LogprobOptions, *, lse: bool) -> Results:
        """The results of all tokens; what is not wanted stays empty."""
        if counted.index_N is None:
            return self
        ignored = options.ignore_index
        return Results(
            counted.spread(self.logprob_NK, 0.0),
            counted.spread(self.lse_N, 0.0) if lse else self.lse_N,
            counted.spread(self.entropy_N, 0.0) if options.entropy else self.entropy_N,
            counted.spread(self.predicted_N, ignored) if options.predicted else self.predicted_N,
            counted.spread(self.topk_logprob_NJ, 0.0),
            counted.spread(self.topk_ids_NJ, ignored),
        )

    def public(self, given: LogprobInputs) -> Tensor | Logprobs:
        """The public function's result: the log-probabilities alone, or `Logprobs`."""
        _, options, lse, ids_shape, rows = given
        logprob = self.logprob_NK.view(ids_shape)
        if not (lse or options.entropy or options.predicted or options.top_k):
            return logprob
        top = (*rows, options.top_k)
        return Logprobs(
            logprob,
            lse=self.lse_N.view(rows) if lse else None,
            entropy=self.entropy_N.view(rows) if options.entropy else None,
            predicted=self.predicted_N.view(rows) if options.predicted else None,
            topk_logprob=self.topk_logprob_NJ.view(top) if options.top_k else None,
            topk_ids=self.topk_ids_NJ.view(top) if options.top_k else None,
        )


def wanted_gradients(grads: Sequence[Tensor | None], options: LogprobOptions, lse: bool) -> list[Tensor | None]:
    """The gradients of logprob, lse, entropy and topk_logprob, from those of `Results`.

    A compiled graph passes zeros for a result that was not asked for; they become None.
    """
    dlogprob, dlse, dentropy, _, dtopk, _ = grads
    return [dlogprob, dlse if lse else None, dentropy if options.entropy else None, dtopk]
