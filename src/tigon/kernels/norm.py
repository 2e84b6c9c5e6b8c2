"""RMSNorm, add + RMSNorm and LayerNorm: one forward and one backward, switched by constexpr flags.

    s  = x + r                                   (HAS_RESIDUAL; rounded to x's dtype like the unfused sum)
    m  = mean(s) if CENTER else 0
    r̂  = 1 / sqrt(mean((s - m)^2) + eps)         ("rstd")
    x̂  = (s - m) · rstd
    y  = x̂ · (w + offset) + b                    (ROUND_XHAT: x̂ is rounded to x's dtype before the product)

    g  = dy · (w + offset)
    dx = rstd · (g - x̂ · mean(g · x̂) - [CENTER] mean(g)) + ds
    dw = Σ_rows dy · x̂        db = Σ_rows dy

The backward needs s (or x), rstd and, with CENTER, the mean; the last two are fp32. It recomputes x̂, because storing x̂
would cost as much memory as x. The weight gradient is summed in two steps without atomics. Each program keeps fp32 sums
of its rows in registers. A second kernel adds these partial sums in a fixed order, so that runs repeat bit for bit.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tigon.kernels import _launch
from tigon.kernels._launch import Launch, cdiv, next_power_of_2
from tigon.kernels._math import INTERPRETED, magnitude_bits, take_amax
from tigon.kernels.layout import rows_of
from tigon.kernels.norm_wide import norm_bwd_dw_wide_kernel, norm_bwd_dx_wide_kernel

# M rows, H columns; a program handles ROWS rows at a time and BLOCK columns.

# The widest row that registers hold. Wider rows are read twice, tile by tile; the second read comes mostly from L2.
MAX_BLOCK = 16384


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _two_sums(a, b):
    """Row sums of two tiles with one exchange between the warps."""
    # The interpreter's `tl.reduce` adds term after term, which no GPU does, and rounds differently; `tl.sum` does not.
    if INTERPRETED:
        return tl.sum(a, axis=1, keep_dims=True), tl.sum(b, axis=1, keep_dims=True)
    return tl.reduce((a, b), 1, _add_pairs, keep_dims=True)


@triton.jit
def norm_fwd_kernel(
    X,  # (M, H)
    R,  # (M, H) or None
    W,  # (H,) or None
    B,  # (H,) or None
    Y,  # (M, H)
    S,  # (M, H), X + R
    Mean,  # (M,)
    Rstd,  # (M,)
    AMAX,  # (PARTS,) or None
    M,
    H,
    stride_x,
    stride_r,
    eps,
    offset,
    CENTER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUND_XHAT: tl.constexpr,
    PARTS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """PARTS: the numbers at AMAX, for the largest magnitude of y (`take_amax`); 0: it is not wanted."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    row_mask = rows < M
    mean = tl.zeros([ROWS, 1], dtype=tl.float32)
    if ONE_TILE:
        mask = row_mask & (cols < H)
        s = tl.load(X + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            s += tl.load(R + rows * stride_r + cols, mask=mask, other=0.0).to(tl.float32)
            rounded = s.to(S.dtype.element_ty)
            tl.store(S + rows * H + cols, rounded, mask=mask)
            s = rounded.to(tl.float32)
        if CENTER:
            mean = tl.sum(s, axis=1, keep_dims=True) / H
            # The rounded mean is off by half an ulp, 4e-6 at 100 standard deviations. The mean of the differences
            # corrects it.
            s = tl.where(mask, s - mean, 0.0)
            left, square = _two_sums(s, s * s)
            left /= H
            variance = tl.maximum(square / H - left * left, 0.0)
            s -= left
            mean += left
        else:
            variance = tl.sum(s * s, axis=1, keep_dims=True) / H
        rstd = tl.rsqrt(variance + eps)
        y = _store_normed(s * rstd, W, B, Y, X, rows, cols, mask, H, offset, HAS_WEIGHT, HAS_BIAS, ROUND_XHAT)
        if PARTS > 0:
            take_amax(AMAX, magnitude_bits(tl.where(mask, y, 0.0)), PARTS)
    else:
        total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for start in range(0, H, BLOCK):
            mask = row_mask & (cols + start < H)
            s = tl.load(X + rows * stride_x + start + cols, mask=mask, other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                s += tl.load(R + rows * stride_r + start + cols, mask=mask, other=0.0).to(tl.float32)
                rounded = s.to(S.dtype.element_ty)
                tl.store(S + rows * H + start + cols, rounded, mask=mask)
                s = rounded.to(tl.float32)
            total += s if CENTER else s * s
        if CENTER:
            mean = tl.sum(total, axis=1, keep_dims=True) / H
            # A second pass, because E[x^2] - mean^2 loses the variance if the mean is 100 standard deviations from 0.
            total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
            left = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
            for start in range(0, H, BLOCK):
                mask = row_mask & (cols + start < H)
                s = tl.load(X + rows * stride_x + start + cols, mask=mask, other=0.0).to(tl.float32)
                s = tl.where(mask, s - mean, 0.0)
                total += s * s
                left += s
            mean += tl.sum(left, axis=1, keep_dims=True) / H
        rstd = tl.rsqrt(tl.sum(total, axis=1, keep_dims=True) / H + eps)
        largest = tl.zeros([ROWS, BLOCK], dtype=tl.int32)
        for start in range(0, H, BLOCK):
            mask = row_mask & (cols + start < H)
            if HAS_RESIDUAL:
                s = tl.load(S + rows * H + start + cols, mask=mask, other=0.0).to(tl.float32)
            else:
                s = tl.load(X + rows * stride_x + start + cols, mask=mask, other=0.0).to(tl.float32)
            y = _store_normed(
                (s - mean) * rstd, W, B, Y, X, rows, start + cols, mask, H, offset, HAS_WEIGHT, HAS_BIAS, ROUND_XHAT
            )
            if PARTS > 0:
                largest = tl.maximum(largest, magnitude_bits(tl.where(mask, y, 0.0)))
        if PARTS > 0:
            take_amax(AMAX, largest, PARTS)
    tl.store(Rstd + rows, rstd, mask=row_mask)
    if CENTER:
        tl.store(Mean + rows, mean, mask=row_mask)


@triton.jit
def _store_normed(
    xhat,
    W,  # (H,) or None
    B,  # (H,) or None
    Y,  # (M, H)
    X,  # (M, H)
    rows,
    cols,
    mask,
    H,
    offset,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUND_XHAT: tl.constexpr,
):
    if ROUND_XHAT:
        xhat = xhat.to(X.dtype.element_ty).to(tl.float32)
    y = xhat
    if HAS_WEIGHT:
        y = xhat * (tl.load(W + cols, mask=cols < H, other=0.0).to(tl.float32) + offset)
    if HAS_BIAS:
        y += tl.load(B + cols, mask=cols < H, other=0.0).to(tl.float32)
    y = y.to(Y.dtype.element_ty)
    tl.store(Y + rows * H + cols, y, mask=mask)
    return y


@triton.jit
def norm_bwd_kernel(
    DY,  # (M, H)
    DS,  # (M, H) or None
    X,  # (M, H)
    W,  # (H,) or None
    Mean,  # (M,)
    Rstd,  # (M,)
    DX,  # (M, H)
    DW,  # (programs, H)
    DB,  # (programs, H)
    AMAX,  # (PARTS,) or None
    M,
    H,
    stride_dy,
    stride_ds,
    stride_x,
    offset,
    CENTER: tl.constexpr,
    HAS_DS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROUND_XHAT: tl.constexpr,
    WANT_DX: tl.constexpr,
    WANT_DW: tl.constexpr,
    WANT_DB: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    RELOAD_W: tl.constexpr,
):
    """dx and partial dw and db of rows up to MAX_BLOCK. Programs are persistent; DW and DB are (programs, H) fp32.

    PARTS: the numbers at AMAX, for the largest magnitude of dx; 0: it is not wanted.
    """
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    col_mask = cols < H
    if HAS_WEIGHT and not RELOAD_W:
        w = tl.load(W + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
    dw = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    db = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    largest = tl.zeros([1, BLOCK], dtype=tl.int32)
    for start in tl.range(program * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        mask = (rows < M) & col_mask
        dy = tl.load(DY + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(X + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(Rstd + rows, mask=rows < M, other=0.0)
        if CENTER:
            s = tl.where(mask, s - tl.load(Mean + rows, mask=rows < M, other=0.0), 0.0)
        xhat = s * rstd
        # dw comes before dx, so that the registers of the rounded x̂ are free early.
        if WANT_DW:
            if ROUND_XHAT:
                dw += dy * xhat.to(X.dtype.element_ty).to(tl.float32)
            else:
                dw += dy * xhat
        if WANT_DB:
            db += dy
        if WANT_DX:
            g = dy
            if HAS_WEIGHT:
                if RELOAD_W:
                    # The weight is read again from L1, because its fp32 values would spill other registers.
                    w = tl.load(W + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
                g = dy * w
            if CENTER:
                along, mean_g = _two_sums(g * xhat, g)
                dx = (g - xhat * (along / H) - mean_g / H) * rstd
            else:
                dx = (g - xhat * (tl.sum(g * xhat, axis=1, keep_dims=True) / H)) * rstd
            if HAS_DS:
                dx += tl.load(DS + rows * stride_ds + cols, mask=mask, other=0.0).to(tl.float32)
            dx = dx.to(DX.dtype.element_ty)
            tl.store(DX + rows * H + cols, dx, mask=mask)
            if PARTS > 0:
                bits = magnitude_bits(tl.where(mask, dx, 0.0))
                largest = tl.maximum(largest, tl.max(bits, axis=0, keep_dims=True))
    if PARTS > 0:
        take_amax(AMAX, largest, PARTS)
    if WANT_DW:
        tl.store(DW + program * H + cols, tl.sum(dw, axis=0, keep_dims=True).to(DW.dtype.element_ty), mask=col_mask)
    if WANT_DB:
        tl.store(DB + program * H + cols, tl.sum(db, axis=0, keep_dims=True).to(DB.dtype.element_ty), mask=col_mask)


@triton.jit
def sum_rows_kernel(P, Out, Second, rows, H, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr):
    """Out[h] = Σ_r P[0, r, h], in a fixed order, cast to Out's dtype. A second row of programs sums P[1] into Second,
    which has Out's dtype."""
    P += tl.program_id(1).to(tl.int64) * rows * H
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_R, BLOCK], dtype=tl.float32)
    for start in range(0, rows, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        mask = (r < rows)[:, None] & (cols < H)[None, :]
        total += tl.load(P + r.to(tl.int64)[:, None] * H + cols[None, :], mask=mask, other=0.0)
    sums = tl.sum(total, axis=0).to(Out.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(Out + cols, sums, mask=cols < H)
    else:
        tl.store(Second + cols, sums, mask=cols < H)


@dataclass(frozen=True)
class Tile:
    """The block of rows that one program works on, with its warps and stages."""

    rows: int
    """Rows of a tile."""
    num_warps: int
    per_sm: int = 1
    """Persistent programs of the backward pass per multiprocessor."""
    stages: int = 1
    """Tiles in shared memory while the backward pass loads ahead."""


# Tiles by the width rounded up to a power of 2, measured on an H200 in bf16 with 16384 rows. 16 values per thread are
# two 16-byte loads of bf16. Fewer warps make loads serial; more warps make them smaller than 16 bytes.
FWD_TILES = {1024: Tile(2, 4), 2048: Tile(2, 8), 4096: Tile(1, 8), 8192: Tile(1, 8), 16384: Tile(1, 16)}
FWD_TILES_CENTERED = {**FWD_TILES, 2048: Tile(1, 4), 4096: Tile(1, 4)}
BWD_TILES = {
    1024: Tile(2, 4, 3, 3),
    2048: Tile(4, 8, 1, 3),
    4096: Tile(2, 16, 1, 3),
    8192: Tile(1, 16, 1, 3),
    16384: Tile(1, 32, 1, 1),
}
BWD_TILES_CENTERED = {
    1024: Tile(2, 4, 3, 3),
    2048: Tile(2, 4, 2, 3),
    4096: Tile(2, 16, 1, 4),
    8192: Tile(1, 8, 1, 3),
    16384: Tile(1, 8, 1, 3),
}


# Tiles for the widths of q and k norms, measured with 10^6 rows.
NARROW_BWD_TILES = {128: Tile(16, 8, 3, 3), 256: Tile(8, 4, 3, 4)}
# The widest rows of which the backward finds the largest magnitude in its own pass.
MOST_WITH_AMAX = 8192
# (columns of a tile, warps) of the backward's two kernels for rows wider than MAX_BLOCK, measured at 28672.
WIDE_DX, WIDE_DW = (16384, 16), (512, 1)


@functools.cache
def block_of(width):
    return min(next_power_of_2(width), MAX_BLOCK)


@functools.cache
def fwd_tile(width, center):
    """The tile of the forward; narrow rows share a tile of 2048 elements."""
    block = block_of(width)
    if block < 1024:
        return Tile(2048 // block, 4)
    return (FWD_TILES_CENTERED if center else FWD_TILES)[block]


@functools.cache
def bwd_tile(width, center, loaded_bytes, device):
    """The tile of the backward, with fewer stages if `loaded_bytes` per element do not fit into shared memory."""
    block = block_of(width)
    if block < 1024:
        best = NARROW_BWD_TILES.get(block, Tile(2048 // block, 4, 3, 3))
    else:
        best = (BWD_TILES_CENTERED if center else BWD_TILES)[block]
    # 2048 bytes are reserved for the exchange between warps.
    if (best.stages - 1) * best.rows * block * loaded_bytes + 2048 <= _launch.shared_bytes(device):
        return best
    return Tile(max(1, 2048 // block), 4 if block <= 2048 else 8 if block <= 4096 else 16, 2)


# The plans below hold all that shapes, strides, dtypes and options decide. A call then only allocates and launches.
_PLANS = 1 << 12


@functools.lru_cache(maxsize=_PLANS)
def _fwd_launch(width, M, stride_x, stride_r, has_weight, has_bias, parts, options):
    eps, offset, center, fp32_weight = options
    block, t = block_of(width), fwd_tile(width, center)
    return Launch(
        norm_fwd_kernel, (cdiv(M, t.rows),),
        M=M, H=width, stride_x=stride_x, stride_r=0 if stride_r is None else stride_r,
        eps=float(eps), offset=float(offset), CENTER=center, HAS_RESIDUAL=stride_r is not None, HAS_WEIGHT=has_weight,
        HAS_BIAS=has_bias, ROUND_XHAT=not fp32_weight, PARTS=parts, ONE_TILE=width <= block, ROWS=t.rows, BLOCK=block,
        num_warps=t.num_warps,
    )  # fmt: skip


def norm_fwd(x, residual, weight, bias, options, amax=None):
    """Launch the forward; returns (y, s, mean, rstd), with None for what the `NormOptions` leave out.

    amax: (1, parts) zeros, or None; its maximum is then that of |y|.
    """
    width = x.shape[-1]
    x_MH, M, stride_x = rows_of(x, width)
    residual_MH = stride_r = s = None
    if residual is not None:
        residual_MH, _, stride_r = rows_of(residual, width)
        s = torch.empty_like(x, memory_format=torch.contiguous_format)
    if weight is not None and not weight.is_contiguous():
        weight = weight.contiguous()
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    y_dtype = x.dtype
    if weight is not None and not options.fp32_weight and weight.dtype is not y_dtype:
        y_dtype = torch.promote_types(y_dtype, weight.dtype)
    y = torch.empty_like(x, dtype=y_dtype, memory_format=torch.contiguous_format)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = torch.empty_like(rstd) if options.center else None
    if M and width:
        bits, parts = (None, 0) if amax is None else (amax.view(torch.int32), amax.shape[-1])
        _fwd_launch(width, M, stride_x, stride_r, weight is not None, bias is not None, parts, options)(
            x, X=x_MH, R=residual_MH, W=weight, B=bias, Y=y, S=s, Mean=mean, Rstd=rstd, AMAX=bits
        )
    return y, s, mean, rstd


class _Backward:
    """The launches of the backward; see `_PLANS`."""

    def __init__(self, width, M, strides, loaded_bytes, weight_bytes, parts, options, device):
        stride_dy, stride_ds, stride_x = strides
        offset, center, fp32_weight, want_dx, want_dw, want_db = options
        has_ds, has_weight = stride_ds is not None, weight_bytes > 0
        block = block_of(width)
        reload_w = has_weight and block == MAX_BLOCK
        multiprocessors = _launch.multiprocessors(device)
        t = bwd_tile(width, center, loaded_bytes + (weight_bytes if reload_w else 0), device)
        if multiprocessors >= M:
            # One turn each: nothing to load ahead, and a second row of a tile would be empty.
            t = Tile(1 if block >= 1024 else t.rows, t.num_warps)
        self.programs = min(cdiv(M, t.rows), t.per_sm * multiprocessors)
        self.wide = width > block
        # The sums of one program are the result.
        self.alone = self.programs == 1 and not self.wide
        given = {
            "H": width,
            "stride_dy": stride_dy,
            "stride_ds": stride_ds if has_ds else 0,
            "stride_x": stride_x,
            "offset": float(offset),
            "CENTER": center,
            "HAS_DS": has_ds,
            "HAS_WEIGHT": has_weight,
        }
        if not self.wide:
            self.launch = Launch(
                norm_bwd_kernel, (self.programs,),
                M=M, **given, ROUND_XHAT=not fp32_weight, WANT_DX=want_dx, WANT_DW=want_dw, WANT_DB=want_db,
                PARTS=parts, ROWS=t.rows, BLOCK=block, STAGES=t.stages, RELOAD_W=reload_w,
                num_warps=t.num_warps,
            )  # fmt: skip
        else:
            self.launch_dx = Launch(norm_bwd_dx_wide_kernel, (M,), **given, BLOCK=WIDE_DX[0], num_warps=WIDE_DX[1])
            self.launch_dw = Launch(
                norm_bwd_dw_wide_kernel,
                (cdiv(width, WIDE_DW[0]), self.programs),
                M=M,
                H=width,
                stride_dy=stride_dy,
                stride_x=stride_x,
                CENTER=center,
                ROUND_XHAT=not fp32_weight,
                WANT_DW=want_dw,
                WANT_DB=want_db,
                BLOCK=WIDE_DW[0],
                num_warps=WIDE_DW[1],
            )
        self.sum = Launch(
            sum_rows_kernel,
            (cdiv(width, 64), 2 if want_dw and want_db else 1),
            rows=self.programs,
            H=width,
            BLOCK_R=32,
            BLOCK=64,
            num_warps=4,
        )


_backward = functools.lru_cache(maxsize=_PLANS)(_Backward)


def norm_bwd(dy, ds, x, weight, mean, rstd, options, amax=None):
    """Launch the backward; returns (dx, dw, db), with None for what the `NormBackwardOptions` do not want.

    amax: (1, parts) zeros, or None; its maximum is then that of |dx|.
    """
    _, _, _, want_dx, want_dw, want_db = options
    width = x.shape[-1]
    x_MH, M, stride_x = rows_of(x, width)
    dy_MH, _, stride_dy = rows_of(dy, width)
    ds_MH, stride_ds, loaded_bytes, weight_bytes = None, None, dy.element_size() + x.element_size(), 0
    if ds is not None:
        ds_MH, _, stride_ds = rows_of(ds, width)
        loaded_bytes += ds.element_size()
    if weight is not None:
        weight_bytes = weight.element_size()
        if not weight.is_contiguous():
            weight = weight.contiguous()
    parameter = x if weight is None else weight
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if want_dx else None
    dw = parameter.new_empty(width) if want_dw else None
    db = parameter.new_empty(width) if want_db else None
    if not (M and width):
        return dx, *(None if grad is None else grad.zero_() for grad in (dw, db))
    bits, parts = None, 0
    # The largest magnitudes of wider tiles would spill.
    searches = amax is not None and width > MOST_WITH_AMAX
    if amax is not None and want_dx and not searches:
        bits, parts = amax.view(torch.int32), amax.shape[-1]
    plan = _backward(
        width, M, (stride_dy, stride_ds, stride_x), loaded_bytes, weight_bytes, parts, options, x.device.index
    )
    partial_dw, partial_db = dw, db
    summed = (want_dw or want_db) and not plan.alone
    if summed:
        both = want_dw and want_db
        partial = x.new_empty((2 if both else 1, plan.programs, width), dtype=torch.float32)
        partial_dw, partial_db = partial.unbind(0) if both else (partial, partial)
    if plan.wide:
        if want_dx:
            plan.launch_dx(x, DY=dy_MH, DS=ds_MH, X=x_MH, W=weight, Mean=mean, Rstd=rstd, DX=dx)
        if want_dw or want_db:
            plan.launch_dw(x, DY=dy_MH, X=x_MH, Mean=mean, Rstd=rstd, DW=partial_dw, DB=partial_db)
    else:
        plan.launch(
            x,
            DY=dy_MH,
            DS=ds_MH,
            X=x_MH,
            W=weight,
            Mean=mean,
            Rstd=rstd,
            DX=dx,
            DW=partial_dw,
            DB=partial_db,
            AMAX=bits,
        )
    if searches and want_dx:
        torch.linalg.vector_norm(dx, float("inf"), dtype=torch.float32, out=amax[0, 0])
    if summed:
        plan.sum(x, P=partial, Out=dw if want_dw else db, Second=db if want_db else dw)
    return dx, dw, db
