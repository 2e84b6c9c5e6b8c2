"""The backward of norms for rows that are too wide for one tile."""

import triton
import triton.language as tl

# M rows, H columns.


@triton.jit
def norm_bwd_dx_wide_kernel(
    DY,  # (M, H)
    DS,  # (M, H) or None
    X,  # (M, H)
    W,  # (H,) or None
    Mean,  # (M,)
    Rstd,  # (M,)
    DX,  # (M, H)
    H,
    stride_dy,
    stride_ds,
    stride_x,
    offset,
    CENTER: tl.constexpr,
    HAS_DS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx of rows wider than MAX_BLOCK: one pass for the two means, one for dx."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    rstd = tl.load(Rstd + row)
    mean = tl.load(Mean + row) if CENTER else 0.0
    sum_gx = tl.zeros([BLOCK], dtype=tl.float32)
    sum_g = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, H, BLOCK):
        cols = start + offs
        g = tl.load(DY + row * stride_dy + cols, mask=cols < H, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(W + cols, mask=cols < H, other=0.0).to(tl.float32) + offset
        s = tl.load(X + row * stride_x + cols, mask=cols < H, other=0.0).to(tl.float32)
        sum_gx += g * (s - mean) * rstd
        sum_g += g
    mean_gx = tl.sum(sum_gx, axis=0) / H
    mean_g = tl.sum(sum_g, axis=0) / H
    for start in range(0, H, BLOCK):
        cols = start + offs
        g = tl.load(DY + row * stride_dy + cols, mask=cols < H, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(W + cols, mask=cols < H, other=0.0).to(tl.float32) + offset
        s = tl.load(X + row * stride_x + cols, mask=cols < H, other=0.0).to(tl.float32)
        dx = g - (s - mean) * rstd * mean_gx
        if CENTER:
            dx -= mean_g
        dx *= rstd
        if HAS_DS:
            dx += tl.load(DS + row * stride_ds + cols, mask=cols < H, other=0.0).to(tl.float32)
        tl.store(DX + row * H + cols, dx.to(DX.dtype.element_ty), mask=cols < H)


@triton.jit
def norm_bwd_dw_wide_kernel(
    DY,  # (M, H)
    X,  # (M, H)
    Mean,  # (M,)
    Rstd,  # (M,)
    DW,  # (programs, H)
    DB,  # (programs, H)
    M,
    H,
    stride_dy,
    stride_x,
    CENTER: tl.constexpr,
    ROUND_XHAT: tl.constexpr,
    WANT_DW: tl.constexpr,
    WANT_DB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Partial dw and db of rows wider than MAX_BLOCK: a program owns a column tile and every P-th row."""
    program = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for index in range(program, M, tl.num_programs(1)):
        row = index + tl.zeros([1], dtype=tl.int64)
        dy = tl.load(DY + row * stride_dy + cols, mask=cols < H, other=0.0).to(tl.float32)
        if WANT_DW:
            s = tl.load(X + row * stride_x + cols, mask=cols < H, other=0.0).to(tl.float32)
            if CENTER:
                s -= tl.load(Mean + row)
            xhat = s * tl.load(Rstd + row)
            if ROUND_XHAT:
                xhat = xhat.to(X.dtype.element_ty).to(tl.float32)
            dw += dy * xhat
        db += dy
    if WANT_DW:
        tl.store(DW + program * H + cols, dw, mask=cols < H)
    if WANT_DB:
        tl.store(DB + program * H + cols, db, mask=cols < H)
