"""The results of `linear_logprobs` on their way to the caller, and gradients on their way to autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops.logprobs.rows import LogprobOptions, Logprobs
from tigon.ops.losses import common

# N tokens, K ids of a token, J largest logits of a token.


class Results(NamedTuple):
    """The results of the operator, one row per token; what is not wanted is empty."""

    logprob_NK: Tensor
    lse_N: Tensor
    entropy_N: Tensor
    predicted_N: Tensor
    topk_logprob_NJ: Tensor
    topk_ids_NJ: Tensor


def spread_rows(values: Tensor, index: Tensor | None, rows: int, fill: float) -> Tensor:
    """`values` at their flat positions among `rows`, `fill` elsewhere."""
    if index is None:
        return values
    return values.new_full((rows, *values.shape[1:]), fill).index_copy_(0, index, values)


def spread_results(results: Results, index: Tensor | None, rows: int, options: LogprobOptions, *, lse: bool) -> Results:
    """The results at their flat positions; what is not wanted stays empty."""
    ignored = options.ignore_index
    return Results(
        spread_rows(results.logprob_NK, index, rows, 0.0),
        spread_rows(results.lse_N, index, rows, 0.0) if lse else results.lse_N,
        spread_rows(results.entropy_N, index, rows, 0.0) if options.entropy else results.entropy_N,
        spread_rows(results.predicted_N, index, rows, ignored) if options.predicted else results.predicted_N,
        spread_rows(results.topk_logprob_NJ, index, rows, 0.0),
        spread_rows(results.topk_ids_NJ, index, rows, ignored),
    )


def finished(gradient: Tensor, left: Tensor | None, index: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor:
    """A gradient times the factor it lacks, in its own dtype, at its positions."""
    if left is None and index is None and gradient.dtype == dtype:
        return gradient
    left = torch.ones((), dtype=torch.float32, device=gradient.device) if left is None else left
    return common.scale_rows(gradient, left, index, rows, dtype)  # type: ignore[no-any-return]


def public(
    results: Results, ids_shape: torch.Size, rows: torch.Size, options: LogprobOptions, lse: bool
) -> Tensor | Logprobs:
    """The public function's result: the log-probabilities alone, or `Logprobs`."""
    logprob = results.logprob_NK.view(ids_shape)
    if not (lse or options.entropy or options.predicted or options.top_k):
        return logprob
    top = (*rows, options.top_k)
    return Logprobs(
        logprob,
        lse=results.lse_N.view(rows) if lse else None,
        entropy=results.entropy_N.view(rows) if options.entropy else None,
        predicted=results.predicted_N.view(rows) if options.predicted else None,
        topk_logprob=results.topk_logprob_NJ.view(top) if options.top_k else None,
        topk_ids=results.topk_ids_NJ.view(top) if options.top_k else None,
    )
