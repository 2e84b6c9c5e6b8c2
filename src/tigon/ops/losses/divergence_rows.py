"""Divergence of two distributions per row and its gradient, from two rows of logits.

The formulas are at the top of `kernels/kl.py`. A KL divergence is KL(p || q). In the reverse KL, p is the
student; in the forward KL and in the Jensen-Shannon divergence, p is the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops import dispatch
from tigon.ops.losses.inputs import FP16_SCALE
from tigon.ops.losses.logprob_inputs import LogprobOptions
from tigon.ops.losses.logprob_rows import row_slices, squashed

# N rows (tokens), C columns of a block, V vocabulary.

_NEAR, _NEAR_MAXIMA = 0.5, 4.0  # see kernels/kl.py
_LARGEST_LOG_RATIO = 16.0
"""|log(p / q)| of the columns that matter to the gradient p · (log(p / q) - KL), for fp16's range."""


class KlOptions(NamedTuple):
    """The divergence of a call, and how each side's logits follow from its product."""

    beta: float = 0.0
    """Share of p in the mixture of the Jensen-Shannon divergence; 0 for KL(p || q)."""
    temperature: float = 1.0
    p_softcap: float | None = None
    p_logit_scale: float = 1.0
    q_softcap: float | None = None
    q_logit_scale: float = 1.0

    @property
    def is_jsd(self) -> bool:
        return self.beta > 0.0

    @property
    def p(self) -> LogprobOptions:
        return LogprobOptions(softcap=self.p_softcap, logit_scale=self.p_logit_scale, temperature=self.temperature)

    @property
    def q(self) -> LogprobOptions:
        return LogprobOptions(softcap=self.q_softcap, logit_scale=self.q_logit_scale, temperature=self.temperature)


class LogitPair(NamedTuple):
    """Raw logits of p and q, of the same rows and columns."""

    p_NC: Tensor
    q_NC: Tensor
    first: int = 0
    """The vocabulary's column that is the block's first."""

    @property
    def use_kernel(self) -> bool:
        return dispatch.uses_kernel(self.p_NC) and dispatch.uses_kernel(self.q_NC)

    def part(self, rows: slice) -> LogitPair:
        return LogitPair(self.p_NC[rows], self.q_NC[rows], self.first)


@dataclass(frozen=True)
class DivergenceRows:
    """The results of some rows."""

    counts_N: Tensor | None
    """uint8, 0 for a row that is left out; None if none is."""
    value_N: Tensor
    stats_8N: Tensor
    """m and log Σ exp(z - m) of p, those of q, the means in the gradients of p and of q, z_q in the column of the
    largest z_p, and z_p in the column of the largest z_q."""
    peaks_2N: Tensor
    """int32, the columns of the largest z_p and of the largest z_q. They have the strides of stats_8N."""

    def part(self, rows: slice) -> DivergenceRows:
        counts_N = None if self.counts_N is None else self.counts_N[rows]
        return DivergenceRows(counts_N, self.value_N[rows], self.stats_8N[:, rows], self.peaks_2N[:, rows])


@dataclass(frozen=True)
class KlUpstream:
    """The gradient of the divergence, and the statistics of the rows."""

    counts_N: Tensor | None
    stats_8N: Tensor
    peaks_2N: Tensor
    dvalue_N: Tensor
    p_scale: Tensor | None
    """0-dim; multiplies the gradient of p's logits. None for 1."""
    q_scale: Tensor | None

    def part(self, rows: slice) -> KlUpstream:
        """The gradients of some rows."""
        counts_N = None if self.counts_N is None else self.counts_N[rows]
        stats_8N, peaks_2N = self.stats_8N[:, rows], self.peaks_2N[:, rows]
        return KlUpstream(counts_N, stats_8N, peaks_2N, self.dvalue_N[rows], self.p_scale, self.q_scale)


def fp16_scale(dvalue_N: Tensor, logits: LogprobOptions, is_difference: bool) -> tuple[Tensor, Tensor]:
    """(factor of a side's stored gradient, factor still to multiply by) for fp16; their product is 1.

    is_difference: an entry is at most the upstream gradient, as with q - p. fp16 stores the entries 64 times below its
    largest number, so that few small ones underflow.
    """
    largest = 1.0 if is_difference else _LARGEST_LOG_RATIO
    size = dvalue_N.abs().amax() * (largest * abs(logits.logit_scale / logits.temperature))
    size = torch.where(size > 0, size, torch.ones_like(size))
    return FP16_SCALE / size, size / FP16_SCALE


