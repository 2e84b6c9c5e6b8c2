"""Log-probabilities and their gradient from rows of logits, which may come in blocks of columns.

The formulas are at the top of `kernels/logprobs.py`. Two functions do the work on every device: `add_block` adds a
block of columns to the statistics of the rows, and `gradient_into` turns a block into its gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.ops import dispatch
from tigon.ops.losses.inputs import FP16_SCALE
from tigon.ops.losses.logprob_inputs import LogprobOptions
from tigon.ops.losses.results import RowResults

# N rows (tokens), C columns of a block, V vocabulary, K ids of a row, J largest logits of a row.

_BLOCK_ELEMENTS = 1 << 19
"""Elements of the rows that the reference computes at once: 2 MiB of fp32, which stay in cache."""
NO_ID = -(1 << 31)
"""The `ignore_index` of ids that tigon has written."""
_LARGEST_LOGPROB = 16.0
"""|log p| of the tokens that matter to an entropy's gradient p · (log p + entropy), for fp16's range."""


@dataclass(frozen=True)
class Block:
    """Raw logits of all rows and some columns of the vocabulary."""

    logits_NC: Tensor
    first: int
    """The id of the first column."""
    vocab: int
    """Columns of all blocks."""


@dataclass(frozen=True)
class Rows:
    """The results, and what they need between the blocks. The first block starts at id 0, the last ends at V."""

    ids_NK: Tensor
    logprob_NK: Tensor
    stats_2N: Tensor
    """m and log Σ exp(z - m), valid after the last block."""
    entropy_N: Tensor
    predicted_N: Tensor
    running_3N: Tensor
    """Maximum, Σ exp(z - m) and Σ exp(z - m) (z - m) of the blocks so far; empty if there is one block."""
    label_z_NK: Tensor
    """z of the ids of the blocks so far; empty if there is one block."""
    topk_raw_NJ: Tensor
    topk_ids_NJ: Tensor

    @classmethod
    def empty(cls, ids_NK: Tensor, like: Tensor, options: LogprobOptions, one_block: bool) -> Rows:
        """Uninitialised; what is not wanted is empty."""
        (N, K), J = ids_NK.shape, options.top_k
        acc = torch.promote_types(like.dtype, torch.float32)
        return cls(
            ids_NK=ids_NK,
            logprob_NK=like.new_empty((N, K), dtype=acc),
            stats_2N=like.new_empty((2, N), dtype=acc),
            entropy_N=like.new_empty(N if options.entropy else 0, dtype=acc),
            predicted_N=like.new_empty(N if options.predicted else 0, dtype=torch.int64),
            running_3N=like.new_empty((3, 0 if one_block else N), dtype=acc),
            label_z_NK=like.new_empty((0 if one_block else N, K), dtype=acc),
            topk_raw_NJ=like.new_empty((N, J), dtype=acc),
            topk_ids_NJ=ids_NK.new_empty((N, J), dtype=torch.int64),
        )

    def ignored_N(self, ignore_index: int) -> Tensor:
        return (self.ids_NK == ignore_index).all(1)

    def results(self, options: LogprobOptions) -> RowResults:
        """The results; call it after the last block."""
        return RowResults(
            self.logprob_NK,
            self.stats_2N,
            self.entropy_N,
            self.predicted_N,
            self._topk_logprob(options),
            self.topk_ids_NJ,
        )

    def fake_results(self) -> RowResults:
        """Tensors of the shapes and dtypes of `results`, for an operator's fake."""
        fields = self.logprob_NK, self.stats_2N, self.entropy_N, self.predicted_N
        return RowResults(*fields, torch.empty_like(self.topk_raw_NJ), self.topk_ids_NJ)

    def _topk_logprob(self, options: LogprobOptions) -> Tensor:
        if not options.top_k:
            return self.topk_raw_NJ
        z, _ = squashed(self.topk_raw_NJ, options)
        m, log_s = self.stats_2N.unsqueeze(2)
        ignored_N = self.ignored_N(options.ignore_index)
        return torch.where(ignored_N.unsqueeze(1), 0.0, (z - m) - log_s)


@dataclass(frozen=True)
class Upstream:
    """The gradients of the results, and the statistics of the rows."""

    ids_NK: Tensor
    stats_2N: Tensor
    entropy_N: Tensor
    """Read only with `dentropy_N`."""
    dlogprob_NK: Tensor
    dlse_N: Tensor | None
    dentropy_N: Tensor | None
    scale: Tensor | None
    """0-dim; multiplies the gradient. None for 1."""

    def part(self, rows: slice) -> Upstream:
        """The gradients of some rows."""
        if rows == slice(0, self.ids_NK.shape[0]):
            return self
        return Upstream(
            ids_NK=self.ids_NK[rows],
            stats_2N=self.stats_2N[:, rows].contiguous(),
            entropy_N=self.entropy_N[rows],
            dlogprob_NK=self.dlogprob_NK[rows],
            dlse_N=None if self.dlse_N is None else self.dlse_N[rows],
            dentropy_N=None if self.dentropy_N is None else self.dentropy_N[rows],
            scale=self.scale,
        )


