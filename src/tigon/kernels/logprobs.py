"""Log-probabilities of ids, and their gradient, from rows of logits that may come in blocks of columns.

For raw logits r, the distribution of a row is that of z = softcap · tanh(scale · r / softcap) · outer. Without a
softcap z = scale · r. With m = max z and s = Σ exp(z - m):

    log p_j = (z_j - m) - log s      lse = m + log s      entropy = log s - Σ exp(z - m) (z - m) / s

For upstream gradients u_k of the K log-probabilities of a row, v of lse and w of the entropy:

    dz_j = p_j · (A + B · log p_j) + Σ_k u_k · 1[j = id_k],    A = v - w · entropy - Σ_k u_k,    B = -w

So one pass turns the logits into their gradient, for any upstream gradient.
"""

import triton
import triton.language as tl

from tigon.kernels._launch import cdiv, launch, next_power_of_2
from tigon.kernels._logits import LOG2E, squash

# N rows (tokens), C columns of the block of logits, V columns of all blocks (vocabulary), K ids of a row.

# (BLOCK, num_warps, stages) of the statistics, (BLOCK, num_warps) of the gradient. Both are the settings that
# kernels/cross_entropy.py measured for its passes, which read and write the same bytes.
STATISTICS, GRADIENT = (4096, 8, 3), (4096, 8)
# A row whose maximum is this far above the shift is read again with its maximum as the shift. For the sum alone, the
# bound is that exp(88) overflows. The entropy also subtracts the distance, whose rounding is an error.
FARTHEST, FARTHEST_ENTROPY = tl.constexpr(60.0), tl.constexpr(4.0)


