"""RMSNorm with a gate, as after a gated delta rule or a state-space scan, in one pass.

    the norm first      y = x̂ · w · f(g),   x̂ = x · r,   r = 1 / sqrt(mean(x²) + eps)
    the gate first      y = ŝ · w,          ŝ = s · r,   s = x · f(g)

    silu        f = g · σ(g)        f' = σ + g · σ · (1 - σ),       σ = σ(g)
    sigmoid     f = σ(g)            f' = σ · (1 - σ)

backward, with s = x and c = dy · w · f(g) if the norm is first, and c = dy · w otherwise:
    ds = r · (c - s · r² · mean(c · s))
    the norm first      dx = ds             dg = dy · w · x̂ · f'(g)         dw = Σ dy · f(g) · x̂
    the gate first      dx = ds · f(g)      dg = ds · x · f'(g)             dw = Σ dy · ŝ

A row is one group of the width. Everything between load and store is fp32. The backward computes r again: both of its
sums then depend on loads alone, and nothing is saved besides x and g.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels import _launch
from tigon.kernels._launch import cdiv, launch, next_power_of_2
from tigon.kernels.layout import rows_of
from tigon.kernels.norm import sum_rows_kernel

FWD_TILE = 4096  # elements of a program's tile, which holds whole rows
BWD_TILE = 2048
FWD_PER_LANE, BWD_PER_LANE = 16, 8  # elements of a tile per thread; the backward holds eight tiles in registers
PROGRAMS_PER_SM = 8  # of the backward, each with a row of partial sums


@triton.jit
def gate_of(g, SILU: tl.constexpr):
    """f(g) and f'(g)."""
    s = tl.sigmoid(g)
    if SILU:
        f = g * s
        df = s + f * (1.0 - s)
    else:
        f = s
        df = s * (1.0 - s)
    return f, df