def fp16_scales(
    dlogprob_NK: Tensor, dlse_N: Tensor | None, dentropy_N: Tensor | None, options: LogprobOptions
) -> tuple[Tensor, Tensor]:
    """(factor of the stored gradient, factor still to multiply by) for fp16; their product is 1.

    The entries of a row are at most the sizes below. fp16 stores them 64 times below its largest number, so that few
    small ones underflow.
    """
    K = dlogprob_NK.shape[1]
    sizes = [K * dlogprob_NK.abs().amax()]
    if dlse_N is not None:
        sizes.append(dlse_N.abs().amax())
    if dentropy_N is not None:
        sizes.append(_LARGEST_LOGPROB * dentropy_N.abs().amax())
    size = torch.stack(sizes).sum() * abs(options.logit_scale / options.temperature)
    size = torch.where(size > 0, size, torch.ones_like(size))
    return FP16_SCALE / size, size / FP16_SCALE


def squashed(r: Tensor, options: LogprobOptions) -> tuple[Tensor, Tensor | float]:
    """(z, dz/dr) of raw logits; overwrites `r`."""
    outer = 1.0 / options.temperature
    if options.softcap is None:
        scale = options.logit_scale / options.temperature
        return (r if scale == 1.0 else r.mul_(scale)), scale
    if options.logit_scale != 1.0:
        r.mul_(options.logit_scale)
    # With e = exp(-2|t|), the slope 4e / (1 + e)^2 does not cancel if tanh saturates; 1 - tanh^2 would.
    e = r.div_(options.softcap).abs().mul_(-2.0).exp_()
    slope = 4.0 * e / (1.0 + e).square() * (options.logit_scale * outer)
    return r.tanh_().mul_(options.softcap * outer), slope


def add_block(block: Block, rows: Rows, options: LogprobOptions) -> None:
    """Add a block of columns to `rows`. The last block completes the results."""
    if dispatch.uses_kernel(block.logits_NC):
        from tigon.kernels.logprobs import logprob_statistics

        logprob_statistics(block, rows, options)
    else:
        N, C = block.logits_NC.shape
        for at in row_slices(N, C):
            _add_reference(block, rows, options, at)
    if options.top_k:
        _add_top(block, rows, options)


