"""Gated linear units: y = f(g) · u in one pass, and both gradients in one pass.

    silu        f = g · σ(g)                              f' = σ + g · σ · (1 - σ),                  σ = σ(g)
    gelu        f = g · Φ(g)                              f' = Φ(g) + g · φ(g)
    gelu_tanh   f = g/2 · (1 + tanh(t/2)) = g · σ(t)      f' = σ + g · σ · (1 - σ) · t',             σ = σ(t)
                t = 2·√(2/π) · (g + 0.044715 · g³)        t' = 2·√(2/π) · (1 + 3 · 0.044715 · g²)

    dg = dy · u · f'(g)          du = dy · f(g)

The backward recomputes f, because saving it would cost as much memory as g. Everything between load and store is fp32;
f(g) is not rounded before it is multiplied by u.

For an FP8 product of a result, the kernels also find its largest magnitude (kernels/_math.py).
"""

import functools

import torch
import triton
import triton.language as tl

from tigon.kernels import _launch
from tigon.kernels._launch import Launch, cdiv, next_power_of_2
from tigon.kernels._math import magnitude_bits, take_amax
from tigon.kernels.layout import row_view, rows_of

# M rows, F columns of gate, up and y.
# Elements of a program's tile. With one program per whole row, the backward reaches 40 % of a Hopper's bandwidth: five
# streams are in flight, and lanes idle if F is not a power of two.
FWD_TILE = 2048
BWD_TILE = 1024
NUM_WARPS = 4

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
TANH_SCALE = tl.constexpr(1.5957691216057308)
TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def activation(g, alpha, ACTIVATION: tl.constexpr):
    """f(g) and f'(g); the compiler removes the one that is not used. alpha: silu is g · σ(alpha · g).

    Constants stand on the right: the interpreter of Triton 3.8 and newer cannot multiply a constexpr by a tensor.
    """
    if ACTIVATION == "silu":
        s = tl.sigmoid(alpha * g)
        f = g * s
        df = s + f * (1.0 - s) * alpha
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.math.erf(g * SQRT_HALF))
        f = g * cdf
        df = cdf + g * INV_SQRT_2PI * tl.exp(-0.5 * g * g)
    else:
        s = tl.sigmoid((g + g * TANH_CUBIC * g * g) * TANH_SCALE)
        f = g * s
        df = s + f * (1.0 - s) * TANH_SCALE * (1.0 + g * (3.0 * TANH_CUBIC) * g)
    return f, df


