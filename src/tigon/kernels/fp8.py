"""FP8 operands of a matrix product: amax in one pass over x, then one pass that casts x as it is and transposed.

    amax    = max |x| of the whole of x, or of each row and of each column
    scale   = amax / L                          L: the largest number of the format, 448 (e4m3) or 57344 (e5m2)
    q       = round(x · (L / amax)) to FP8      x ≈ q · scale

An FP8 product reads both factors along the summed dimension. The forward pass therefore needs x by rows, and the
weight's gradient needs it transposed. Both come from one read of x from memory. With a scale per row, the transposed
matrix has a scale per column of x, because a scale must not change along the summed dimension.

amax is the integer maximum of the bits of |x|. It does not depend on the order, so runs repeat bit for bit. It also
keeps NaN and infinity: either makes every value that shares its scale NaN.

The amax of a whole tensor is a list: each program of one launch writes the maximum of its part, and the cast reads the
list. One number would need a second launch, which sets it to 0 before the programs compare with it.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels import chips
from tigon.kernels._launch import cdiv, launch
from tigon.kernels._math import INTERPRETED

# M rows, K columns. Tiles of 64 x 128: a transposed store then writes 64 consecutive bytes.
# On an H100 six tiles differ by at most 3 %: each moves about 96 % of what a copy does.
BLOCK_M, BLOCK_K, WARPS = 64, 128, 8

AMAX_BLOCK, AMAX_WARPS = 8192, 8
MOST_PARTS = 512
"""Programs that share a tensor's amax: about 4 per multiprocessor of an H200."""

ALIGNMENT = 16
"""The summed dimension of an FP8 product is a multiple of this, so transposed rows are filled up with zeros."""

MASKED_READ = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))
"""Whether the transposed tile may be read with a mask: see `cast_kernel`."""

SMALLEST = tl.constexpr(1e-30)
"""Rows of zeros, and of less than this, get its scale, so that L / amax stays finite."""


@triton.jit
def amax_kernel(X, AMAX, SIZE, STRIDE, BLOCK: tl.constexpr):
    """AMAX: for each program the bits of max |x| of every STRIDE-th element from its own block on, as int32."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    largest = tl.zeros((BLOCK,), tl.int32)
    for first in range(start, SIZE, STRIDE):
        place = first + tl.arange(0, BLOCK)
        x = tl.load(X + place, mask=place < SIZE, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x).to(tl.int32, bitcast=True))
    tl.store(AMAX + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit
def amax_rowwise_kernel(X, AMAX, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """AMAX: the bits of max |x| as int32, zeroed before; M for the rows and then K for the columns."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    x = tl.load(X + rows[:, None] * K + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    tl.atomic_max(AMAX + rows, tl.max(bits, axis=1), mask=rows < M, sem="relaxed")
    tl.atomic_max(AMAX + M + cols, tl.max(bits, axis=0), mask=cols < K, sem="relaxed")


@triton.jit
def _whole_amax(AMAX, PARTS, MOST: tl.constexpr):
    """The maximum of a tensor's parts, at least the smallest one."""
    parts = tl.arange(0, MOST)
    bits = tl.max(tl.load(AMAX + parts, mask=parts < PARTS, other=0), axis=0)
    amax = bits.to(tl.float32, bitcast=True)
    return tl.where(amax < SMALLEST, SMALLEST, amax)