@triton.jit
def _squash(r, scale, softcap, outer, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """(z, dz/dr) of a raw logit."""
    z, slope = squash(r, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    if HAS_SOFTCAP:
        z *= outer
        slope *= outer
    return z, slope


@triton.jit
def _add_tile(z, cols, m, s, t, best, shift, WANT_ENTROPY: tl.constexpr, WANT_PREDICTED: tl.constexpr):
    """Adds one tile to each lane's maximum, its column, Σ exp(z - shift) and Σ exp(z - shift) (z - shift)."""
    if WANT_PREDICTED:
        best = tl.where(z > m, cols, best)
    m = tl.maximum(m, z)
    d = z - shift
    e = tl.exp2(d * LOG2E)
    s += e
    if WANT_ENTROPY:
        t += tl.where(e > 0.0, e * d, 0.0)
    return m, s, t, best


@triton.jit
def logprob_statistics_kernel(
    R,  # (N, C), the raw logits
    Ids,  # (N, K)
    Running,  # (3, N)
    Best,  # (N,)
    LabelZ,  # (N, K)
    Logprob,  # (N, K)
    Stats,  # (2, N)
    Entropy,  # (N,)
    N,
    C,
    V,
    K,
    first,
    stride_r,
    ignore_index,
    softcap,
    scale,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_PREDICTED: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adds the columns [first, first + C) to the statistics of a row; one program per row.

    Running (3, N) holds m, s and Σ exp(z - m) (z - m) between the blocks, LabelZ (N, K) the z of the ids. The last
    block writes Logprob (N, K), Stats (2, N), which holds m and log s, and Entropy (N,). A row whose ids are all
    ignored is not read; its results are 0.

    Lanes keep separate sums, so that threads exchange nothing before the end of the row. That needs a shift that is
    known before the row is read: the running maximum, or in the first block the first tile's maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    ids = tl.load(Ids + row * K + k, mask=k < K, other=ignore_index).to(tl.int64)
    counts = ids != ignore_index
    if tl.max(counts.to(tl.int32), axis=0) == 0:
        if LAST:
            tl.store(Logprob + row * K + k, tl.zeros([BLOCK_K], dtype=tl.float32), mask=k < K)
            tl.store(Stats + row, 0.0)
            tl.store(Stats + N + row, 0.0)
            if WANT_ENTROPY:
                tl.store(Entropy + row, 0.0)
            if WANT_PREDICTED:
                tl.store(Best + row, tl.cast(ignore_index, tl.int64))
    else:
        at = row * stride_r
        here = (ids >= first) & (ids < first + C) & (ids < V)
        r_k = tl.load(R + at + (ids - first), mask=here & counts & (k < K), other=0.0).to(tl.float32)
        # Not `_`: the loops below assign a tile to it, and a variable of a loop keeps its type.
        z_k, _slope_k = _squash(r_k, scale, softcap, outer, HAS_SCALE, HAS_SOFTCAP)
        if FIRST:
            # An id outside the vocabulary stays NaN.
            z_k = tl.where(here, z_k, float("nan"))
            lanes = tl.arange(0, BLOCK)
            r = tl.load(R + at + lanes, mask=lanes < C, other=0.0).to(tl.float32)
            z, _ = _squash(r, scale, softcap, outer, HAS_SCALE, HAS_SOFTCAP)
            z_0 = tl.max(tl.where(lanes < C, z, -float("inf")), axis=0)
        else:
            z_k = tl.where(here, z_k, tl.load(LabelZ + row * K + k, mask=k < K, other=0.0))
            z_0 = tl.load(Running + row)
        shift = tl.where(tl.abs(z_0) < float("inf"), z_0, 0.0)
        offs = tl.arange(0, BLOCK)
        m = shift
        s = tl.full([], 0.0, dtype=tl.float32)
        t = s
        best = tl.full([], 0, dtype=tl.int32)
        again = tl.full([], 1, dtype=tl.int1)
        whole = C // BLOCK * BLOCK
        while again:
            lane_m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
            lane_s = tl.zeros([BLOCK], dtype=tl.float32)
            lane_t = tl.zeros([BLOCK], dtype=tl.float32)
            lane_best = tl.zeros([BLOCK], dtype=tl.int32)
            for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
                cols = start + offs
                r = tl.load(R + at + cols).to(tl.float32)
                z, _ = _squash(r, scale, softcap, outer, HAS_SCALE, HAS_SOFTCAP)
                lane_m, lane_s, lane_t, lane_best = _add_tile(
                    z, cols, lane_m, lane_s, lane_t, lane_best, shift, WANT_ENTROPY, WANT_PREDICTED
                )
            if whole < C:
                cols = whole + offs
                r = tl.load(R + at + cols, mask=cols < C, other=0.0).to(tl.float32)
                z, _ = _squash(r, scale, softcap, outer, HAS_SCALE, HAS_SOFTCAP)
                z = tl.where(cols < C, z, -float("inf"))
                lane_m, lane_s, lane_t, lane_best = _add_tile(
                    z, cols, lane_m, lane_s, lane_t, lane_best, shift, WANT_ENTROPY, WANT_PREDICTED
                )
            m = tl.max(lane_m, axis=0)
            s = tl.sum(lane_s, axis=0)
            t = tl.sum(lane_t, axis=0)
            if WANT_PREDICTED:
                best = tl.min(tl.where(lane_m == m, lane_best, C), axis=0)
            far = FARTHEST_ENTROPY if WANT_ENTROPY else FARTHEST
            over = (m > shift + far) & (m < float("inf"))
            # Nothing but -inf came before: then 0 cannot shift logits that are far below it.
            under = (z_0 == -float("inf")) & (shift > m + far) & (m > -float("inf"))
            again = over | under
            shift = tl.where(again, m, shift)
        predicted = first + best.to(tl.int64)
        top = m
        if not FIRST:
            m_run = tl.load(Running + row)
            if WANT_PREDICTED:
                before = tl.load(Best + row)
                predicted = tl.where(m > m_run, predicted, before)
            top = tl.maximum(m, m_run)
        # In a row of -inf alone, a maximum of 0 gives exp(-inf) = 0; -inf - -inf would give NaN.
        base = tl.where(top == -float("inf"), 0.0, top)
        factor = tl.exp2((shift - base) * LOG2E)
        t = (t + s * (shift - base)) * factor
        s *= factor
        if not FIRST:
            m_finite = tl.where(m_run == -float("inf"), base, m_run)
            factor = tl.exp2((m_finite - base) * LOG2E)
            s_run = tl.load(Running + N + row)
            s += s_run * factor
            if WANT_ENTROPY:
                t += (tl.load(Running + 2 * N + row) + s_run * (m_finite - base)) * factor
        if WANT_PREDICTED:
            tl.store(Best + row, predicted)
        if LAST:
            log_s = tl.log(s)
            logprob = tl.where(counts, (z_k - top) - log_s, 0.0)
            tl.store(Logprob + row * K + k, logprob, mask=k < K)
            tl.store(Stats + row, top)
            tl.store(Stats + N + row, log_s)
            if WANT_ENTROPY:
                tl.store(Entropy + row, log_s - t / s)
        else:
            tl.store(LabelZ + row * K + k, z_k, mask=k < K)
            tl.store(Running + row, top)
            tl.store(Running + N + row, s)
            if WANT_ENTROPY:
                tl.store(Running + 2 * N + row, t)


@triton.jit
def logprob_gradient_kernel(
    R,  # (N, C), the raw logits
    Ids,  # (N, K)
    Stats,  # (2, N)
    Entropy,  # (N,)
    DLogprob,  # (N, K)
    DLse,  # (N,) or None
    DEntropy,  # (N,) or None
    Scale,  # () or None
    Grad,  # (N, C)
    N,
    C,
    V,
    K,
    first,
    stride_r,
    stride_grad,
    ignore_index,
    softcap,
    scale,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes dr of one tile of the columns [first, first + C); one program per tile. Grad may be R itself.

    SCALED: dr is multiplied by the fp32 scalar at Scale. The elements of the ids are written last, each with the sum of
    the terms of all equal ids, so that the large terms cancel in fp32 and are rounded once.
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    cols = start + tl.arange(0, BLOCK)
    mask = cols < C
    k = tl.arange(0, BLOCK_K)
    ids = tl.load(Ids + row * K + k, mask=k < K, other=ignore_index).to(tl.int64)
    counts = ids != ignore_index
    if tl.max(counts.to(tl.int32), axis=0) == 0:
        zeros = tl.zeros([BLOCK], dtype=tl.float32).to(Grad.dtype.element_ty)
        tl.store(Grad + row * stride_grad + cols, zeros, mask=mask)
    else:
        u = tl.load(DLogprob + row * K + k, mask=(k < K) & counts, other=0.0)
        u = tl.where(counts & ((ids < 0) | (ids >= V)), float("nan"), u)
        a = -tl.sum(u, axis=0)
        b = 0.0
        if HAS_LSE:
            a += tl.load(DLse + row)
        if HAS_ENTROPY:
            w = tl.load(DEntropy + row)
            a -= w * tl.load(Entropy + row)
            b = -w
        factor = 1.0
        if SCALED:
            factor = tl.load(Scale)
        m = tl.load(Stats + row)
        m = tl.where(m == -float("inf"), 0.0, m)
        log_s = tl.load(Stats + N + row)
        at = row * stride_r
        column = ids - first
        here = counts & (column >= start) & (column < start + BLOCK) & (column < C)
        r_k = tl.load(R + at + column, mask=here, other=0.0).to(tl.float32)
        r = tl.load(R + at + cols, mask=mask, other=0.0).to(tl.float32)
        z, slope = _squash(r, scale, softcap, outer, HAS_SCALE, HAS_SOFTCAP)
        logp = (z - m) - log_s
        p = tl.exp2(logp * LOG2E)
        dz = p * a
        if HAS_ENTROPY:
            dz += tl.where(p > 0.0, p * logp, 0.0) * b
        # Grad may be R: every thread has read its ids' logits before another overwrites them.
        tl.debug_barrier()
        tl.store(Grad + row * stride_grad + cols, (dz * (slope * factor)).to(Grad.dtype.element_ty), mask=mask)
        total = tl.zeros([BLOCK_K], dtype=tl.float32)
        for other in range(K):
            id_other = tl.load(Ids + row * K + other).to(tl.int64)
            u_other = tl.load(DLogprob + row * K + other)
            total += tl.where(ids == id_other, u_other, 0.0)
        z_k, slope_k = _squash(r_k, scale, softcap, outer, HAS_SCALE, HAS_SOFTCAP)
        logp_k = (z_k - m) - log_s
        p_k = tl.exp2(logp_k * LOG2E)
        dz_k = p_k * a + total
        if HAS_ENTROPY:
            dz_k += tl.where(p_k > 0.0, p_k * logp_k, 0.0) * b
        tl.debug_barrier()
        dr_k = (dz_k * (slope_k * factor)).to(Grad.dtype.element_ty)
        tl.store(Grad + row * stride_grad + column, dr_k, mask=here)


def _numbers(options):
    softcap, logit_scale, temperature = options.softcap, options.logit_scale, options.temperature
    # Without a softcap, one factor is enough.
    scale = logit_scale if softcap is not None else logit_scale / temperature
    return {
        "ignore_index": options.ignore_index,
        "softcap": 1.0 if softcap is None else softcap,
        "scale": scale,
        "outer": 1.0 / temperature,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SCALE": scale != 1.0,
    }


def logprob_statistics(block, rows, options):
    """Launch the statistics of a block of columns (`Block` in ops/losses/logprob_rows.py) into `rows`."""
    logits_NC, ids_NK = block.logits_NC, rows.ids_NK
    (N, C), K = logits_NC.shape, ids_NK.shape[1]
    if not N:
        return
    size, warps, stages = STATISTICS
    launch(
        logprob_statistics_kernel, (N,), logits_NC,
        R=logits_NC, Ids=ids_NK, Running=rows.running_3N, Best=rows.predicted_N, LabelZ=rows.label_z_NK,
        Logprob=rows.logprob_NK, Stats=rows.stats_2N, Entropy=rows.entropy_N,
        N=N, C=C, V=block.vocab, K=K, first=block.first, stride_r=logits_NC.stride(0),
        **_numbers(options), WANT_ENTROPY=options.entropy, WANT_PREDICTED=options.predicted,
        FIRST=block.first == 0, LAST=block.first + C == block.vocab,
        BLOCK=min(size, next_power_of_2(C)), BLOCK_K=next_power_of_2(K), STAGES=stages,
        num_warps=warps,
    )  # fmt: skip


def logprob_gradient(block, upstream, options, grad_NC):
    """Launch the gradient of a block of columns; writes it into `grad_NC`, which may be the logits themselves."""
    logits_NC, ids_NK = block.logits_NC, upstream.ids_NK
    (N, C), K = logits_NC.shape, ids_NK.shape[1]
    if not N:
        return
    size, warps = GRADIENT
    size = min(size, next_power_of_2(C))
    launch(
        logprob_gradient_kernel, (N, cdiv(C, size)), logits_NC,
        R=logits_NC, Ids=ids_NK, Stats=upstream.stats_2N, Entropy=upstream.entropy_N, DLogprob=upstream.dlogprob_NK,
        DLse=upstream.dlse_N, DEntropy=upstream.dentropy_N, Scale=upstream.scale, Grad=grad_NC,
        N=N, C=C, V=block.vocab, K=K, first=block.first, stride_r=logits_NC.stride(0), stride_grad=grad_NC.stride(0),
        **_numbers(options), HAS_LSE=upstream.dlse_N is not None, HAS_ENTROPY=upstream.dentropy_N is not None,
        SCALED=upstream.scale is not None, BLOCK=size, BLOCK_K=next_power_of_2(K), num_warps=warps,
    )  # fmt: skip