def divergence(
    logits: LogitPair, rows: DivergenceRows, options: KlOptions, *, statistics: bool = True, terms: bool = True
) -> None:
    """Write the divergence of rows, whose logits are of the whole vocabulary, and their statistics into `rows`.

    For logits of a part of the vocabulary, call it with `statistics` alone, write the whole's into `rows`, and call it
    with `terms` alone. The divergence and the two means are then sums over the parts.
    """
    if logits.use_kernel:
        from tigon.kernels.kl import divergence as divergence_of_rows

        divergence_of_rows(logits, rows, options, statistics, terms)
        return
    N, C = logits.p_NC.shape
    for at in row_slices(N, 2 * C):
        _divergence_reference(logits.part(at), rows.part(at), options, statistics, terms)


def divergence_gradient(
    logits: LogitPair, upstream: KlUpstream, options: KlOptions, p_grad_NC: Tensor | None, q_grad_NC: Tensor | None
) -> None:
    """Write the gradients of a block of columns. A gradient may be written over its logits; None is not computed."""
    if logits.use_kernel:
        from tigon.kernels.kl import divergence_gradient as gradient_of_block

        gradient_of_block(logits, upstream, options, p_grad_NC, q_grad_NC)
        return
    N, C = logits.p_NC.shape
    for at in row_slices(N, 2 * C):
        grads = (None if g is None else g[at] for g in (p_grad_NC, q_grad_NC))
        _gradient_reference(logits.part(at), upstream.part(at), options, *grads)


# --- the reference ----------------------------------------------------------------------------------------------------


def _statistics(z: Tensor) -> tuple[Tensor, Tensor]:
    """(max z, log Σ exp(z - max z)) of the rows."""
    m = z.amax(1)
    return m, (z - torch.where(m == -torch.inf, 0.0, m).unsqueeze(1)).exp().sum(1).log()


def _forward_peaks(z_p: Tensor, z_q: Tensor, upstream: KlUpstream, first: int) -> tuple[Tensor, Tensor]:
    """z_p and z_q with the forward's values in the columns of their maxima (see kernels/kl.py)."""
    stats, columns = upstream.stats_8N.unsqueeze(2), torch.arange(first, first + z_p.shape[1], device=z_p.device)
    at_p, at_q = (columns == peak for peak in upstream.peaks_2N.unsqueeze(2))
    return (
        torch.where(at_p, stats[0], torch.where(at_q, stats[7], z_p)),
        torch.where(at_q, stats[2], torch.where(at_p, stats[6], z_q)),
    )