@triton.jit
def _fp8_bits(x, MANTISSA: tl.constexpr, NATIVE: tl.constexpr):
    """The bits of x in FP8, rounded to the nearest, ties to even. |x| is at most the format's largest number, or NaN.

    MANTISSA: 3 (e4m3) or 2 (e5m2). NATIVE: the chip has an instruction for the cast.
    """
    if NATIVE:
        if MANTISSA == 3:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    SHIFT: tl.constexpr = 23 - MANTISSA
    # A sum with this power of 2 rounds to the format's subnormal step, and the sum's last bits are the result.
    MAGIC: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    magic = tl.full(x.shape, MAGIC, tl.int32)
    small = (tl.abs(x) + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - MAGIC
    code = tl.where(size < ((128 - BIAS) << 23), small, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def cast_kernel(
    X,  # (M, K)
    AMAX,  # (PARTS,)
    ROWS,  # (M, K) bytes
    COLUMNS,  # (K, PADDED) bytes
    ROW_SCALES,  # (M,) or ()
    COLUMN_SCALES,  # (K,) or ()
    M,
    K,
    PADDED,
    PARTS,
    MOST: tl.constexpr,
    ROWWISE: tl.constexpr,
    WANT_ROWS: tl.constexpr,
    WANT_COLUMNS: tl.constexpr,
    MANTISSA: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """ROWS (M, K) and the first M columns of COLUMNS (K, PADDED), both as bytes.

    AMAX as int32: PARTS for the whole, or those of M and K.

    EVEN: the tiles fill M and K, so values are read and written without masks. A cast by rows and columns then has 16
    instructions per element instead of 20 (sm_90).
    """
    LARGEST: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    # From the end of x to its start: the cache still has the end, from the writer of x or from the search for its amax.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    across = tl.cdiv(K, BLOCK_K)
    tile_m, tile_k = tile // across, tile % across
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    if EVEN:
        x = tl.load(X + rows[:, None] * K + cols[None, :]).to(tl.float32)
    else:
        x = tl.load(X + rows[:, None] * K + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if not ROWWISE:
        whole = _whole_amax(AMAX, PARTS, MOST)
        factor = tl.div_rn(LARGEST, whole)
        if tile == 0:
            if WANT_ROWS:
                tl.store(ROW_SCALES, tl.div_rn(whole, LARGEST))
            if WANT_COLUMNS:
                tl.store(COLUMN_SCALES, tl.div_rn(whole, LARGEST))
    if WANT_ROWS:
        if ROWWISE:
            amax = tl.load(AMAX + rows, mask=rows < M, other=0).to(tl.float32, bitcast=True)
            amax = tl.where(amax < SMALLEST, SMALLEST, amax)
            if tile_k == 0:
                tl.store(ROW_SCALES + rows, tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)), mask=rows < M)
            factor = tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax)[:, None]
        q = _fp8_bits(x * factor, MANTISSA, NATIVE)
        if EVEN:
            tl.store(ROWS + rows[:, None] * K + cols[None, :], q)
        else:
            tl.store(ROWS + rows[:, None] * K + cols[None, :], q, mask=mask)
    if WANT_COLUMNS:
        if ROWWISE:
            amax = tl.load(AMAX + M + cols, mask=cols < K, other=0).to(tl.float32, bitcast=True)
            amax = tl.where(amax < SMALLEST, SMALLEST, amax)
            if tile_m == 0:
                tl.store(COLUMN_SCALES + cols, tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)), mask=cols < K)
            factor = tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax)[:, None]
        # The tile is read again, transposed, from the cache. With one read for both ways Triton transposes bytes (3.6:
        # of fp32 alone), and from 3.7 on with a mask too. On sm_90 a quarter of them came to wrong places. Without a
        # mask, indices are cut off at the edge, and elements are read one by one.
        inside = (cols < K)[:, None] & (rows < M)[None, :]
        if EVEN:
            x = tl.load(X + rows[None, :] * K + cols[:, None]).to(tl.float32)
        elif MASKED_READ:
            x = tl.load(X + rows[None, :] * K + cols[:, None], mask=inside, other=0.0).to(tl.float32)
        else:
            last_row, last_col = tl.minimum(rows, M - 1), tl.minimum(cols, K - 1)
            x = tl.load(X + last_row[None, :] * K + last_col[:, None]).to(tl.float32)
        q = _fp8_bits(x * factor, MANTISSA, NATIVE)
        transposed = cols.to(tl.int64)[:, None] * PADDED + rows[None, :]
        if EVEN:
            tl.store(COLUMNS + transposed, q)
        else:
            tl.store(COLUMNS + transposed, q, mask=inside)