@triton.jit
def glu_fwd_kernel(
    G,  # (M, F)
    U,  # (M, F)
    Y,  # (M, F)
    AMAX,  # (PARTS,) or None
    M,
    F,
    stride_g,
    stride_u,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """PARTS: the numbers at AMAX; 0: no largest magnitude is wanted."""
    # The grid is flat because a second dimension is limited to 65535 rows. Tiles of one row are neighbours.
    tiles = tl.cdiv(F, BLOCK)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (cols < F)
    g = tl.load(G + rows * stride_g + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(U + rows * stride_u + cols, mask=mask, other=0.0).to(tl.float32)
    f, _ = activation(g, 1.0, ACTIVATION)
    y = (f * u).to(Y.dtype.element_ty)
    tl.store(Y + rows * F + cols, y, mask=mask)
    if PARTS > 0:
        take_amax(AMAX, magnitude_bits(tl.where(mask, y, 0.0)), PARTS)


@triton.jit
def glu_bwd_kernel(
    DY,  # (M, F)
    G,  # (M, F)
    U,  # (M, F)
    DG,  # (M, F)
    DU,  # (M, F)
    AMAX,  # (PARTS,) or None
    M,
    F,
    stride_dy,
    stride_g,
    stride_u,
    stride_dg,
    stride_du,
    ACTIVATION: tl.constexpr,
    WANT_DG: tl.constexpr,
    WANT_DU: tl.constexpr,
    PARTS: tl.constexpr,
    UP_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """UP_PARTS: the place of du's numbers behind dg's; 0 if both are halves of one tensor."""
    tiles = tl.cdiv(F, BLOCK)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (cols < F)
    dy = tl.load(DY + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(G + rows * stride_g + cols, mask=mask, other=0.0).to(tl.float32)
    f, df = activation(g, 1.0, ACTIVATION)
    if WANT_DG:
        u = tl.load(U + rows * stride_u + cols, mask=mask, other=0.0).to(tl.float32)
        dg = (dy * u * df).to(DG.dtype.element_ty)
        tl.store(DG + rows * stride_dg + cols, dg, mask=mask)
        if PARTS > 0:
            take_amax(AMAX, magnitude_bits(tl.where(mask, dg, 0.0)), PARTS)
    if WANT_DU:
        du = (dy * f).to(DU.dtype.element_ty)
        tl.store(DU + rows * stride_du + cols, du, mask=mask)
        if PARTS > 0:
            take_amax(AMAX + UP_PARTS, magnitude_bits(tl.where(mask, du, 0.0)), PARTS)


def _halves(gate, up):
    """(M, F) views of gate and up, or of the two halves of one packed tensor."""
    if up is not None:
        return row_view(gate, gate.shape[-1]), row_view(up, up.shape[-1])
    return row_view(gate, gate.shape[-1]).chunk(2, dim=1)


def _tile(M, F, elements, index):
    warps = NUM_WARPS
    while warps > 1 and elements * _launch.multiprocessors(index) > M * F:
        # With few rows, smaller tiles with as many elements per lane use more multiprocessors.
        elements, warps = elements // 2, warps // 2
    block = min(next_power_of_2(F), elements)
    rows = elements // block
    return (cdiv(M, rows) * cdiv(F, block),), {"ROWS": rows, "BLOCK": block, "num_warps": warps}


def _rows(gate, up):
    """(gate, up, M, F, their row strides); the halves of a packed gate are views of it. Contiguous tensors need no
    views, which take 1 us each."""
    if up is None:
        g_MF, u_MF = _halves(gate, None)
        return g_MF, u_MF, *g_MF.shape, g_MF.stride(0), u_MF.stride(0)
    width = gate.shape[-1] if gate.ndim else 1
    g, M, stride_g = rows_of(gate, width)
    u, _, stride_u = rows_of(up, width)
    return g, u, M, width, stride_g, stride_u


@functools.lru_cache(maxsize=1 << 12)
def _fwd_launch(M, F, stride_g, stride_u, activation, parts, index):
    grid, tile = _tile(M, F, FWD_TILE, index)
    return Launch(
        glu_fwd_kernel, grid, M=M, F=F, stride_g=stride_g, stride_u=stride_u, ACTIVATION=activation, PARTS=parts, **tile
    )


@functools.lru_cache(maxsize=1 << 12)
def _bwd_launch(M, F, strides, activation, want_dg, want_du, parts, up_parts, index):
    grid, tile = _tile(M, F, BWD_TILE, index)
    stride_dy, stride_g, stride_u, stride_dg, stride_du = strides
    return Launch(
        glu_bwd_kernel,
        grid,
        M=M,
        F=F,
        stride_dy=stride_dy,
        stride_g=stride_g,
        stride_u=stride_u,
        stride_dg=stride_dg,
        stride_du=stride_du,
        ACTIVATION=activation,
        WANT_DG=want_dg,
        WANT_DU=want_du,
        PARTS=parts,
        UP_PARTS=up_parts,
        **tile,
    )


def _parts(amax):
    """(the numbers as int32, how many a tensor has)."""
    return (None, 0) if amax is None else (amax.view(torch.int32), amax.shape[-1])


def glu_fwd(gate, up, activation, amax=None):
    """Launch the forward; gate and up are (..., F), or gate is (..., 2F) and up is None. Returns (..., F).

    amax: (1, parts) zeros, or None; its maximum is then that of |y|.
    """
    if up is None:
        y = gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    else:
        dtype = gate.dtype
        if up.dtype is not dtype:
            dtype = torch.promote_types(dtype, up.dtype)
        y = torch.empty_like(gate, dtype=dtype, memory_format=torch.contiguous_format)
    if y.numel():
        g_MF, u_MF, M, F, stride_g, stride_u = _rows(gate, up)
        bits, parts = _parts(amax)
        launch = _fwd_launch(M, F, stride_g, stride_u, activation, parts, gate.device.index)
        launch(gate, G=g_MF, U=u_MF, Y=y, AMAX=bits)
    return y


def glu_bwd(dy, gate, up, activation, want_dgate, want_dup, amax=None):
    """Launch the backward; returns (dgate, dup), empty where not wanted. A packed gate has one packed gradient.

    amax: zeros, or None; one row of parts per gradient, whose maximum is then that of the gradient's magnitudes.
    """
    dgate = _empty_grad(gate, want_dgate)
    dup = _empty_grad(gate if up is None else up, want_dup)
    _launch_bwd(dy, gate, up, dgate, dup, activation, want_dgate, want_dup, amax)
    return dgate, dup


def _empty_grad(x, wanted):
    return torch.empty_like(x, memory_format=torch.contiguous_format) if wanted else x.new_empty(0)


def glu_bwd_inplace(dy, gate, up, activation, amax=None):
    """Launch the backward with the gradients written over gate and up, which must be contiguous.

    This is safe because each program reads dy, gate and up of an element before it writes the element's two gradients.
    """
    _launch_bwd(dy, gate, up, gate, up, activation, True, True, amax)


def _launch_bwd(dy, gate, up, dgate, dup, activation, want_dgate, want_dup, amax):
    if not gate.numel():
        return
    g_MF, u_MF, M, F, stride_g, stride_u = _rows(gate, up)
    dg_MF, du_MF, stride_dg, stride_du = dgate, dup, F, F
    if up is None:
        dg_MF, du_MF = _halves(dgate, None)
        stride_dg, stride_du = dg_MF.stride(0), du_MF.stride(0)
    dy_MF, _, stride_dy = rows_of(dy, F)
    bits, parts = _parts(amax)
    _bwd_launch(
        M,
        F,
        (stride_dy, stride_g, stride_u, stride_dg, stride_du),
        activation,
        want_dgate,
        up is None or want_dup,
        parts,
        0 if up is None else parts,
        gate.device.index,
    )(gate, DY=dy_MF, G=g_MF, U=u_MF, DG=dg_MF, DU=du_MF, AMAX=bits)
