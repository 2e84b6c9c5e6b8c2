"""Divergence of two distributions per row, and its gradient, from two rows of logits.

p and q are the softmax of z_p and z_q, which follow from raw logits as in kernels/logprobs.py. With the log-ratio
D = log p - log q of a column, and beta of the mixture m = beta · p + (1 - beta) · q:

    KL(p || q) = Σ p · (D + exp(-D) - 1)        u = log(p / m) = -log(beta + (1 - beta) · exp(-D))
    JSD        = Σ beta · p · u + (1 - beta) · q · v        v = log(q / m) = u - D

    KL:   dz_p = p · (D - Σ p · D)                  dz_q = q - p - p · Σ (q - p)
    JSD:  dz_p = beta · p · (u - Σ p · u)           dz_q = (1 - beta) · q · (v - Σ q · v)

The terms exp(-D) - 1 of the KL sum to 0, because Σ q = Σ p. With them no column's term is negative, and an error of the
log-sum-exps, which is common to all D of the row, adds only its square. The terms of the JSD need no such addition: the
first powers of D cancel in each column. D is the difference of the logits before anything is multiplied, so that it is
exact where the two are near.

The means Σ p · D, Σ (q - p), Σ p · u and Σ q · v are kept for the gradient, summed from the same rounded D. The second
is 0 but for that rounding. Where D is small, q - p is p · (exp(-D) - 1), and subtracting its mean removes the error of
the log-sum-exps. If p and q are near 1 in one column, that error would exceed q - p.

The backward may compute the logits again, in blocks of another shape, and the vendor's product may then sum in another
order. If p is near 1 in one column, its dz is the small difference between its u and the mean, so the rounding of that
one logit would not cancel. Both logits of the largest p and of the largest q are therefore kept from the forward.
"""

import triton
import triton.language as tl

from tigon.kernels import _launch
from tigon.kernels._launch import cdiv, launch, next_power_of_2
from tigon.kernels._logits import LOG2E
from tigon.kernels.logprobs import FARTHEST, _squash

# N rows (tokens), C columns of the block of logits.

# (columns per lane, num_warps, stages) of the divergence, (columns per lane, num_warps) of the gradient. 8 columns are
# one 16-byte load of 16-bit logits, for which these were measured, and two of fp32 ones. With 16 columns, a lane of the
# Jensen-Shannon divergence holds 151 registers on sm_90, and a multiprocessor takes only one program. A stage buffers a
# tile of both rows.
DIVERGENCE, GRADIENT = (8, 8, 2), (8, 8)
# Below this |D|, exp(-D) - 1 and D + exp(-D) - 1 are their Taylor series, because the differences would cancel.
NEAR = tl.constexpr(0.5)
# If the maxima of two rows are this near, z_p - z_q is rounded at most as much as (z_p - m_p) - (z_q - m_q).
NEAR_MAXIMA = tl.constexpr(4.0)