@triton.jit
def gated_norm_fwd_kernel(
    X,  # (M, groups · H)
    G,  # (M, groups · H)
    W,  # (groups · H,)
    Y,  # (M, groups · H)
    M,
    H,
    stride_x,
    stride_g,
    eps,
    SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * H + tl.arange(0, BLOCK)[None, :]
    there = tl.arange(0, BLOCK)[None, :] < H
    mask = (rows < M) & there
    s = tl.load(X + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(G + rows * stride_g + cols, mask=mask, other=0.0).to(tl.float32)
    f, _ = gate_of(g, SILU)
    w = tl.load(W + cols, mask=there, other=0.0).to(tl.float32)
    if GATE_FIRST:
        s = s * f
    y = s * tl.rsqrt(tl.sum(s * s, axis=1) / H + eps)[:, None] * w
    if not GATE_FIRST:
        y = y * f
    tl.store(Y + rows * (tl.num_programs(1) * H) + cols, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def gated_norm_bwd_kernel(
    DY,  # (M, groups · H)
    X,  # (M, groups · H)
    G,  # (M, groups · H)
    W,  # (groups · H,)
    DX,  # (M, groups · H)
    DG,  # (M, groups · H)
    DW,  # (programs, groups · H) fp32, or None
    M,
    H,
    stride_dy,
    stride_x,
    stride_g,
    eps,
    SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    WANT_DW: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cols = tl.program_id(1) * H + tl.arange(0, BLOCK)[None, :]
    there = tl.arange(0, BLOCK)[None, :] < H
    width = tl.cast(tl.num_programs(1), tl.int64) * H
    dw = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    w = tl.load(W + cols, mask=there, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        mask = (rows < M) & there
        if WIDE:
            w = tl.load(W + cols, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(DY + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X + rows * stride_x + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        g = tl.load(G + rows * stride_g + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        f, df = gate_of(g, SILU)
        if GATE_FIRST:
            s = x * f
            c = dy * w
        else:
            s = x
            c = dy * f * w
        r = tl.rsqrt(tl.sum(s * s, axis=1) / H + eps)[:, None]
        mean = tl.sum(c * s, axis=1)[:, None] * r / H
        if WIDE:  # read again what the registers cannot hold
            w = tl.load(W + cols, mask=there, other=0.0).to(tl.float32)
            x = tl.load(X + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
            f, df = gate_of(tl.load(G + rows * stride_g + cols, mask=mask, other=0.0).to(tl.float32), SILU)
        if GATE_FIRST:
            shat = x * f * r
            gated = dy
        else:
            shat = x * r
            gated = dy * f
        if WANT_DW:
            dw += gated * shat
        ds = r * (gated * w - shat * mean)
        if GATE_FIRST:
            dx = ds * f
            dg = ds * x * df
        else:
            dx = ds
            dg = dy * w * shat * df
        tl.store(DX + rows * width + cols, dx.to(DX.dtype.element_ty), mask=mask)
        tl.store(DG + rows * width + cols, dg.to(DG.dtype.element_ty), mask=mask)
    if WANT_DW:
        tl.store(DW + tl.program_id(0) * width + cols, tl.sum(dw, axis=0)[None, :], mask=there)


def _tile(H, elements, per_lane):
    """(rows, columns, warps) of a program's tile."""
    block = next_power_of_2(H)
    rows = max(elements // block, 1)
    return rows, block, _launch.clamp_warps(max(rows * block // (per_lane * _launch.lanes()), 1))


def gated_norm_fwd(x, gate, weight, options):
    """Launch the forward of x and gate (..., groups · H). options: a `GatedNormOptions`."""
    eps, groups, silu, gate_first = options
    width = x.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel():
        (x_MH, M, stride_x), (g_MH, _, stride_g) = rows_of(x, width), rows_of(gate, width)
        rows, block, warps = _tile(width // groups, FWD_TILE, FWD_PER_LANE)
        launch(
            gated_norm_fwd_kernel,
            (cdiv(M, rows), groups),
            x,
            num_warps=warps,
            X=x_MH,
            G=g_MH,
            W=weight.contiguous(),
            Y=y,
            M=M,
            H=width // groups,
            stride_x=stride_x,
            stride_g=stride_g,
            eps=eps,
            SILU=silu,
            GATE_FIRST=gate_first,
            ROWS=rows,
            BLOCK=block,
        )
    return y


def gated_norm_bwd(dy, x, gate, weight, options, want_dw):
    """Launch the backward; returns (dx, dgate, dweight). dweight is None if it is not wanted."""
    eps, groups, silu, gate_first = options
    width = x.shape[-1]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dw = weight.new_empty(width) if want_dw else None
    if not x.numel():
        return dx, dgate, dw.zero_() if want_dw else None
    (dy_MH, M, stride_dy), (x_MH, _, stride_x) = rows_of(dy, width), rows_of(x, width)
    g_MH, _, stride_g = rows_of(gate, width)
    rows, block, warps = _tile(width // groups, BWD_TILE, BWD_PER_LANE)
    programs = min(cdiv(M, rows), max(PROGRAMS_PER_SM * _launch.multiprocessors(x.device.index) // groups, 1))
    partial = x.new_empty((programs, width), dtype=torch.float32) if want_dw else None
    launch(
        gated_norm_bwd_kernel,
        (programs, groups),
        x,
        num_warps=warps,
        DY=dy_MH,
        X=x_MH,
        G=g_MH,
        W=weight.contiguous(),
        DX=dx,
        DG=dgate,
        DW=partial,
        M=M,
        H=width // groups,
        stride_dy=stride_dy,
        stride_x=stride_x,
        stride_g=stride_g,
        eps=eps,
        SILU=silu,
        GATE_FIRST=gate_first,
        WANT_DW=want_dw,
        WIDE=block > 4096,
        ROWS=rows,
        BLOCK=block,
    )
    if want_dw:
        launch(
            sum_rows_kernel, (cdiv(width, 64), 1), x, num_warps=4,
            P=partial, Out=dw, Second=dw, rows=programs, H=width, BLOCK_R=32, BLOCK=64,
        )  # fmt: skip
    return dx, dgate, dw
