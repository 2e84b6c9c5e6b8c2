"""Cross entropy over rows of logits: one pass for the statistics and one for the gradient, without buffers of width V.

    z   = c · tanh(scale · r / c)  with a softcap c, else  scale · r            (r: the raw logit)
    m   = max_v z_v      log_s = log Σ_v exp(z_v - m)      lse = m + log_s

    l   = a · [ (1-ε) · w_y · (lse - z_y) + (ε/V) · Σ_v w_v · (lse - z_v) + λ · lse² ]

    dz  = a · [ (W + 2λ·lse) · p_v - (1-ε) · w_y · 1[v = y] - (ε/V) · w_v ],   p_v = exp((z_v - m) - log_s)
    dr  = scale · (1 - (z/c)²) · dz,      W = (1-ε) · w_y + (ε/V) · Σ_v w_v

a: token weight, w: class weights, ε: label smoothing, λ: z-loss. A term is computed only if its flag is set.

m and log_s are kept apart. If they were added first, a confident token (p_y = 1 - 1e-6, z_y = 20) would lose its
gradient, because the sum is rounded to 2e-6, the size of 1 - p_y.

A label outside [0, V) that is not ignore_index is never used as an address. Its row's loss and gradient become NaN, so
that the mistake is visible. No other row changes.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels._launch import cdiv, launch, next_power_of_2
from tigon.kernels._logits import LOG2E, gradient, row_weights, squash
from tigon.kernels.cross_entropy_few_rows import few_rows_fwd, serves

# N rows (tokens), V columns (vocabulary).
# The widest vector of loads and stores.
VECTOR_BYTES = 16
# (BLOCK, num_warps, stages) of the statistics alone, of narrow rows with gradient and of wide rows with gradient, and
# (BLOCK, num_warps) of the backward. Stages buffer tiles in shared memory. A wide row takes a whole multiprocessor
# (1024 threads of more than 32 registers). The 132 rows in work, 34 MB for 128,256 bf16 logits per row, then stay in L2
# until the second read: 25 to 130 of 677 MB were read twice on an H200, all with smaller programs (fp32: not measured).
FWD, FWD_GRAD, FWD_GRAD_WIDE, BWD = (4096, 8, 3), (4096, 8, 4), (16384, 32, 1), (4096, 8)
WIDE_ROW = 65536


@triton.jit
def _weight_sum(WeightSum, V, HAS_CLASS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr):
    """Σ_v w_v, which only label smoothing needs."""
    if HAS_CLASS_WEIGHT and HAS_SMOOTHING:
        return tl.load(WeightSum)
    return tl.cast(V, tl.float32)


@triton.jit
def _accumulate(
    r,
    cols,
    m,
    s,
    sum_wz,
    sum_ez,
    best,
    shift,
    softcap,
    scale,
    ClassWeight,  # (V,) or None
    mask,
    V,
    MASKED: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_PREDICTED: tl.constexpr,
):
    """Adds one tile to each lane's running maximum, sum of exp(z - shift) and optional statistics."""
    z, _ = squash(r.to(tl.float32), scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    if MASKED:
        z = tl.where(mask, z, -float("inf"))
    if WANT_PREDICTED:
        best = tl.where(z > m, cols, best)
    m = tl.maximum(m, z)
    d = z - shift
    e = tl.exp2(d * LOG2E)
    s += e
    if WANT_ENTROPY:
        sum_ez += tl.where(e > 0.0, e * d, 0.0)
    if HAS_SMOOTHING:
        wz = z
        if HAS_CLASS_WEIGHT:
            wz = z * tl.load(ClassWeight + cols, mask=cols < V, other=0.0).to(tl.float32)
        sum_wz += tl.where(mask, wz, 0.0) if MASKED else wz
    return m, s, sum_wz, sum_ez, best


@triton.jit
def _write_gradient(
    r,
    Grad,  # (N, V) or None
    at,
    pos,
    cols,
    mask,
    m,
    on_p,
    even,
    softcap,
    scale,
    factor,
    ClassWeight,  # (V,) or None
    V,
    MASKED: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Writes dr of one tile without the label's own term: (on_p · exp(z - m) - even · w_v) · factor · dz/dr."""
    z, slope = squash(r.to(tl.float32), scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    dz = tl.exp2((z - m) * LOG2E) * (on_p * factor)
    if HAS_SMOOTHING:
        if HAS_CLASS_WEIGHT:
            dz -= (even * factor) * tl.load(ClassWeight + cols, mask=cols < V, other=0.0).to(tl.float32)
        else:
            dz -= even * factor
    dr = (dz * slope).to(Grad.dtype.element_ty)
    if MASKED:
        tl.store(Grad + at + pos, dr, mask=mask)
    else:
        tl.store(Grad + at + pos, dr)


@triton.jit
def cross_entropy_fwd_kernel(
    R,  # (N, V), the raw logits
    Target,  # (N,)
    ClassWeight,  # (V,) or None
    WeightSum,  # () or None
    TokenWeight,  # (N,) or None
    GradScale,  # ()
    Loss,  # (N,)
    Stats,  # (3, N)
    Entropy,  # (N,) or empty
    Predicted,  # (N,) or empty
    Grad,  # (N, V) or None
    N,
    V,
    stride_r,
    stride_grad,
    ignore_index,
    softcap,
    scale,
    smoothing,
    z_loss,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_TOKEN_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WANT_GRAD: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_PREDICTED: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    GRAD_LIKE_R: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Loss, statistics and, if wanted, the gradient; one program per row.

    Grad may be R itself, because the same program reads a tile before it overwrites it. Stats holds m, log_s and z_y,
    each (N,).

    Each lane keeps separate sums, so that threads exchange nothing before the end of the row. This needs a shift that
    is known before the row is read: the label's logit, which is at most the maximum. If the maximum is more than 64
    above it, the row is read again with its maximum as the shift: from 87.3 on, a GPU flushes exp(shift - m) to 0.

    HAS_EDGES: rows do not start or end at multiples of 16 bytes (an odd V). The elements before the first such address
    and after the last are handled separately, so that tiles are loaded and stored 16 bytes at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(Target + row).to(tl.int64)
    ignored = y == ignore_index
    offs = tl.arange(0, BLOCK)
    # The tiles begin at `head` and span V_body columns; `edge` holds the columns before and after the tiles.
    head = 0
    V_body = V
    at_r = row * stride_r
    at_grad = row * stride_grad
    if HAS_EDGES:
        head = tl.minimum((-(row * stride_r) % VECTOR + VECTOR) % VECTOR, V).to(tl.int32)
        V_body = tl.multiple_of((V - head) // VECTOR * VECTOR, VECTOR)
        at_r = tl.multiple_of(at_r + head, VECTOR)
        at_grad += head
        if GRAD_LIKE_R:
            at_grad = tl.multiple_of(at_grad, VECTOR)
        lanes = tl.arange(0, 2 * VECTOR)
        edge = tl.where(lanes < VECTOR, lanes, lanes - VECTOR + head + V_body)
        on_edge = ((lanes < head) | (lanes >= VECTOR)) & (edge < V)
    whole = V_body // BLOCK * BLOCK
    if ignored:
        tl.store(Loss + row, 0.0)
        tl.store(Stats + row, 0.0)
        tl.store(Stats + N + row, 0.0)
        tl.store(Stats + 2 * N + row, 0.0)
        if WANT_ENTROPY:
            tl.store(Entropy + row, 0.0)
        if WANT_PREDICTED:
            tl.store(Predicted + row, tl.cast(ignore_index, tl.int64))
        if WANT_GRAD:
            for start in range(0, V, BLOCK):
                cols = start + offs
                zeros = tl.zeros([BLOCK], dtype=tl.float32).to(Grad.dtype.element_ty)
                tl.store(Grad + row * stride_grad + cols, zeros, mask=cols < V)
    else:
        valid = (y >= 0) & (y < V)
        r_y = tl.load(R + row * stride_r + y, mask=valid, other=0.0).to(tl.float32)
        z_y, slope_y = squash(r_y, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
        weight_sum = _weight_sum(WeightSum, V, HAS_CLASS_WEIGHT, HAS_SMOOTHING)
        shift = tl.where(tl.abs(z_y) < float("inf"), z_y, 0.0)
        m = shift
        s = tl.full([], 0.0, dtype=tl.float32)
        sum_wz = s
        sum_ez = s
        best = tl.full([], 0, dtype=tl.int32)
        again = tl.full([], 1, dtype=tl.int1)
        while again:
            lane_m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
            lane_s = tl.zeros([BLOCK], dtype=tl.float32)
            lane_wz = tl.zeros([BLOCK], dtype=tl.float32)
            lane_ez = tl.zeros([BLOCK], dtype=tl.float32)
            lane_best = tl.zeros([BLOCK], dtype=tl.int32)
            for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
                pos = start + offs
                r = tl.load(R + at_r + pos)
                lane_m, lane_s, lane_wz, lane_ez, lane_best = _accumulate(
                    r, pos + head, lane_m, lane_s, lane_wz, lane_ez, lane_best, shift, softcap, scale, ClassWeight,
                    pos < V_body, V, False, HAS_CLASS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP, HAS_SCALE, WANT_ENTROPY,
                    WANT_PREDICTED,
                )  # fmt: skip
            if whole < V_body:
                pos = whole + offs
                r = tl.load(R + at_r + pos, mask=pos < V_body, other=0.0)
                lane_m, lane_s, lane_wz, lane_ez, lane_best = _accumulate(
                    r, pos + head, lane_m, lane_s, lane_wz, lane_ez, lane_best, shift, softcap, scale, ClassWeight,
                    pos < V_body, V, True, HAS_CLASS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP, HAS_SCALE, WANT_ENTROPY,
                    WANT_PREDICTED,
                )  # fmt: skip
            m = tl.max(lane_m, axis=0)
            s = tl.sum(lane_s, axis=0)
            sum_wz = tl.sum(lane_wz, axis=0)
            sum_ez = tl.sum(lane_ez, axis=0)
            if WANT_PREDICTED:
                best = tl.min(tl.where(lane_m == m, lane_best, V), axis=0)
            if HAS_EDGES:
                edge_m = tl.full([2 * VECTOR], -float("inf"), dtype=tl.float32)
                edge_s = tl.zeros([2 * VECTOR], dtype=tl.float32)
                edge_best = tl.zeros([2 * VECTOR], dtype=tl.int32)
                r = tl.load(R + row * stride_r + edge, mask=on_edge, other=0.0)
                edge_m, edge_s, edge_wz, edge_ez, edge_best = _accumulate(
                    r, edge, edge_m, edge_s, edge_s, edge_s, edge_best, shift, softcap, scale, ClassWeight, on_edge,
                    V, True, HAS_CLASS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP, HAS_SCALE, WANT_ENTROPY, WANT_PREDICTED,
                )  # fmt: skip
                top = tl.max(edge_m, axis=0)
                if WANT_PREDICTED:
                    edge_id = tl.min(tl.where(edge_m == top, edge_best, V), axis=0)
                    best = tl.where(top > m, edge_id, tl.where(top == m, tl.minimum(edge_id, best), best))
                m = tl.maximum(m, top)
                s += tl.sum(edge_s, axis=0)
                sum_wz += tl.sum(edge_wz, axis=0)
                sum_ez += tl.sum(edge_ez, axis=0)
            over = (shift < m - 64.0) & (m < float("inf"))
            # If the label's logit is -inf, the shift is 0, and all exponentials of large negative logits underflow.
            under = (shift > m + 64.0) & (m > -float("inf"))
            again = over | under
            shift = tl.where(again, m, shift)
        if WANT_ENTROPY:
            tl.store(Entropy + row, tl.log(s) - sum_ez / s)
        # In a row of -inf alone, a maximum of 0 gives exp(-inf) = 0; -inf - -inf would give NaN.
        m_or_0 = tl.where(m == -float("inf"), 0.0, m)
        s *= tl.exp2((shift - m_or_0) * LOG2E)
        log_s = tl.log(s)
        w_y, a = row_weights(row, y, valid, ClassWeight, TokenWeight, HAS_CLASS_WEIGHT, HAS_TOKEN_WEIGHT)
        hit = (1.0 - smoothing) * w_y
        loss = hit * ((m - z_y) + log_s)
        if HAS_SMOOTHING:
            loss += smoothing / V * (weight_sum * (m + log_s) - sum_wz)
        if HAS_Z_LOSS:
            loss += z_loss * (m + log_s) * (m + log_s)
        tl.store(Loss + row, a * loss)
        tl.store(Stats + row, m)
        tl.store(Stats + N + row, log_s)
        tl.store(Stats + 2 * N + row, z_y)
        if WANT_PREDICTED:
            tl.store(Predicted + row, best.to(tl.int64))
        if WANT_GRAD:
            factor = a * tl.load(GradScale)
            even = smoothing / V
            on_p = hit + even * weight_sum
            if HAS_Z_LOSS:
                on_p += 2.0 * z_loss * (m + log_s)
            on_p /= s
            # The label's own element comes from z_y, which was read before the row was overwritten.
            w_even = w_y if HAS_CLASS_WEIGHT else 1.0
            dz_y = tl.exp2((z_y - m) * LOG2E) * on_p - hit
            if HAS_SMOOTHING:
                dz_y -= even * w_even
            # From the end of the row to its start, because the tiles read last are still in L2.
            if whole < V_body:
                pos = whole + offs
                r = tl.load(R + at_r + pos, mask=pos < V_body, other=0.0)
                _write_gradient(
                    r,
                    Grad,
                    at_grad,
                    pos,
                    pos + head,
                    pos < V_body,
                    m,
                    on_p,
                    even,
                    softcap,
                    scale,
                    factor,
                    ClassWeight,
                    V,
                    True,
                    HAS_CLASS_WEIGHT,
                    HAS_SMOOTHING,
                    HAS_SOFTCAP,
                    HAS_SCALE,
                )
            for done in tl.range(0, whole, BLOCK, num_stages=STAGES):
                pos = whole - BLOCK - done + offs
                r = tl.load(R + at_r + pos)
                _write_gradient(
                    r,
                    Grad,
                    at_grad,
                    pos,
                    pos + head,
                    pos < V_body,
                    m,
                    on_p,
                    even,
                    softcap,
                    scale,
                    factor,
                    ClassWeight,
                    V,
                    False,
                    HAS_CLASS_WEIGHT,
                    HAS_SMOOTHING,
                    HAS_SOFTCAP,
                    HAS_SCALE,
                )
            if HAS_EDGES:
                r = tl.load(R + row * stride_r + edge, mask=on_edge, other=0.0)
                _write_gradient(
                    r,
                    Grad,
                    row * stride_grad,
                    edge,
                    edge,
                    on_edge,
                    m,
                    on_p,
                    even,
                    softcap,
                    scale,
                    factor,
                    ClassWeight,
                    V,
                    True,
                    HAS_CLASS_WEIGHT,
                    HAS_SMOOTHING,
                    HAS_SOFTCAP,
                    HAS_SCALE,
                )
            tl.debug_barrier()
            tl.store(Grad + row * stride_grad + y, (dz_y * slope_y * factor).to(Grad.dtype.element_ty), mask=valid)


@triton.jit
def cross_entropy_bwd_kernel(
    R,  # (N, V), the raw logits
    Target,  # (N,)
    ClassWeight,  # (V,) or None
    WeightSum,  # () or None
    TokenWeight,  # (N,) or None
    Stats,  # (3, N)
    DLoss,  # (N,)
    Scale,  # ()
    Grad,  # (N, V) or None
    N,
    V,
    stride_r,
    stride_dloss,
    ignore_index,
    softcap,
    scale,
    smoothing,
    z_loss,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_TOKEN_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes dr from the saved statistics, one program per tile. The row's factor is a · dloss_i · Scale."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < V
    y = tl.load(Target + row).to(tl.int64)
    if y == ignore_index:
        zeros = tl.zeros([BLOCK], dtype=tl.float32).to(Grad.dtype.element_ty)
        tl.store(Grad + row * V + cols, zeros, mask=mask)
    else:
        valid = (y >= 0) & (y < V)
        weight_sum = _weight_sum(WeightSum, V, HAS_CLASS_WEIGHT, HAS_SMOOTHING)
        factor = tl.load(DLoss + row * stride_dloss).to(tl.float32) * tl.load(Scale)
        if HAS_TOKEN_WEIGHT:
            factor *= tl.load(TokenWeight + row).to(tl.float32)
        factor = tl.where(valid, factor, float("nan"))
        w_y = tl.full([], 1.0, dtype=tl.float32)
        if HAS_CLASS_WEIGHT:
            w_y = tl.load(ClassWeight + y, mask=valid, other=0.0).to(tl.float32)
        m = tl.load(Stats + row)
        log_s = tl.load(Stats + N + row)
        r = tl.load(R + row * stride_r + cols, mask=mask, other=0.0).to(tl.float32)
        z, slope = squash(r, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
        dr = gradient(
            z,
            slope,
            cols,
            y,
            m,
            log_s,
            factor,
            smoothing,
            z_loss,
            w_y,
            weight_sum,
            V,
            ClassWeight,
            mask,
            HAS_SMOOTHING,
            HAS_Z_LOSS,
            HAS_CLASS_WEIGHT,
        )
        tl.store(Grad + row * V + cols, dr.to(Grad.dtype.element_ty), mask=mask)


@triton.jit
def inverse_count_kernel(Target, Out, N, ignore_index, BLOCK: tl.constexpr):
    """Out = 1 / max(1, number of labels that are not ignored), computed by one program."""
    lanes = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        y = tl.load(Target + offs, mask=offs < N, other=0)
        lanes += ((y != ignore_index) & (offs < N)).to(tl.int32)
    tl.store(Out, tl.div_rn(1.0, tl.maximum(tl.sum(lanes), 1).to(tl.float32)))


@triton.jit
def scaled_sum_kernel(X, Factor, Out, N, BLOCK: tl.constexpr):
    """Out = Σ X · Factor, computed by one program."""
    lanes = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        lanes += tl.load(X + offs, mask=offs < N, other=0.0)
    tl.store(Out, tl.sum(lanes) * tl.load(Factor))


def _flags(rows):
    return {
        "HAS_CLASS_WEIGHT": rows.class_weight is not None,
        "HAS_TOKEN_WEIGHT": rows.token_weight is not None,
        "HAS_SMOOTHING": rows.options.label_smoothing != 0.0,
        "HAS_Z_LOSS": rows.options.z_loss != 0.0,
        "HAS_SOFTCAP": rows.options.softcap is not None,
        "HAS_SCALE": rows.options.logit_scale != 1.0,
    }


def _class_weight_sum(rows):
    needed = rows.class_weight is not None and rows.options.label_smoothing
    return rows.class_weight.float().sum() if needed else None


def cross_entropy_fwd(rows, entropy, predicted, grad_scale=None, grad_NV=None):
    """Launch the forward of `rows` (ops/losses/cross_entropy_rows.py).

    `grad_NV` (None, logits_NV itself, or a tensor like it) receives the gradient times the fp32 scalar `grad_scale`.
    Returns the loss per row (N,) and stats (3, N), both fp32; entropy (N,) fp32 and predicted (N,) int64. Entropy and
    predicted are empty if they are not wanted.
    """
    logits_NV, target, class_weight, token_weight = rows.logits_NV, rows.target, rows.class_weight, rows.token_weight
    ignore_index, label_smoothing, softcap, logit_scale, z_loss = rows.options
    N, V = logits_NV.shape
    # The tensor's own constructor takes a third of torch.empty's 3 us.
    loss = logits_NV.new_empty(N, dtype=torch.float32)
    stats = logits_NV.new_empty((3, N), dtype=torch.float32)
    entropies = logits_NV.new_empty(N if entropy else 0, dtype=torch.float32)
    argmax = logits_NV.new_empty(N if predicted else 0, dtype=torch.int64)
    want_grad = grad_NV is not None
    if serves(rows) and not (entropy or predicted):
        few_rows_fwd(rows, loss, stats, grad_scale, grad_NV)
    elif N:
        vector = VECTOR_BYTES // logits_NV.element_size()
        block, warps, stages = (FWD_GRAD if V <= WIDE_ROW else FWD_GRAD_WIDE) if want_grad else FWD
        block = min(block, next_power_of_2(V))
        launch(
            cross_entropy_fwd_kernel, (N,), logits_NV,
            R=logits_NV, Target=target, ClassWeight=class_weight, WeightSum=_class_weight_sum(rows),
            TokenWeight=token_weight, GradScale=grad_scale, Loss=loss, Stats=stats, Entropy=entropies, Predicted=argmax,
            Grad=grad_NV, N=N, V=V, stride_r=logits_NV.stride(0), stride_grad=grad_NV.stride(0) if want_grad else 0,
            ignore_index=ignore_index, softcap=1.0 if softcap is None else softcap, scale=logit_scale,
            smoothing=label_smoothing, z_loss=z_loss, **_flags(rows),
            WANT_GRAD=want_grad, WANT_ENTROPY=entropy, WANT_PREDICTED=predicted,
            HAS_EDGES=(logits_NV.stride(0) | V) % vector != 0,
            GRAD_LIKE_R=want_grad and (grad_NV.stride(0) - logits_NV.stride(0)) % vector == 0,
            VECTOR=vector, BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return loss, stats, entropies, argmax


def cross_entropy_bwd(rows, stats, dloss, scale):
    """Launch the backward; `dloss` is (N,), any stride, `scale` an fp32 scalar. Returns a new (N, V) gradient."""
    logits_NV, target, class_weight, token_weight = rows.logits_NV, rows.target, rows.class_weight, rows.token_weight
    ignore_index, label_smoothing, softcap, logit_scale, z_loss = rows.options
    N, V = logits_NV.shape
    grad = logits_NV.new_empty((N, V))
    if grad.numel():
        block, warps = BWD
        launch(
            cross_entropy_bwd_kernel, (N, cdiv(V, block)), logits_NV,
            R=logits_NV, Target=target, ClassWeight=class_weight, WeightSum=_class_weight_sum(rows),
            TokenWeight=token_weight, Stats=stats, DLoss=dloss, Scale=scale, Grad=grad, N=N, V=V,
            stride_r=logits_NV.stride(0), stride_dloss=dloss.stride(0), ignore_index=ignore_index,
            softcap=1.0 if softcap is None else softcap,
            scale=logit_scale, smoothing=label_smoothing, z_loss=z_loss, **_flags(rows), BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return grad


# With at most this many rows, one program is faster than launching the four (or two) PyTorch operators it replaces. By
# arithmetic, its 32 successive tiles of 4096 take at most 8 us.
ONE_PROGRAM_ROWS = 1 << 17


def inverse_count(like, target, ignore_index):
    """1 / max(1, number of labels that are not ignored); fp32, 0-dim."""
    out = like.new_empty((), dtype=torch.float32)
    launch(
        inverse_count_kernel,
        (1,),
        like,
        Target=target,
        Out=out,
        N=target.shape[0],
        ignore_index=ignore_index,
        BLOCK=4096,
        num_warps=8,
    )
    return out


def scaled_sum(x_N, factor):
    """The sum of an fp32 (N,) tensor times a scalar; fp32, 0-dim."""
    out = x_N.new_empty((), dtype=torch.float32)
    launch(scaled_sum_kernel, (1,), x_N, X=x_N, Factor=factor, Out=out, N=x_N.shape[0], BLOCK=4096, num_warps=8)
    return out