@triton.jit
def _logit(r, scale, softcap, outer, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """(z, dz/dr) of a raw logit.

    `squash` in kernels/_logits.py rounds z to fp32 after a scale, for the reason that it gives. Here z is rounded after
    a softcap too: p multiplies large log-ratios, and KL was six times as far off (H100).
    """
    z, slope = _squash(r, scale, softcap, outer, HAS_SCALE, HAS_SOFTCAP)
    if HAS_SOFTCAP:
        z = tl.where(z == z, z, r)
    return z, slope


@triton.jit
def _statistics(
    R,  # (C,), the row
    C,
    scale,
    softcap,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(max z, log Σ exp(z - max z), the first column of max z) of the row at R.

    Lanes keep separate sums. Their shift is the first tile's maximum. If a later logit is so far above it that the sum
    may overflow, the row is read again with its maximum as the shift.
    """
    offs = tl.arange(0, BLOCK)
    r = tl.load(R + offs, mask=offs < C, other=0.0).to(tl.float32)
    z, _ = _logit(r, scale, softcap, outer, HAS_SCALE, HAS_SOFTCAP)
    z_0 = tl.max(tl.where(offs < C, z, -float("inf")), axis=0)
    shift = tl.where(tl.abs(z_0) < float("inf"), z_0, 0.0)
    m = shift
    s = tl.full([], 0.0, dtype=tl.float32)
    peak = tl.full([], 0, dtype=tl.int32)
    again = tl.full([], 1, dtype=tl.int1)
    whole = C // BLOCK * BLOCK
    while again:
        lane_m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
        lane_s = tl.zeros([BLOCK], dtype=tl.float32)
        lane_peak = tl.zeros([BLOCK], dtype=tl.int32)
        for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
            r = tl.load(R + start + offs).to(tl.float32)
            z, _ = _logit(r, scale, softcap, outer, HAS_SCALE, HAS_SOFTCAP)
            lane_peak = tl.where(z > lane_m, start + offs, lane_peak)
            lane_m = tl.maximum(lane_m, z)
            lane_s += tl.exp2((z - shift) * LOG2E)
        if whole < C:
            r = tl.load(R + whole + offs, mask=whole + offs < C, other=0.0).to(tl.float32)
            z, _ = _logit(r, scale, softcap, outer, HAS_SCALE, HAS_SOFTCAP)
            z = tl.where(whole + offs < C, z, -float("inf"))
            lane_peak = tl.where(z > lane_m, whole + offs, lane_peak)
            lane_m = tl.maximum(lane_m, z)
            lane_s += tl.exp2((z - shift) * LOG2E)
        m = tl.max(lane_m, axis=0)
        s = tl.sum(lane_s, axis=0)
        # In a row of NaN no lane has the maximum.
        peak = tl.min(tl.where(lane_m == m, lane_peak, C - 1), axis=0)
        over = (m > shift + FARTHEST) & (m < float("inf"))
        # The first tile was -inf alone: 0 is no shift for logits that are far below it.
        under = (z_0 == -float("inf")) & (shift > m + FARTHEST) & (m > -float("inf"))
        again = over | under
        shift = tl.where(again, m, shift)
    # In a row of -inf alone, a maximum of 0 gives exp(-inf) = 0; -inf - -inf would give NaN.
    base = tl.where(m == -float("inf"), 0.0, m)
    return m, tl.log(s * tl.exp2((shift - base) * LOG2E)), peak


@triton.jit
def _compare(z_p, z_q, m_p, log_p, m_q, log_q):
    """(p, q, D) of columns with the logits z_p and z_q."""
    m_p = tl.where(m_p == -float("inf"), 0.0, m_p)
    m_q = tl.where(m_q == -float("inf"), 0.0, m_q)
    shifted_p, shifted_q = z_p - m_p, z_q - m_q
    apart = m_p - m_q
    d = tl.where(tl.abs(apart) <= NEAR_MAXIMA, (z_p - z_q) - apart, shifted_p - shifted_q) - (log_p - log_q)
    return tl.exp2((shifted_p - log_p) * LOG2E), tl.exp2((shifted_q - log_q) * LOG2E), d


@triton.jit
def _rest_of_exp(d):
    """exp(-d) - 1 + d for |d| < NEAR."""
    a = 1.0 / 5040.0 - d * (1.0 / 40320.0 - d * (1.0 / 362880.0))
    a = 1.0 / 24.0 - d * (1.0 / 120.0 - d * (1.0 / 720.0 - d * a))
    return d * d * (0.5 - d * (1.0 / 6.0 - d * a))


@triton.jit
def _over_mixture(d, beta):
    """(log(p / m), log(q / m)) of the mixture m = beta · p + (1 - beta) · q, for d = log(p / q)."""
    a = tl.abs(d)
    x = tl.where(a < NEAR, _rest_of_exp(a) - a, tl.exp2(-a * LOG2E) - 1.0)
    w = tl.where(d >= 0.0, 1.0 - beta, beta) * x
    # log(1 + w) with the part of w that the sum rounds away.
    y = 1.0 + w
    larger = -(tl.log(y) + (w - (y - 1.0)) / y)
    return tl.where(d >= 0.0, larger, larger + d), tl.where(d >= 0.0, larger - d, larger)


@triton.jit
def _times(p, x):
    """p · x, and 0 for p = 0, where x may be infinite or NaN."""
    return tl.where(p == 0.0, 0.0, p * x)


@triton.jit
def _terms(z_p, z_q, m_p, log_p, m_q, log_q, beta, IS_JSD: tl.constexpr):
    """The terms of columns: of the divergence, of the mean for dz_p and of the mean for dz_q."""
    p, q, d = _compare(z_p, z_q, m_p, log_p, m_q, log_q)
    if IS_JSD:
        u, v = _over_mixture(d, beta)
        mean_p, mean_q = _times(p, u), _times(q, v)
        value = beta * mean_p + (1.0 - beta) * mean_q
    else:
        mean_p = _times(p, d)
        rest = p * _rest_of_exp(d)
        near = tl.abs(d) < NEAR
        mean_q = tl.where(near, rest - p * d, q - p)
        value = tl.where(near, rest, mean_p + mean_q)
    return value, mean_p, mean_q


@triton.jit
def divergence_kernel(
    RP,  # (N, C), the raw logits of p
    RQ,  # (N, C), those of q
    Counts,  # (N,) or None
    Value,  # (N,)
    Stats,  # (8, N)
    Peaks,  # (2, N)
    C,
    stride_p,
    stride_q,
    stride_stats,
    beta,
    softcap_p,
    scale_p,
    softcap_q,
    scale_q,
    outer,
    HAS_SOFTCAP_P: tl.constexpr,
    HAS_SCALE_P: tl.constexpr,
    HAS_SOFTCAP_Q: tl.constexpr,
    HAS_SCALE_Q: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    IS_JSD: tl.constexpr,
    STATISTICS: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes the divergence of a row into Value (N,). One program per row, which reads both rows twice.

    STATISTICS: it computes max and log-sum; else it reads them from Stats. TERMS: it computes Value and the means. A
    row whose other columns another process has needs two launches, with the exchange of the statistics in between.

    Stats (8, N) gets max and log-sum of z_p, those of z_q, the means for dz_p and dz_q, z_q in the column of the
    largest z_p, and z_p in that of the largest z_q. Peaks (2, N) gets these two columns.

    A row whose entry of Counts is 0 is not read; its results are 0.
    """
    row = tl.program_id(0).to(tl.int64)
    counts = 1
    if HAS_COUNTS:
        counts = tl.load(Counts + row).to(tl.int32)
    if counts == 0:
        tl.store(Value + row, 0.0)
        for i in range(8):
            tl.store(Stats + i * stride_stats + row, 0.0)
        for i in range(2):
            tl.store(Peaks + i * stride_stats + row, 0)
    else:
        RP += row * stride_p
        RQ += row * stride_q
        if STATISTICS:
            m_p, log_p, peak_p = _statistics(
                RP, C, scale_p, softcap_p, outer, HAS_SOFTCAP_P, HAS_SCALE_P, BLOCK, STAGES
            )
            m_q, log_q, peak_q = _statistics(
                RQ, C, scale_q, softcap_q, outer, HAS_SOFTCAP_Q, HAS_SCALE_Q, BLOCK, STAGES
            )
            tl.store(Peaks + row, peak_p)
            tl.store(Peaks + stride_stats + row, peak_q)
            # The slopes have other names: the loops below assign _ a tile, and a variable of a loop keeps its
            # type.
            raw_q, raw_p = tl.load(RQ + peak_p).to(tl.float32), tl.load(RP + peak_q).to(tl.float32)
            other_q, _slope_q = _logit(raw_q, scale_q, softcap_q, outer, HAS_SCALE_Q, HAS_SOFTCAP_Q)
            other_p, _slope_p = _logit(raw_p, scale_p, softcap_p, outer, HAS_SCALE_P, HAS_SOFTCAP_P)
            tl.store(Stats + 6 * stride_stats + row, other_q)
            tl.store(Stats + 7 * stride_stats + row, other_p)
            tl.store(Stats + row, m_p)
            tl.store(Stats + stride_stats + row, log_p)
            tl.store(Stats + 2 * stride_stats + row, m_q)
            tl.store(Stats + 3 * stride_stats + row, log_q)
        else:
            m_p = tl.load(Stats + row)
            log_p = tl.load(Stats + stride_stats + row)
            m_q = tl.load(Stats + 2 * stride_stats + row)
            log_q = tl.load(Stats + 3 * stride_stats + row)
        if TERMS:
            offs = tl.arange(0, BLOCK)
            lane_value = tl.zeros([BLOCK], dtype=tl.float32)
            lane_p = tl.zeros([BLOCK], dtype=tl.float32)
            lane_q = tl.zeros([BLOCK], dtype=tl.float32)
            whole = C // BLOCK * BLOCK
            for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
                cols = start + offs
                r_p = tl.load(RP + cols).to(tl.float32)
                r_q = tl.load(RQ + cols).to(tl.float32)
                z_p, _ = _logit(r_p, scale_p, softcap_p, outer, HAS_SCALE_P, HAS_SOFTCAP_P)
                z_q, _ = _logit(r_q, scale_q, softcap_q, outer, HAS_SCALE_Q, HAS_SOFTCAP_Q)
                value, mean_p, mean_q = _terms(z_p, z_q, m_p, log_p, m_q, log_q, beta, IS_JSD)
                lane_value += value
                lane_p += mean_p
                lane_q += mean_q
            if whole < C:
                cols = whole + offs
                inside = cols < C
                r_p = tl.load(RP + cols, mask=inside, other=0.0).to(tl.float32)
                r_q = tl.load(RQ + cols, mask=inside, other=0.0).to(tl.float32)
                z_p, _ = _logit(r_p, scale_p, softcap_p, outer, HAS_SCALE_P, HAS_SOFTCAP_P)
                z_q, _ = _logit(r_q, scale_q, softcap_q, outer, HAS_SCALE_Q, HAS_SOFTCAP_Q)
                value, mean_p, mean_q = _terms(z_p, z_q, m_p, log_p, m_q, log_q, beta, IS_JSD)
                lane_value += tl.where(inside, value, 0.0)
                lane_p += tl.where(inside, mean_p, 0.0)
                lane_q += tl.where(inside, mean_q, 0.0)
            tl.store(Value + row, tl.sum(lane_value, axis=0))
            tl.store(Stats + 4 * stride_stats + row, tl.sum(lane_p, axis=0))
            tl.store(Stats + 5 * stride_stats + row, tl.sum(lane_q, axis=0))


@triton.jit
def divergence_gradient_kernel(
    RP,  # (N, C), the raw logits of p
    RQ,  # (N, C), those of q
    Counts,  # (N,) or None
    Stats,  # (8, N)
    Peaks,  # (2, N)
    DValue,  # (N,)
    ScaleP,  # () or None
    ScaleQ,  # () or None
    GradP,  # (N, C) or None
    GradQ,  # (N, C) or None
    C,
    first,
    stride_p,
    stride_q,
    stride_stats,
    stride_grad_p,
    stride_grad_q,
    beta,
    softcap_p,
    scale_p,
    softcap_q,
    scale_q,
    outer,
    HAS_SOFTCAP_P: tl.constexpr,
    HAS_SCALE_P: tl.constexpr,
    HAS_SOFTCAP_Q: tl.constexpr,
    HAS_SCALE_Q: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    IS_JSD: tl.constexpr,
    WANT_P: tl.constexpr,
    WANT_Q: tl.constexpr,
    SCALED_P: tl.constexpr,
    SCALED_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes dr of one tile of the columns [first, first + C), of one or both rows; one program per tile.

    GradP may be RP itself, and GradQ may be RQ. SCALED: dr is multiplied by the fp32 scalar at ScaleP or ScaleQ.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    counts = 1
    if HAS_COUNTS:
        counts = tl.load(Counts + row).to(tl.int32)
    if counts == 0:
        zeros = tl.zeros([BLOCK], dtype=tl.float32)
        if WANT_P:
            tl.store(GradP + row * stride_grad_p + cols, zeros.to(GradP.dtype.element_ty), mask=mask)
        if WANT_Q:
            tl.store(GradQ + row * stride_grad_q + cols, zeros.to(GradQ.dtype.element_ty), mask=mask)
    else:
        g = tl.load(DValue + row)
        m_p = tl.load(Stats + row)
        log_p = tl.load(Stats + stride_stats + row)
        m_q = tl.load(Stats + 2 * stride_stats + row)
        log_q = tl.load(Stats + 3 * stride_stats + row)
        r_p = tl.load(RP + row * stride_p + cols, mask=mask, other=0.0).to(tl.float32)
        r_q = tl.load(RQ + row * stride_q + cols, mask=mask, other=0.0).to(tl.float32)
        z_p, slope_p = _logit(r_p, scale_p, softcap_p, outer, HAS_SCALE_P, HAS_SOFTCAP_P)
        z_q, slope_q = _logit(r_q, scale_q, softcap_q, outer, HAS_SCALE_Q, HAS_SOFTCAP_Q)
        at_p = cols == tl.load(Peaks + row) - first
        at_q = cols == tl.load(Peaks + stride_stats + row) - first
        z_p = tl.where(at_p, m_p, tl.where(at_q, tl.load(Stats + 7 * stride_stats + row), z_p))
        z_q = tl.where(at_q, m_q, tl.where(at_p, tl.load(Stats + 6 * stride_stats + row), z_q))
        p, q, d = _compare(z_p, z_q, m_p, log_p, m_q, log_q)
        if IS_JSD:
            u, v = _over_mixture(d, beta)
        if WANT_P:
            mean_p = tl.load(Stats + 4 * stride_stats + row)
            if IS_JSD:
                dz_p = beta * _times(p, u - mean_p)
            else:
                dz_p = _times(p, d - mean_p)
            factor = g
            if SCALED_P:
                factor *= tl.load(ScaleP)
            dr_p = (dz_p * (slope_p * factor)).to(GradP.dtype.element_ty)
            tl.store(GradP + row * stride_grad_p + cols, dr_p, mask=mask)
        if WANT_Q:
            mean_q = tl.load(Stats + 5 * stride_stats + row)
            if IS_JSD:
                dz_q = (1.0 - beta) * _times(q, v - mean_q)
            else:
                dz_q = tl.where(tl.abs(d) < NEAR, p * (_rest_of_exp(d) - d - mean_q), q - p - p * mean_q)
            factor = g
            if SCALED_Q:
                factor *= tl.load(ScaleQ)
            dr_q = (dz_q * (slope_q * factor)).to(GradQ.dtype.element_ty)
            tl.store(GradQ + row * stride_grad_q + cols, dr_q, mask=mask)


def _numbers(options):
    """The numbers and flags of `KlOptions`, in the order of the kernels' parameters."""
    numbers, flags = {}, {}
    for side, softcap, logit_scale in (
        ("p", options.p_softcap, options.p_logit_scale),
        ("q", options.q_softcap, options.q_logit_scale),
    ):
        # Without a softcap, one factor is enough.
        scale = logit_scale if softcap is not None else logit_scale / options.temperature
        numbers |= {f"softcap_{side}": 1.0 if softcap is None else softcap, f"scale_{side}": scale}
        flags |= {f"HAS_SOFTCAP_{side.upper()}": softcap is not None, f"HAS_SCALE_{side.upper()}": scale != 1.0}
    return {"beta": options.beta, **numbers, "outer": 1.0 / options.temperature, **flags}


def _tile(columns_per_lane, warps, C):
    return min(columns_per_lane * warps * _launch.lanes(), next_power_of_2(C))


def divergence(logits, rows, options, statistics=True, terms=True):
    """Launch the divergence of rows of logits (`LogitPair`, `DivergenceRows` in ops/losses/divergence_rows.py)."""
    p_NC, q_NC = logits.p_NC, logits.q_NC
    N, C = p_NC.shape
    if not N:
        return
    columns, warps, stages = DIVERGENCE
    launch(
        divergence_kernel, (N,), p_NC,
        RP=p_NC, RQ=q_NC, Counts=rows.counts_N, Value=rows.value_N, Stats=rows.stats_8N, Peaks=rows.peaks_2N,
        C=C, stride_p=p_NC.stride(0), stride_q=q_NC.stride(0), stride_stats=rows.stats_8N.stride(0),
        **_numbers(options), HAS_COUNTS=rows.counts_N is not None, IS_JSD=options.is_jsd,
        STATISTICS=statistics, TERMS=terms, BLOCK=_tile(columns, warps, C), STAGES=stages, num_warps=warps,
    )  # fmt: skip


def divergence_gradient(logits, upstream, options, p_grad_NC, q_grad_NC):
    """Launch the gradient of a block of columns; a gradient that is None is not computed."""
    p_NC, q_NC = logits.p_NC, logits.q_NC
    N, C = p_NC.shape
    if not N:
        return
    columns, warps = GRADIENT
    size = _tile(columns, warps, C)
    launch(
        divergence_gradient_kernel, (N, cdiv(C, size)), p_NC,
        RP=p_NC, RQ=q_NC, Counts=upstream.counts_N, Stats=upstream.stats_8N, Peaks=upstream.peaks_2N,
        DValue=upstream.dvalue_N, ScaleP=upstream.p_scale, ScaleQ=upstream.q_scale, GradP=p_grad_NC, GradQ=q_grad_NC,
        C=C, first=logits.first, stride_p=p_NC.stride(0), stride_q=q_NC.stride(0),
        stride_stats=upstream.stats_8N.stride(0),
        stride_grad_p=0 if p_grad_NC is None else p_grad_NC.stride(0),
        stride_grad_q=0 if q_grad_NC is None else q_grad_NC.stride(0),
        **_numbers(options), HAS_COUNTS=upstream.counts_N is not None, IS_JSD=options.is_jsd,
        WANT_P=p_grad_NC is not None, WANT_Q=q_grad_NC is not None, SCALED_P=upstream.p_scale is not None,
        SCALED_Q=upstream.q_scale is not None, BLOCK=size, num_warps=warps,
    )  # fmt: skip