def padded(rows):
    """`rows`, rounded up to what a summed dimension must be a multiple of."""
    return cdiv(rows, ALIGNMENT) * ALIGNMENT


def amax_parts(size):
    """How many numbers the amax of a tensor of this many elements has."""
    return max(1, min(MOST_PARTS, cdiv(size, AMAX_BLOCK)))


def fp8_amax(x_MK, rowwise):
    (M, K), x_MK, device = x_MK.shape, x_MK.contiguous(), x_MK.device
    size = x_MK.numel()
    if not size:
        return torch.zeros(M + K if rowwise else 1, dtype=torch.float32, device=device)
    if rowwise:
        amax = torch.zeros(M + K, dtype=torch.float32, device=device)
        launch(
            amax_rowwise_kernel,
            (cdiv(M, BLOCK_M), cdiv(K, BLOCK_K)),
            x_MK,
            X=x_MK,
            AMAX=amax.view(torch.int32),
            M=M,
            K=K,
            BLOCK_M=BLOCK_M,
            BLOCK_K=BLOCK_K,
            num_warps=WARPS,
        )
        return amax
    parts = amax_parts(size)
    amax = torch.empty(parts, dtype=torch.float32, device=device)
    launch(
        amax_kernel,
        (parts,),
        x_MK,
        X=x_MK,
        AMAX=amax.view(torch.int32),
        SIZE=size,
        STRIDE=parts * AMAX_BLOCK,
        BLOCK=AMAX_BLOCK,
        num_warps=AMAX_WARPS,
    )
    return amax


def fp8_cast(x_MK, amax, rowwise, want_rows, want_columns, gradient):
    (M, K), x_MK, device = x_MK.shape, x_MK.contiguous(), x_MK.device
    P = padded(M)
    # A tensor's gradient has a wide range, so with one scale it gets the format with more exponent bits.
    dtype, mantissa = (torch.float8_e5m2, 2) if gradient and not rowwise else (torch.float8_e4m3fn, 3)
    rows = torch.empty(M, K, dtype=dtype, device=device) if want_rows else None
    columns = torch.empty(K, P, dtype=dtype, device=device) if want_columns else None
    if columns is not None and P != M:
        columns.view(torch.uint8)[:, M:].zero_()
    row_scales = torch.empty(M if rowwise else 1, dtype=torch.float32, device=device) if want_rows else None
    column_scales = torch.empty(K if rowwise else 1, dtype=torch.float32, device=device) if want_columns else None
    if not x_MK.numel():
        for result in (columns, row_scales, column_scales):
            if result is not None:
                result.zero_()
        return rows, columns, row_scales, column_scales
    chip = chips.chip(device.index)
    native = not INTERPRETED.value and chip is not None and chip.casts_to_fp8
    launch(
        cast_kernel, (cdiv(P if want_columns else M, BLOCK_M) * cdiv(K, BLOCK_K),), x_MK, X=x_MK,
        AMAX=amax.view(torch.int32), ROWS=_bytes(rows), COLUMNS=_bytes(columns), ROW_SCALES=row_scales,
        COLUMN_SCALES=column_scales, M=M, K=K, PADDED=P, PARTS=amax.numel(), MOST=MOST_PARTS, ROWWISE=rowwise,
        WANT_ROWS=want_rows, WANT_COLUMNS=want_columns, MANTISSA=mantissa, NATIVE=native,
        EVEN=M % BLOCK_M == K % BLOCK_K == 0, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K,
        num_warps=WARPS,
    )  # fmt: skip
    return rows, columns, row_scales, column_scales


def _bytes(q):
    return None if q is None else q.view(torch.uint8)