def row_slices(N: int, C: int) -> list[slice]:
    rows = max(1, _BLOCK_ELEMENTS // max(C, 1))
    return [slice(start, min(start + rows, N)) for start in range(0, N, rows)]


def _add_reference(block: Block, rows: Rows, options: LogprobOptions, at: slice) -> None:
    acc, C = rows.logprob_NK.dtype, block.logits_NC.shape[1]
    z, _ = squashed(block.logits_NC[at].to(acc, copy=True), options)
    ids = rows.ids_NK[at].long()
    counts = ids != options.ignore_index
    ignored = ~counts.any(1)
    here = (ids >= block.first) & (ids < block.first + C)
    label_z = z.gather(1, (ids - block.first).clamp(0, C - 1))
    first, last = block.first == 0, block.first + C == block.vocab
    label_z = torch.where(here, label_z, float("nan") if first else rows.label_z_NK[at])
    m, best = z.max(1)
    best = best + block.first
    if not first:
        m_run, s_run, t_run = rows.running_3N[:, at]
        if options.predicted:
            best = torch.where(m > m_run, best, rows.predicted_N[at])
        m = torch.maximum(m, m_run)
    base = torch.where(m == -math.inf, 0.0, m)
    shifted = z.sub_(base.unsqueeze(1))
    e = shifted.exp()
    s = e.sum(1)
    t = torch.where(e > 0, e * shifted, 0.0).sum(1) if options.entropy else torch.zeros_like(s)
    if not first:
        down = torch.where(m_run == -math.inf, 0.0, m_run - base)
        s = s + s_run * down.exp()
        t = t + (t_run + s_run * down) * down.exp()
    if options.predicted:
        rows.predicted_N[at] = best.masked_fill(ignored, options.ignore_index)
    if not last:
        rows.running_3N[:, at] = torch.stack([m, s, t])
        rows.label_z_NK[at] = label_z
        return
    log_s = s.log()
    logprob = (label_z - m.unsqueeze(1)) - log_s.unsqueeze(1)
    rows.logprob_NK[at] = torch.where(counts, logprob, 0.0)
    rows.stats_2N[:, at] = torch.stack([m, log_s]).masked_fill_(ignored, 0.0)
    if options.entropy:
        rows.entropy_N[at] = (log_s - t / s).masked_fill_(ignored, 0.0)


def _add_top(block: Block, rows: Rows, options: LogprobOptions) -> None:
    """Merge the largest logits of the block into `topk_raw_NJ`, which z increases with."""
    J, C, sign = options.top_k, block.logits_NC.shape[1], math.copysign(1.0, options.logit_scale)
    values, ids = torch.topk(block.logits_NC, min(J, C), largest=sign > 0)
    values, ids = values.to(rows.topk_raw_NJ.dtype) * sign, ids + block.first
    if block.first:
        # Columns that no block has filled would equal logits of -inf.
        known = min(J, block.first)
        values = torch.cat([rows.topk_raw_NJ[:, :known] * sign, values], 1)
        ids = torch.cat([rows.topk_ids_NJ[:, :known], ids], 1)
        values, order = torch.topk(values, min(J, known + C))
        ids = ids.gather(1, order)
    if block.first + C == block.vocab:
        ids.masked_fill_(rows.ignored_N(options.ignore_index).unsqueeze(1), options.ignore_index)
    rows.topk_raw_NJ[:, : ids.shape[1]] = values * sign
    rows.topk_ids_NJ[:, : ids.shape[1]] = ids


def gradient_into(block: Block, upstream: Upstream, options: LogprobOptions, grad_NC: Tensor) -> None:
    """Write the gradient of a block into `grad_NC`, which may be the logits themselves."""
    if dispatch.uses_kernel(block.logits_NC):
        from tigon.kernels.logprobs import logprob_gradient

        logprob_gradient(block, upstream, options, grad_NC)
        return
    N, C = block.logits_NC.shape
    for at in row_slices(N, C):
        _gradient_reference(
            Block(block.logits_NC[at], block.first, block.vocab), upstream.part(at), options, grad_NC[at]
        )


def _gradient_reference(block: Block, upstream: Upstream, options: LogprobOptions, grad_NC: Tensor) -> None:
    acc, C = upstream.stats_2N.dtype, block.logits_NC.shape[1]
    z, slope = squashed(block.logits_NC.to(acc, copy=True), options)
    ids = upstream.ids_NK.long()
    counts = ids != options.ignore_index
    invalid = counts & ((ids < 0) | (ids >= block.vocab))
    u = torch.where(counts, upstream.dlogprob_NK, 0.0).masked_fill(invalid, float("nan"))
    a = -u.sum(1)
    if upstream.dlse_N is not None:
        a = a + upstream.dlse_N
    if upstream.dentropy_N is not None:
        a = a - upstream.dentropy_N * upstream.entropy_N
    m, log_s = upstream.stats_2N.unsqueeze(2)
    logp = z.sub_(torch.where(m == -math.inf, 0.0, m)).sub_(log_s)
    p = logp.exp()
    dz = p * a.unsqueeze(1)
    if upstream.dentropy_N is not None:
        dz -= torch.where(p > 0, p * logp, 0.0) * upstream.dentropy_N.unsqueeze(1)
    here = counts & (ids >= block.first) & (ids < block.first + C)
    dz.scatter_add_(1, (ids - block.first).clamp(0, C - 1), torch.where(here, u, 0.0))
    dz.mul_(slope)
    if upstream.scale is not None:
        dz.mul_(upstream.scale)
    grad_NC.copy_(dz.masked_fill_(~counts.any(1).unsqueeze(1), 0.0))


def backward_ids(ids_NK: Tensor, topk_ids_NJ: Tensor, options: LogprobOptions) -> Tensor:
    """The ids whose log-probabilities have gradients, (N, K + J), for `backward_options`.

    The largest logits are ids like the others. One of them may equal `ignore_index`, such as a padding token's, so ids
    that are left out get a number that no vocabulary has.
    """
    if not options.top_k:
        return ids_NK
    ids_NK = ids_NK.long()
    left_out = ids_NK == options.ignore_index
    of_row = left_out.all(1, keepdim=True)
    return torch.cat([torch.where(left_out, NO_ID, ids_NK), torch.where(of_row, NO_ID, topk_ids_NJ)], 1)


def backward_options(options: LogprobOptions) -> LogprobOptions:
    """The options that the backward reads `backward_ids` with."""
    return options._replace(ignore_index=NO_ID) if options.top_k else options


def joined_upstream(dlogprob: Tensor | None, dtopk: Tensor | None, stats_2N: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Gradients of the ids and of the `top_k` largest logits, side by side; 0 for one that is None."""
    parts = zip((dlogprob, dtopk), sizes, strict=True)
    whole = [
        stats_2N.new_zeros((stats_2N.shape[1], size)) if g is None else g.to(stats_2N.dtype)
        for g, size in parts
        if size
    ]
    return whole[0].contiguous() if len(whole) == 1 else torch.cat(whole, 1)


def contiguous(gradient: Tensor | None, dtype: torch.dtype) -> Any:
    """An upstream gradient as the kernels read it."""
    return None if gradient is None else gradient.to(dtype).contiguous()