def _compare(z_p: Tensor, z_q: Tensor, stats_8N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(p, q, log p - log q)"""
    m_p, log_p, m_q, log_q = stats_8N[:4].unsqueeze(2)
    m_p, m_q = (torch.where(m == -torch.inf, 0.0, m) for m in (m_p, m_q))
    shifted_p, shifted_q = z_p - m_p, z_q - m_q
    apart = m_p - m_q
    d = torch.where(apart.abs() <= _NEAR_MAXIMA, (z_p - z_q) - apart, shifted_p - shifted_q) - (log_p - log_q)
    return (shifted_p - log_p).exp(), (shifted_q - log_q).exp(), d


def _rest_of_exp(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d; its Taylor series near 0, where the difference would cancel."""
    near = d.clamp(-_NEAR, _NEAR)
    series = torch.zeros_like(near)
    for n in range(17 if d.dtype == torch.float64 else 10, 1, -1):
        series = (1.0 - series) * near / n
    return torch.where(d.abs() < _NEAR, series * near, torch.expm1(-d) + d)


def _over_mixture(d: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(log(p / m), log(q / m)) of the mixture m = beta · p + (1 - beta) · q, for d = log(p / q)."""
    larger = -torch.log1p(torch.expm1(-d.abs()) * torch.where(d >= 0, d.new_full((), 1.0 - beta), beta))
    return torch.where(d >= 0, larger, larger + d), torch.where(d >= 0, larger - d, larger)


def _times(p: Tensor, x: Tensor) -> Tensor:
    """p · x, and 0 for p = 0, where x may be infinite or NaN."""
    return torch.where(p == 0, 0.0, p * x)


def _left_out(counts_N: Tensor) -> Tensor:
    return counts_N == 0


def _divergence_reference(
    logits: LogitPair, rows: DivergenceRows, options: KlOptions, statistics: bool, terms: bool
) -> None:
    acc, stats_8N = rows.value_N.dtype, rows.stats_8N
    z_p, _ = squashed(logits.p_NC.to(acc, copy=True), options.p)
    z_q, _ = squashed(logits.q_NC.to(acc, copy=True), options.q)
    if statistics:
        stats_8N[0], stats_8N[1] = _statistics(z_p)
        stats_8N[2], stats_8N[3] = _statistics(z_q)
        peaks_N2 = torch.stack((z_p.argmax(1), z_q.argmax(1)), 1)
        rows.peaks_2N.copy_(peaks_N2.t())
        stats_8N[6] = z_q.gather(1, peaks_N2[:, :1]).squeeze(1)
        stats_8N[7] = z_p.gather(1, peaks_N2[:, 1:]).squeeze(1)
    if terms:
        _terms_reference(z_p, z_q, rows, options)
    if rows.counts_N is not None:
        left_out = _left_out(rows.counts_N)
        rows.value_N.masked_fill_(left_out, 0.0)
        stats_8N.masked_fill_(left_out, 0.0)
        rows.peaks_2N.masked_fill_(left_out, 0)


def _terms_reference(z_p: Tensor, z_q: Tensor, rows: DivergenceRows, options: KlOptions) -> None:
    stats_8N = rows.stats_8N
    p, q, d = _compare(z_p, z_q, stats_8N)
    if options.is_jsd:
        u, v = _over_mixture(d, options.beta)
        of_p, of_q = _times(p, u), _times(q, v)
        terms = options.beta * of_p + (1.0 - options.beta) * of_q
        stats_8N[4], stats_8N[5] = of_p.sum(1), of_q.sum(1)
    else:
        of_p = _times(p, d)
        near = d.abs() < _NEAR
        of_q = torch.where(near, p * torch.expm1(-d), q - p)
        terms = torch.where(near, p * _rest_of_exp(d), of_p + of_q)
        stats_8N[4], stats_8N[5] = of_p.sum(1), of_q.sum(1)
    rows.value_N.copy_(terms.sum(1))


def _gradient_reference(
    logits: LogitPair, upstream: KlUpstream, options: KlOptions, p_grad_NC: Tensor | None, q_grad_NC: Tensor | None
) -> None:
    acc, beta = upstream.stats_8N.dtype, options.beta
    z_p, p_slope = squashed(logits.p_NC.to(acc, copy=True), options.p)
    z_q, q_slope = squashed(logits.q_NC.to(acc, copy=True), options.q)
    z_p, z_q = _forward_peaks(z_p, z_q, upstream, logits.first)
    p, q, d = _compare(z_p, z_q, upstream.stats_8N)
    p_mean, q_mean = upstream.stats_8N[4:6].unsqueeze(2)
    u, v = _over_mixture(d, beta) if options.is_jsd else (d, d)

    def write(dz: Tensor, slope: Tensor | float, scale: Tensor | None, grad_NC: Tensor) -> None:
        dz = dz * slope * upstream.dvalue_N.unsqueeze(1)
        if scale is not None:
            dz.mul_(scale)
        grad_NC.copy_(
            dz if upstream.counts_N is None else dz.masked_fill_(_left_out(upstream.counts_N).unsqueeze(1), 0.0)
        )

    if p_grad_NC is not None:
        dz = _times(p, u - p_mean)
        write(beta * dz if options.is_jsd else dz, p_slope, upstream.p_scale, p_grad_NC)
    if q_grad_NC is not None:
        if options.is_jsd:
            dz = (1.0 - beta) * _times(q, v - q_mean)
        else:
            dz = torch.where(d.abs() < _NEAR, p * (torch.expm1(-d) - q_mean), q - p - p * q_mean)
        write(dz, q_slope, upstream.q_scale, q_grad_NC)
