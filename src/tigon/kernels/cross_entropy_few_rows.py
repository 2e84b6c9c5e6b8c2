"""Cross entropy of a few rows, whose programs would leave most multiprocessors idle: each tile of a row is a program.

Two launches compute what `cross_entropy.py` computes in one: the statistics of the tiles, then those of the rows and
the gradient. Label smoothing, entropy and predictions are not computed.
"""

import triton
import triton.language as tl

from tigon.kernels._launch import cdiv, launch, next_power_of_2
from tigon.kernels._logits import LOG2E, gradient, row_weights, squash

# N rows (tokens), V columns (vocabulary), P tiles of a row.
FEW_ROWS, TILE = 8, 2048


@triton.jit
def cross_entropy_part_kernel(
    R,  # (N, V), the raw logits
    Target,  # (N,)
    Part,  # (N, 2, P)
    ZY,  # (N,)
    V,
    P,
    stride_r,
    softcap,
    scale,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores a tile's maximum and sum of exponentials in Part (N, 2, P), and z_y in ZY before it is overwritten."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cols = tile * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(R + row * stride_r + cols, mask=cols < V, other=0.0).to(tl.float32)
    z, _ = squash(r, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    z = tl.where(cols < V, z, -float("inf"))
    m = tl.max(z, axis=0)
    m_or_0 = tl.where(m == -float("inf"), 0.0, m)
    tl.store(Part + row * 2 * P + tile, m)
    tl.store(Part + row * 2 * P + P + tile, tl.sum(tl.exp2((z - m_or_0) * LOG2E), axis=0))
    if tile == 0:
        y = tl.load(Target + row).to(tl.int64)
        valid = (y >= 0) & (y < V)
        r_y = tl.load(R + row * stride_r + y, mask=valid, other=0.0).to(tl.float32)
        z_y, _slope_y = squash(r_y, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
        tl.store(ZY + row, z_y)


@triton.jit
def cross_entropy_whole_kernel(
    R,  # (N, V), the raw logits
    Target,  # (N,)
    ClassWeight,  # (V,) or None
    TokenWeight,  # (N,) or None
    GradScale,  # ()
    Part,  # (N, 2, P)
    ZY,  # (N,)
    Loss,  # (N,)
    Stats,  # (3, N)
    Grad,  # (N, V) or None
    N,
    V,
    P,
    stride_r,
    stride_grad,
    ignore_index,
    softcap,
    scale,
    z_loss,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_TOKEN_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WANT_GRAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combines the parts of a row and writes one tile of its gradient; one program per tile.

    The program of the first tile also writes loss and statistics. This kernel serves a few rows only: with one program
    per row, they would leave most multiprocessors idle.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    y = tl.load(Target + row).to(tl.int64)
    ignored = y == ignore_index
    valid = (y >= 0) & (y < V)
    parts = tl.arange(0, BLOCK_P)
    m_P = tl.load(Part + row * 2 * P + parts, mask=parts < P, other=-float("inf"))
    s_P = tl.load(Part + row * 2 * P + P + parts, mask=parts < P, other=0.0)
    m = tl.max(m_P, axis=0)
    # The sum propagates the NaN of a tile, which the maximum may not.
    m_or_0 = tl.where(m == -float("inf"), 0.0, m)
    log_s = tl.log(tl.sum(tl.where(m_P == -float("inf"), 0.0, s_P * tl.exp2((m_P - m_or_0) * LOG2E)), axis=0))
    z_y = tl.load(ZY + row)
    w_y, a = row_weights(row, y, valid, ClassWeight, TokenWeight, HAS_CLASS_WEIGHT, HAS_TOKEN_WEIGHT)
    if tile == 0:
        loss = w_y * ((m - z_y) + log_s)
        if HAS_Z_LOSS:
            loss += z_loss * (m + log_s) * (m + log_s)
        tl.store(Loss + row, tl.where(ignored, 0.0, a * loss))
        tl.store(Stats + row, tl.where(ignored, 0.0, m))
        tl.store(Stats + N + row, tl.where(ignored, 0.0, log_s))
        tl.store(Stats + 2 * N + row, tl.where(ignored, 0.0, z_y))
    if WANT_GRAD:
        cols = tile * BLOCK + tl.arange(0, BLOCK)
        mask = cols < V
        r = tl.load(R + row * stride_r + cols, mask=mask, other=0.0).to(tl.float32)
        z, slope = squash(r, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
        dr = gradient(
            z,
            slope,
            cols,
            y,
            m_or_0,
            log_s,
            a * tl.load(GradScale),
            0.0,
            z_loss,
            w_y,
            0.0,
            V,
            ClassWeight,
            mask,
            False,
            HAS_Z_LOSS,
            HAS_CLASS_WEIGHT,
        )
        tl.store(Grad + row * stride_grad + cols, tl.where(ignored, 0.0, dr).to(Grad.dtype.element_ty), mask=mask)


def serves(rows):
    """Whether these kernels serve the rows, if neither entropy nor predictions are wanted."""
    N, V = rows.logits_NV.shape
    return 0 < N <= FEW_ROWS and V > TILE and not rows.options.label_smoothing


def few_rows_fwd(rows, loss, stats, grad_scale, grad_NV):
    """Write loss (N,), stats (3, N) and, if `grad_NV` is given, the gradient times `grad_scale` into it."""
    logits_NV, options = rows.logits_NV, rows.options
    (N, V), stride_r, want_grad = logits_NV.shape, logits_NV.stride(0), grad_NV is not None
    P = cdiv(V, TILE)
    part, z_y = loss.new_empty((N, 2, P)), loss.new_empty(N)
    squashed = {"softcap": options.softcap or 1.0, "scale": options.logit_scale}
    flags = {"HAS_SOFTCAP": options.softcap is not None, "HAS_SCALE": options.logit_scale != 1.0}
    sizes = {"V": V, "P": P, "stride_r": stride_r}
    tensors = {"R": logits_NV, "Target": rows.target}
    launch(
        cross_entropy_part_kernel,
        (N, P),
        logits_NV,
        **tensors,
        Part=part,
        ZY=z_y,
        **sizes,
        **squashed,
        **flags,
        BLOCK=TILE,
        num_warps=4,
    )
    launch(
        cross_entropy_whole_kernel,
        (N, P if want_grad else 1),
        logits_NV,
        **tensors,
        ClassWeight=rows.class_weight,
        TokenWeight=rows.token_weight,
        GradScale=grad_scale,
        Part=part,
        ZY=z_y,
        Loss=loss,
        Stats=stats,
        Grad=grad_NV,
        N=N,
        **sizes,
        stride_grad=grad_NV.stride(0) if want_grad else 0,
        ignore_index=options.ignore_index,
        **squashed,
        z_loss=options.z_loss,
        HAS_CLASS_WEIGHT=rows.class_weight is not None,
        HAS_TOKEN_WEIGHT=rows.token_weight is not None,
        HAS_Z_LOSS=options.z_loss != 0.0,
        **flags,
        WANT_GRAD=want_grad,
        BLOCK_P=next_power_of_2(P),
        BLOCK=TILE,
        num_warps=4,
    )
