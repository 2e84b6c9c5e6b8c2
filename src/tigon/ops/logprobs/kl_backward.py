"""The backward of `linear_kl`, for whole and for divided heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.ops.logprobs.kl_blocks import HeadPair, KlBackwardOptions, KlGradients, linear_kl_bwd
from tigon.ops.logprobs.kl_rows import DivergenceRows, KlUpstream, fp16_scale
from tigon.ops.logprobs.results import finished
from tigon.ops.logprobs.rows import contiguous
from tigon.ops.vocab_parallel import VocabParallelOptions


def save_for_backward(
    ctx: Any, pair: HeadPair, counts_N: Tensor | None, index: Tensor | None, rows: DivergenceRows,
    kept: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """kept: the logits of p and of q, or None if the backward is to compute them again."""
    p_kept_NV, q_kept_NV = kept or (None, None)
    ctx.save_for_backward(
        *vars(pair).values(), counts_N, index, rows.stats_8N, rows.peaks_2N, p_kept_NV, q_kept_NV
    )  # fmt: skip


def kl_gradients(ctx: Any, dvalue_N: Tensor, part: VocabParallelOptions | None) -> list[Tensor | None]:
    """The gradients of hidden, weight and bias of p and of q; None where `ctx.want` is False.

    part: this process's rows of heads that are divided by vocabulary; None for whole heads.
    """
    *tensors, counts_N, index, stats_8N, peaks_2N, p_kept_NV, q_kept_NV = ctx.saved_tensors
    pair, options = HeadPair(*tensors), ctx.options
    dvalue_N = contiguous(dvalue_N if index is None else dvalue_N.index_select(0, index), stats_8N.dtype)
    p_scale = p_left = q_scale = q_left = None
    if pair.tokens and pair.p_hidden_NG.dtype == torch.float16:
        p_scale, p_left = fp16_scale(dvalue_N, options.p, is_difference=options.is_jsd)
    if pair.tokens and pair.q_hidden_NH.dtype == torch.float16:
        q_scale, q_left = fp16_scale(dvalue_N, options.q, is_difference=True)
    upstream = KlUpstream(counts_N, stats_8N, peaks_2N, dvalue_N, p_scale, q_scale)
    wanted = KlBackwardOptions._make((*ctx.want, ctx.block_bytes, part is not None))
    if pair.vocab:
        gradients = linear_kl_bwd(pair, upstream, p_kept_NV, q_kept_NV, options, wanted)
    else:
        gradients = _no_gradients(pair, stats_8N.dtype)
    results: list[Tensor | None] = []
    for side, (left, dtype) in enumerate(((p_left, pair.p_hidden_NG.dtype), (q_left, pair.q_hidden_NH.dtype))):
        dx, dw, db = gradients[3 * side : 3 * side + 3]
        want_hidden, want_weight, want_bias = ctx.want[3 * side : 3 * side + 3]
        if want_hidden and part is not None:
            part.sum_hidden_grad(dx)
        results += [
            finished(dx, left, index, ctx.rows, dtype) if want_hidden else None,
            finished(dw, left, None, pair.vocab, dtype) if want_weight else None,
            finished(db.unsqueeze(1), left, None, pair.vocab, dtype).squeeze(1) if want_bias else None,
        ]
    return results


def _no_gradients(pair: HeadPair, acc: torch.dtype) -> KlGradients:
    """The gradients of a process that holds no row of the weights."""
    p, q = pair.p_hidden_NG, pair.q_hidden_NH
    return KlGradients(
        p.new_zeros(p.shape, dtype=acc), p.new_zeros((0, p.shape[1])), p.new_zeros(0),
        q.new_zeros(q.shape, dtype=acc), q.new_zeros((0, q.shape[1])), q.new_zeros(0),
    )  # fmt: skip
