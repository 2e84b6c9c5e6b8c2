"""Rotary position embedding of queries and keys in one launch; the backward is the transposed map.

The pairs of the rotary width R are (i, i + R/2), or (2i, 2i + 1) when INTERLEAVED. With a, b the two members of a pair
and c_a, c_b, s_a, s_b their entries of the tables:

    y_a = x_a · c_a - x_b · s_a              dx_a = dy_a · c_a + dy_b · s_b
    y_b = x_b · c_b + x_a · s_b              dx_b = dy_b · c_b - dy_a · s_a

The right side is the left one with (s_a, s_b) replaced by (-s_b, -s_a); TRANSPOSE does this. The map is a rotation only
if the table repeats itself (c_a = c_b, s_a = s_b), but the gradient is right for any table. Columns R to D are copied.

The backward needs the tables only. The output is new memory. Rotating q in place would save memory, but corrupt q for
other functions whose backward saved it.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from tigon.kernels._launch import Launch, cdiv, next_power_of_2
from tigon.kernels._math import magnitude_bits, take_amax
from tigon.kernels.layout import ordered_strides

# B batch, H heads, T tokens, D head width, R rotary width; N = B·T.
# A program rotates HEADS heads of some tokens, so that it reads a table row from DRAM once and uses it HEADS times from
# registers. Programs for the same tokens are neighbours in the grid and find the tables in L2.
HEADS = 4
# Pairs per tile: with 4 warps 8 per thread, one 16-byte load of bf16 for each member.
TILE = 1024
NUM_WARPS = 4
FLAT_HEADS = 2  # heads per program of rope_flat_kernel


@triton.jit
def _load_pair(
    X, offsets, row_mask, SPLIT: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Both members of the pairs of some rows in fp32, (ROWS, BLOCK) each; SPLIT = R/2."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.load(X + offsets + cols, mask=row_mask & (cols < 2 * SPLIT), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (ROWS, BLOCK, 2)))
    else:
        cols = tl.arange(0, BLOCK)[None, :]
        mask = row_mask & (cols < SPLIT)
        a = tl.load(X + offsets + cols, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(X + offsets + SPLIT + cols, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pair(
    Y,  # YQ or YK
    offsets,
    row_mask,
    a,
    b,
    SPLIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.join(a, b), (ROWS, 2 * BLOCK)).to(Y.dtype.element_ty)
        tl.store(Y + offsets + cols, both, mask=row_mask & (cols < 2 * SPLIT))
    else:
        cols = tl.arange(0, BLOCK)[None, :]
        mask = row_mask & (cols < SPLIT)
        tl.store(Y + offsets + cols, a.to(Y.dtype.element_ty), mask=mask)
        tl.store(Y + offsets + SPLIT + cols, b.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_heads(
    X,  # Q or K
    Y,  # YQ or YK
    AMAX,  # (2 · PARTS,) or None
    batch,
    token,
    row_mask,
    first_head,
    heads,
    c_a,
    c_b,
    s_a,
    s_b,
    stride_xb,
    stride_xh,
    stride_xt,
    stride_yb,
    stride_yh,
    stride_yt,
    R: tl.constexpr,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    largest = tl.zeros([ROWS, BLOCK], dtype=tl.int32)
    largest_passed = tl.zeros([ROWS, BLOCK_PASS], dtype=tl.int32)
    for i in tl.static_range(HEADS):
        head = first_head + i
        mask = tl.where(head < heads, row_mask, False)
        x_offsets = batch * stride_xb + head * stride_xh + token * stride_xt
        y_offsets = batch * stride_yb + head * stride_yh + token * stride_yt
        a, b = _load_pair(X, x_offsets, mask, R // 2, INTERLEAVED, ROWS, BLOCK)
        y_a, y_b = a * c_a - b * s_a, b * c_b + a * s_b
        _store_pair(Y, y_offsets, mask, y_a, y_b, R // 2, INTERLEAVED, ROWS, BLOCK)
        if PARTS > 0:
            # Masked members are products of zeros, which are NaN if the table is not finite.
            kept = mask & (tl.arange(0, BLOCK)[None, :] < R // 2)
            y_a = tl.where(kept, y_a, 0.0).to(Y.dtype.element_ty)
            y_b = tl.where(kept, y_b, 0.0).to(Y.dtype.element_ty)
            largest = tl.maximum(largest, tl.maximum(magnitude_bits(y_a), magnitude_bits(y_b)))
        if R < D:
            cols = R + tl.arange(0, BLOCK_PASS)[None, :]
            rest = tl.load(X + x_offsets + cols, mask=mask & (cols < D), other=0.0)
            tl.store(Y + y_offsets + cols, rest, mask=mask & (cols < D))
            if PARTS > 0:
                largest_passed = tl.maximum(largest_passed, magnitude_bits(rest))
    if PARTS > 0:
        take_amax(AMAX, largest, PARTS)
        if R < D:
            take_amax(AMAX, largest_passed, PARTS)


@triton.jit
def rope_kernel(
    Q,  # (B, heads, T, D)
    K,  # (B, heads, T, D)
    Cos,  # (B or 1, T, R)
    Sin,  # (B or 1, T, R)
    YQ,  # as Q
    YK,  # as K
    AMAX,  # (2 · PARTS,) or None
    N,
    T,
    q_heads,
    k_heads,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_cb,
    stride_ct,
    stride_sb,
    stride_st,
    stride_yqb,
    stride_yqh,
    stride_yqt,
    stride_ykb,
    stride_ykh,
    stride_ykt,
    R: tl.constexpr,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    """PARTS: the numbers at AMAX for the largest magnitude of YQ, and behind them for YK's; 0: not wanted."""
    q_groups = tl.cdiv(q_heads, HEADS)
    groups = q_groups + tl.cdiv(k_heads, HEADS)
    group = tl.program_id(0) % groups
    # Rows are the tokens of all sequences, so that one decoding step of a batch also fills a tile.
    n = (tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = n < N
    batch = n // T
    token = n % T
    c_a, c_b = _load_pair(Cos, batch * stride_cb + token * stride_ct, row_mask, R // 2, INTERLEAVED, ROWS, BLOCK)
    s_a, s_b = _load_pair(Sin, batch * stride_sb + token * stride_st, row_mask, R // 2, INTERLEAVED, ROWS, BLOCK)
    if TRANSPOSE:
        s_a, s_b = -s_b, -s_a
    if group < q_groups:
        _rotate_heads(
            Q,
            YQ,
            AMAX,
            batch,
            token,
            row_mask,
            (group * HEADS).to(tl.int64),
            q_heads,
            c_a,
            c_b,
            s_a,
            s_b,
            stride_qb,
            stride_qh,
            stride_qt,
            stride_yqb,
            stride_yqh,
            stride_yqt,
            R,
            D,
            INTERLEAVED,
            PARTS,
            HEADS,
            ROWS,
            BLOCK,
            BLOCK_PASS,
        )
    else:
        _rotate_heads(
            K, YK, AMAX + PARTS if PARTS > 0 else AMAX, batch, token, row_mask,
            ((group - q_groups) * HEADS).to(tl.int64), k_heads, c_a, c_b, s_a, s_b,
            stride_kb, stride_kh, stride_kt, stride_ykb, stride_ykh, stride_ykt,
            R, D, INTERLEAVED, PARTS, HEADS, ROWS, BLOCK, BLOCK_PASS,
        )  # fmt: skip


@triton.jit
def _rotate_flat_heads(
    X,  # Q or K
    Y,  # YQ or YK
    x_offsets,
    y_offsets,
    mask,
    first,
    heads,
    stride_xh,
    stride_yh,
    c_a,
    c_b,
    s_a,
    s_b,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    for i in tl.static_range(HEADS):
        head = first + i
        here = tl.where(head < heads, mask, False)
        x, y = X + head * stride_xh + x_offsets, Y + head * stride_yh + y_offsets
        a = tl.load(x, mask=here, other=0.0).to(tl.float32)
        b = tl.load(x + SPLIT, mask=here, other=0.0).to(tl.float32)
        tl.store(y, (a * c_a - b * s_a).to(Y.dtype.element_ty), mask=here)
        tl.store(y + SPLIT, (b * c_b + a * s_b).to(Y.dtype.element_ty), mask=here)


@triton.jit
def rope_flat_kernel(
    Q,  # (B, heads, T, D)
    K,  # (B, heads, T, D)
    Cos,  # (B or 1, T, R)
    Sin,  # (B or 1, T, R)
    YQ,  # as Q
    YK,  # as K
    N,
    T,
    q_heads,
    k_heads,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_cb,
    stride_ct,
    stride_sb,
    stride_st,
    stride_yqb,
    stride_yqh,
    stride_yqt,
    stride_ykb,
    stride_ykh,
    stride_ykt,
    SPLIT: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """As rope_kernel for halves of SPLIT columns that are no power of two: no lane is left without a pair.

    The pairs of ROWS tokens are numbered through, and a tile takes the next TILE of them. SPLIT is a multiple of 8, so
    that the 8 pairs of a thread lie in one row and are one load.
    """
    q_groups = tl.cdiv(q_heads, HEADS)
    groups = q_groups + tl.cdiv(k_heads, HEADS)
    group = tl.program_id(0) % groups
    tiles: tl.constexpr = ROWS * SPLIT // TILE
    part = tl.program_id(0) // groups
    pair = (part % tiles) * TILE + tl.arange(0, TILE)
    col = pair % SPLIT
    n = (part // tiles).to(tl.int64) * ROWS + pair // SPLIT
    mask = n < N
    batch = n // T
    token = n % T
    c = Cos + batch * stride_cb + token * stride_ct + col
    s = Sin + batch * stride_sb + token * stride_st + col
    c_a = tl.load(c, mask=mask, other=0.0).to(tl.float32)
    c_b = tl.load(c + SPLIT, mask=mask, other=0.0).to(tl.float32)
    s_a = tl.load(s, mask=mask, other=0.0).to(tl.float32)
    s_b = tl.load(s + SPLIT, mask=mask, other=0.0).to(tl.float32)
    if TRANSPOSE:
        s_a, s_b = -s_b, -s_a
    # The branches yield nothing: Triton 3.6 cannot compile pointers that differ between branches for AMD.
    if group < q_groups:
        _rotate_flat_heads(
            Q,
            YQ,
            batch * stride_qb + token * stride_qt + col,
            batch * stride_yqb + token * stride_yqt + col,
            mask,
            (group * HEADS).to(tl.int64),
            q_heads,
            stride_qh,
            stride_yqh,
            c_a,
            c_b,
            s_a,
            s_b,
            SPLIT,
            HEADS,
        )
    else:
        _rotate_flat_heads(
            K,
            YK,
            batch * stride_kb + token * stride_kt + col,
            batch * stride_ykb + token * stride_ykt + col,
            mask,
            ((group - q_groups) * HEADS).to(tl.int64),
            k_heads,
            stride_kh,
            stride_ykh,
            c_a,
            c_b,
            s_a,
            s_b,
            SPLIT,
            HEADS,
        )


def fits_flat(R, D, interleaved):
    """Whether rope_flat_kernel rotates R of D columns. It is 8 to 16 % faster there (H200, widths 192 to 448)."""
    return R == D and R % 16 == 0 and next_power_of_2(R // 2) > R // 2 and not interleaved


def _unit_last(x):
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(prefix, strides, heads_dim):
    """The kernel's arguments for the strides of batch, heads and tokens."""
    return {prefix + "b": strides[0], prefix + "h": strides[heads_dim], prefix + "t": strides[3 - heads_dim]}


def _table_strides(prefix, shape, strides):
    """Strides of batch and tokens of (T, R), (1, T, R) or (B, T, R); 0 where one row serves all."""
    return {prefix + "b": 0 if len(shape) == 2 or shape[0] == 1 else strides[0], prefix + "t": strides[-2]}


class _Plan:
    """What shapes, strides and options decide. A call then only allocates and launches."""

    def __init__(self, q, k, cos, sin, heads_dim, interleaved, transpose, parts):
        (q_shape, q_strides, q_order), (k_shape, k_strides, k_order) = q, k
        (cos_shape, cos_strides), (sin_shape, sin_strides) = cos, sin
        time_dim = 3 - heads_dim
        B, T, D, R = q_shape[0], q_shape[time_dim], q_shape[3], cos_shape[-1]
        q_heads, k_heads = q_shape[heads_dim], k_shape[heads_dim]
        self.q_out, self.k_out = ordered_strides(q_shape, q_order), ordered_strides(k_shape, k_order)
        self.empty = not B * T * (q_heads + k_heads)
        if self.empty:
            return
        groups = cdiv(q_heads, HEADS) + cdiv(k_heads, HEADS)
        numbers = dict(
            N=B * T,
            T=T,
            q_heads=q_heads,
            k_heads=k_heads,
            **_strides("stride_q", q_strides, heads_dim),
            **_strides("stride_k", k_strides, heads_dim),
            **_table_strides("stride_c", cos_shape, cos_strides),
            **_table_strides("stride_s", sin_shape, sin_strides),
            **_strides("stride_yq", self.q_out, heads_dim),
            **_strides("stride_yk", self.k_out, heads_dim),
        )
        block = next_power_of_2(R // 2)
        self.flat = not parts and fits_flat(R, D, interleaved)
        if self.flat:
            groups = cdiv(q_heads, FLAT_HEADS) + cdiv(k_heads, FLAT_HEADS)
            rows = TILE // math.gcd(TILE, R // 2)
            tiles = cdiv(B * T, rows) * (rows * (R // 2) // TILE)
            self.launch = Launch(
                rope_flat_kernel,
                (groups * tiles,),
                **numbers,
                SPLIT=R // 2,
                TRANSPOSE=transpose,
                HEADS=FLAT_HEADS,
                ROWS=rows,
                TILE=TILE,
                num_warps=NUM_WARPS,
            )
            return
        rows = max(1, TILE // block)
        self.launch = Launch(
            rope_kernel,
            (groups * cdiv(B * T, rows),),
            **numbers,
            R=R,
            D=D,
            INTERLEAVED=interleaved,
            TRANSPOSE=transpose,
            PARTS=parts,
            HEADS=HEADS,
            ROWS=rows,
            BLOCK=block,
            BLOCK_PASS=next_power_of_2(max(D - R, 1)),
            num_warps=NUM_WARPS,
        )


_plan = functools.lru_cache(maxsize=1 << 12)(_Plan)


def rope(q, k, cos, sin, layout, transpose, amax=None):
    """Launch the rotation or its transpose; returns new q and k whose outer dimensions lie in memory as ordered.

    q and k are (B, H, T, D) with heads_dim 1 and (B, T, H, D) with heads_dim 2. The number of heads may be 0 in either.
    `layout` is a `RopeLayout`. amax: (2, parts) zeros, or None; the maximum of a row is then that of a result's
    magnitudes.
    """
    q_order, k_order, heads_dim, interleaved = layout
    q, k, cos, sin = _unit_last(q), _unit_last(k), _unit_last(cos), _unit_last(sin)
    plan = _plan(
        (q.shape, q.stride(), tuple(q_order)),
        (k.shape, k.stride(), tuple(k_order)),
        (cos.shape, cos.stride()),
        (sin.shape, sin.stride()),
        heads_dim,
        interleaved,
        transpose,
        0 if amax is None else amax.shape[-1],
    )
    y_q, y_k = q.new_empty_strided(q.shape, plan.q_out), k.new_empty_strided(k.shape, plan.k_out)
    if not plan.empty:
        found = {} if plan.flat else {"AMAX": None if amax is None else amax.view(torch.int32)}
        plan.launch(q, Q=q, K=k, Cos=cos, Sin=sin, YQ=y_q, YK=y_k, **found)
    return y_q, y_k
