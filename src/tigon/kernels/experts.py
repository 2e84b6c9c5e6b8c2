"""The experts of a mixture: products of token-slots that are sorted by expert, and the gated unit between two products.

A slot is one of the K choices of a token; slot s belongs to token s // K. The S = T · K slots are sorted by expert. The
rows of expert e are Offsets[e] to Offsets[e + 1]. Order[m] is the slot of sorted row m. Slots whose expert is not in
0 ... E - 1 lie outside all these ranges, and no kernel reads their rows.

    grouped product     y_m = W_e x_m + b_e + B_e h_m   x gathered by token, or y scattered to its slot
    weight gradient     dW_e = Σ_m a_m b_mᵀ             one tile of one expert per program, over its sorted rows
    bias gradient       db_e = Σ_m w_m x_m
    combine             y_t = Σ_k w_tk z_tk

Rows are not padded to a capacity, kernels do not wait for the host, and sums do not use atomics. Each tile has one
accumulator in fp32 with one `tl.dot` per step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tigon.kernels import _launch, chips
from tigon.kernels._launch import cdiv, launch, next_power_of_2
from tigon.kernels._math import INTERPRETED
from tigon.kernels.glu import activation

ROW_BLOCK = 1024
NARROW = 64  # the most rows or columns of a product that a tile of its own serves: an adapter's rank


@triton.jit
def _multiply(a, b, acc):
    """acc + a @ b with fp32 accumulation; fp32 factors keep all their bits."""
    if INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    if a.dtype == tl.float32:
        # One sum of thousands of terms had 3 times the error of the vendor's product, so each step has its own sum.
        # The last argument means nothing here, but without it Triton would join the addition and the dot.
        return acc + tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=1)
    return tl.dot(a, b, acc)


@triton.jit
def _in_bands(at, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) number `at` if bands of GROUP row tiles are visited column by column."""
    first = at // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    at -= first * column_tiles
    return first + at % height, at // height


@triton.jit
def grouped_product_kernel(
    X,  # (T, K) or (S, K)
    W,  # (E, N, K)
    Bias,  # (E, N) or None
    Low,  # (S, R) or None
    LowWeight,  # (E, N, R) or None
    Order,  # (S,)
    Offsets,  # (E + 1,)
    Y,  # (S, N)
    N,
    K,
    R,
    E,
    top_k,
    stride_x,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    stride_bn,
    stride_br,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LOW: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """y of sorted row m, from x of its token (GATHER) or x's row m, to the row of its slot (SCATTER) or to row m.

    Tiles are visited in bands of GROUP row tiles, column by column, so that the programs of one moment share
    their rows of x and their columns of W in L2.

    Low and LowWeight are the sorted rows h (S, R) of an adapter and its B (E, N, R). Their product starts from the
    weight's sum: a pass of its own would read and write y once more.
    """
    experts = tl.arange(0, BLOCK_E)
    firsts = tl.load(Offsets + experts, mask=experts < E, other=0)
    ends = tl.load(Offsets + experts + 1, mask=experts < E, other=0)
    tiles = tl.cdiv(ends - firsts, BLOCK_M)
    tile_ends = tl.cumsum(tiles, axis=0)
    column_tiles = tl.cdiv(N, BLOCK_N)
    for at in range(tl.program_id(0), tl.sum(tiles, axis=0) * column_tiles, PROGRAMS):
        expert = tl.sum((tile_ends <= at // column_tiles).to(tl.int32), axis=0)
        chosen = experts == expert
        row_tiles = tl.sum(tl.where(chosen, tiles, 0), axis=0)
        within = at - tl.sum(tl.where(chosen, tile_ends - tiles, 0), axis=0) * column_tiles
        row_tile, column_tile = _in_bands(within, row_tiles, column_tiles, GROUP)
        first = tl.sum(tl.where(chosen, firsts, 0), axis=0) + row_tile * BLOCK_M
        end = tl.sum(tl.where(chosen, ends, 0), axis=0)
        rows = first + tl.arange(0, BLOCK_M)
        cols = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = rows < end
        slots = tl.load(Order + rows, mask=inside, other=0).to(tl.int64) if GATHER or SCATTER else rows.to(tl.int64)
        from_rows = slots // top_k if GATHER else rows.to(tl.int64)
        w_base = W + expert.to(tl.int64) * stride_we
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            ks = k + tl.arange(0, BLOCK_K)
            x_at = X + from_rows[:, None] * stride_x + ks[None, :]
            x = tl.load(x_at, mask=inside[:, None] & (ks < K)[None, :], other=0.0)
            w_at = w_base + ks.to(tl.int64)[:, None] * stride_wk + cols.to(tl.int64)[None, :] * stride_wn
            w = tl.load(w_at, mask=(ks < K)[:, None] & (cols < N)[None, :], other=0.0)
            acc = _multiply(x, w, acc)
        if HAS_LOW:
            b_base = LowWeight + expert.to(tl.int64) * stride_be
            for r in tl.range(0, R, BLOCK_R, num_stages=1):
                rs = r + tl.arange(0, BLOCK_R)
                h_at = Low + rows.to(tl.int64)[:, None] * R + rs[None, :]
                h = tl.load(h_at, mask=inside[:, None] & (rs < R)[None, :], other=0.0)
                b_at = b_base + rs[:, None] * stride_br + cols.to(tl.int64)[None, :] * stride_bn
                b = tl.load(b_at, mask=(rs < R)[:, None] & (cols < N)[None, :], other=0.0)
                acc = _multiply(h, b, acc)
        if HAS_BIAS:
            acc += tl.load(Bias + expert.to(tl.int64) * N + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        to_rows = slots if SCATTER else rows.to(tl.int64)
        y_at = Y + to_rows[:, None] * N + cols[None, :]
        tl.store(y_at, acc.to(Y.dtype.element_ty), mask=inside[:, None] & (cols < N)[None, :])


@triton.jit
def grouped_weight_gradient_kernel(
    A,  # (S, P)
    B,  # (S, Q)
    Offsets,  # (E + 1,)
    DW,  # (E, P, Q)
    P,
    Q,
    stride_a,
    stride_b,
    stride_e,
    stride_p,
    stride_q,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of dW_e; zero for an expert without rows.

    Both factors are sorted rows. Gathering them here would load an address in each step, and the loads that wait for it
    would wait for every copy that is on its way: half of the rate.
    """
    p_tiles, q_tiles = tl.cdiv(P, BLOCK_P), tl.cdiv(Q, BLOCK_Q)
    expert = tl.program_id(0) // (p_tiles * q_tiles)
    p_tile, q_tile = _in_bands(tl.program_id(0) % (p_tiles * q_tiles), p_tiles, q_tiles, GROUP)
    ps = p_tile * BLOCK_P + tl.arange(0, BLOCK_P)
    qs = q_tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    end = tl.load(Offsets + expert + 1)
    acc = tl.zeros([BLOCK_P, BLOCK_Q], dtype=tl.float32)
    for start in tl.range(tl.load(Offsets + expert), end, BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        inside = (rows < end)[:, None]
        rows = rows.to(tl.int64)[:, None]
        a = tl.load(A + rows * stride_a + ps[None, :], mask=inside & (ps < P)[None, :], other=0.0)
        b = tl.load(B + rows * stride_b + qs[None, :], mask=inside & (qs < Q)[None, :], other=0.0)
        acc = _multiply(tl.trans(a), b, acc)
    at = expert.to(tl.int64) * stride_e + ps.to(tl.int64)[:, None] * stride_p + qs.to(tl.int64)[None, :] * stride_q
    tl.store(DW + at, acc.to(DW.dtype.element_ty), mask=(ps < P)[:, None] & (qs < Q)[None, :])


@triton.jit
def grouped_sum_kernel(
    X,  # (T, N) or (S, N)
    Weight,  # (S,) or None
    Order,  # (S,)
    Offsets,  # (E + 1,)
    DB,  # (E, N)
    N,
    top_k,
    stride_x,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles = tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // tiles
    cols = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(Offsets + expert + 1)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(tl.load(Offsets + expert), end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        inside = rows < end
        from_rows = rows.to(tl.int64)
        slots = from_rows
        if GATHER or WEIGHTED:
            slots = tl.load(Order + rows, mask=inside, other=0).to(tl.int64)
        if GATHER:
            from_rows = slots // top_k
        x_at = X + from_rows[:, None] * stride_x + cols[None, :]
        x = tl.load(x_at, mask=inside[:, None] & (cols < N)[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            x *= tl.load(Weight + slots, mask=inside, other=0.0)[:, None]
        total += x
    sums = tl.sum(total, axis=0)
    tl.store(DB + expert.to(tl.int64) * N + cols, sums.to(DB.dtype.element_ty), mask=cols < N)


@triton.jit
def combine_kernel(Z, Weight, Expert, Y, H, E, top_k, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    tiles = tl.cdiv(H, BLOCK)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    cols = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(top_k):
        slot = token * top_k + k
        expert = tl.load(Expert + slot)
        there = (expert >= 0) & (expert < E)
        z = tl.load(Z + slot * H + cols, mask=tl.where(there, cols < H, False), other=0.0).to(tl.float32)
        if WEIGHTED:
            z *= tl.load(Weight + slot)
        total += z
    tl.store(Y + token * H + cols, total.to(Y.dtype.element_ty), mask=cols < H)


@triton.jit
def _load_halves(Row, j, F, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """gate and up of one row in fp32, at columns j to j + BLOCK."""
    if INTERLEAVED:
        cols = 2 * j + tl.arange(0, 2 * BLOCK)
        both = tl.load(Row + cols, mask=cols < 2 * F, other=0.0).to(tl.float32)
        g, u = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        cols = j + tl.arange(0, BLOCK)
        g = tl.load(Row + cols, mask=cols < F, other=0.0).to(tl.float32)
        u = tl.load(Row + F + cols, mask=cols < F, other=0.0).to(tl.float32)
    return g, u


@triton.jit
def _unit(g, u, alpha, limit, up_offset, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr):
    """f(g), df/dg, u + offset, and du of the clamped u, each 0 where a clamp cuts."""
    dg_cut = g <= limit if LIMITED else g == g
    du_cut = (u >= -limit) & (u <= limit) if LIMITED else u == u
    if LIMITED:
        # a comparison keeps NaN, which tl.minimum would drop
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    f, df = activation(g, alpha, ACTIVATION)
    return f, tl.where(dg_cut, df, 0.0), u + up_offset, tl.where(du_cut, 1.0, 0.0)


@triton.jit
def unit_fwd_kernel(
    Pre,  # (S, 2F)
    Y,  # (S, F)
    F,
    alpha,
    limit,
    up_offset,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    j = tl.program_id(0) % tiles * BLOCK
    g, u = _load_halves(Pre + row * 2 * F, j, F, INTERLEAVED, BLOCK)
    f, _, u, _ = _unit(g, u, alpha, limit, up_offset, ACTIVATION, LIMITED)
    cols = j + tl.arange(0, BLOCK)
    tl.store(Y + row * F + cols, (f * u).to(Y.dtype.element_ty), mask=cols < F)


@triton.jit
def unit_bwd_kernel(
    Pre,  # (S, 2F)
    DA,  # (S, F)
    Weight,  # (S,) or None
    Order,  # (S,)
    Offsets,  # (E + 1,)
    DPre,  # (S, 2F)
    WY,  # (S, F)
    DWeight,  # (S,)
    F,
    E,
    alpha,
    limit,
    up_offset,
    WANT_DPRE: tl.constexpr,
    WANT_WY: tl.constexpr,
    WANT_DWEIGHT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One sorted row: dpre, w · y, and dw = <da, y>. A slot without an expert has dw = 0."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(Order + row).to(tl.int64)
    weight = tl.load(Weight + slot)
    there = (row >= tl.load(Offsets)) & (row < tl.load(Offsets + E))
    width = tl.where(there, F, 0)
    dot = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(0, width, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        g, u = _load_halves(Pre + row * 2 * F, j, F, INTERLEAVED, BLOCK)
        f, df, u, du = _unit(g, u, alpha, limit, up_offset, ACTIVATION, LIMITED)
        if WANT_WY:
            tl.store(WY + row * F + cols, (weight * f * u).to(WY.dtype.element_ty), mask=cols < F)
        if WANT_DPRE or WANT_DWEIGHT:
            da = tl.load(DA + row * F + cols, mask=cols < F, other=0.0).to(tl.float32)
        if WANT_DWEIGHT:
            dot += da * f * u
        if WANT_DPRE:
            dy = weight * da
            dg, du = (dy * u * df).to(DPre.dtype.element_ty), (dy * f * du).to(DPre.dtype.element_ty)
            if INTERLEAVED:
                both = 2 * j + tl.arange(0, 2 * BLOCK)
                tl.store(DPre + row * 2 * F + both, tl.reshape(tl.join(dg, du), (2 * BLOCK,)), mask=both < 2 * F)
            else:
                tl.store(DPre + row * 2 * F + cols, dg, mask=cols < F)
                tl.store(DPre + row * 2 * F + F + cols, du, mask=cols < F)
    if WANT_DWEIGHT:
        tl.store(DWeight + slot, tl.sum(dot, axis=0))


class Tile(NamedTuple):
    """The tile of a product: rows (or left columns) and columns of the result, elements of one step of the sum."""

    rows: int
    columns: int
    steps: int
    warps: int
    stages: int = 3
    group: int = 8


def _tile(x, columns, rows=None, low=False):
    """The tile of a product with x. low: whether it adds an adapter's product.

    columns, rows: of the result; rows are None if they are slots. A result as narrow as an adapter's rank has a tile as
    narrow. Such a product waits for memory, not for arithmetic.
    """
    if INTERPRETED.value:
        return Tile(16, 16, 16, warps=4, group=2)
    shared_bytes = _launch.shared_bytes(x.device.index)
    thin_rows = rows is not None and rows <= NARROW
    if thin_rows or columns <= NARROW:
        wide, steps = (64, 32) if x.dtype is torch.float32 or shared_bytes <= 64 << 10 else (128, 64)
        if low:  # Triton 3.6, sm_90: with steps of 64 for K and 32 for R, wgmma reads behind the shared memory
            steps = 32
        narrow = max(next_power_of_2(rows if thin_rows else columns), 16)
        # A step of 64 rows that are read element by element, as those of rank 3 are, spills registers.
        return Tile(narrow, wide, 32, warps=4) if thin_rows else Tile(wide, narrow, steps, warps=4)
    # NVIDIA's Turing and AMD's Radeon spill registers with larger tiles.
    if shared_bytes <= 64 << 10 and _launch.lanes() == 32:
        return Tile(64, 64, 32, warps=8)
    if x.dtype is torch.float32:
        return Tile(64, 64, 32, warps=8 if low else 4)  # with 4 warps the adapter's factors spill registers
    chip = chips.chip(x.device.index)
    # Three stages of the wide tile take 147 KB. It reads a quarter less per FLOP than the square one.
    return Tile(128, 256, 64, warps=8) if chip is not None and chip.wide_expert_tiles else Tile(128, 128, 64, warps=8)


def _warps(block):
    """Eight elements of a row for each lane of AMD's warps, so that 16-bit rows are loaded 16 bytes at a time."""
    return max(block // 512, 1)


def _rows(x):
    """x with unit stride along its last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(x):
    """x (or None) with its elements one after the other."""
    return x if x is None else x.contiguous()


def grouped_product(x, weight, bias, low, low_weight, order, offsets, top_k, gather, scatter):
    """Launch the product; weight (E, N, K) and low_weight (E, N, R) have any strides. Returns (S, N)."""
    x, S, (E, N, K) = _rows(x), order.shape[0], weight.shape
    y = x.new_empty((S, N))
    if y.numel():
        tile = _tile(x, N, low=low is not None)
        most = (cdiv(S, tile.rows) + min(E, S)) * cdiv(N, tile.columns)
        programs = min(most, _launch.multiprocessors(x.device.index) * 2)
        rank = 0 if low is None else low_weight.shape[2]
        low_strides = (0, 0, 0) if low is None else low_weight.stride()
        launch(
            grouped_product_kernel, (programs,), x, num_warps=tile.warps,
            X=x, W=weight, Bias=_dense(bias), Low=_dense(low), LowWeight=low_weight, Order=order, Offsets=offsets, Y=y,
            N=N, K=K, R=rank, E=E, top_k=top_k, stride_x=x.stride(0), stride_we=weight.stride(0),
            stride_wn=weight.stride(1), stride_wk=weight.stride(2), stride_be=low_strides[0], stride_bn=low_strides[1],
            stride_br=low_strides[2], GATHER=gather, SCATTER=scatter, HAS_BIAS=bias is not None,
            HAS_LOW=low is not None, BLOCK_E=next_power_of_2(E),
            BLOCK_R=min(next_power_of_2(max(rank, 16)), tile.steps), BLOCK_M=tile.rows, BLOCK_N=tile.columns,
            BLOCK_K=tile.steps, GROUP=tile.group, STAGES=tile.stages, PROGRAMS=programs,
        )  # fmt: skip
    return y


def grouped_weight_gradient(a, b, offsets, weight):
    """Launch the weight gradient, in the shape, strides and dtype of `weight`."""
    a, b, dw = _rows(a), _rows(b), torch.empty_like(weight)
    E, P, Q = dw.shape
    if dw.numel():
        tile = _tile(a, Q, rows=P)
        tiles = E * cdiv(P, tile.rows) * cdiv(Q, tile.columns)
        launch(
            grouped_weight_gradient_kernel, (tiles,), a, num_warps=tile.warps,
            A=a, B=b, Offsets=offsets, DW=dw, P=P, Q=Q, stride_a=a.stride(0), stride_b=b.stride(0),
            stride_e=dw.stride(0), stride_p=dw.stride(1), stride_q=dw.stride(2), BLOCK_P=tile.rows,
            BLOCK_Q=tile.columns, BLOCK_M=tile.steps, GROUP=tile.group, STAGES=tile.stages,
        )  # fmt: skip
    return dw


def grouped_sum(x, weights, order, offsets, top_k, gather):
    """Launch the sum of each expert's rows, times their weights if there are any. Returns (E, N)."""
    x, E = _rows(x), offsets.shape[0] - 1
    sums = x.new_empty((E, x.shape[1]))
    if sums.numel():
        block = min(next_power_of_2(x.shape[1]), 128)
        launch(
            grouped_sum_kernel,
            (E * cdiv(x.shape[1], block),),
            x,
            num_warps=4,
            X=x,
            Weight=_dense(weights),
            Order=order,
            Offsets=offsets,
            DB=sums,
            N=x.shape[1],
            top_k=top_k,
            stride_x=x.stride(0),
            GATHER=gather,
            WEIGHTED=weights is not None,
            BLOCK_M=32,
            BLOCK_N=block,
        )
    return sums


def combine(z, weights, experts, number_of_experts):
    """Launch the sum over the slots of each token. Returns (T, H)."""
    (T, top_k), H = experts.shape, z.shape[1]
    y = z.new_empty((T, H))
    if y.numel():
        block = min(next_power_of_2(H), ROW_BLOCK)
        launch(
            combine_kernel,
            (T * cdiv(H, block),),
            z,
            num_warps=_warps(block),
            Z=z,
            Weight=_dense(weights),
            Expert=_dense(experts),
            Y=y,
            H=H,
            E=number_of_experts,
            top_k=top_k,
            WEIGHTED=weights is not None,
            BLOCK=block,
        )
    return y


def unit_fwd(pre, activation, alpha, limit, up_offset, interleaved):
    """Launch the gated unit of (S, 2F). Returns (S, F)."""
    S, F = pre.shape[0], pre.shape[1] // 2
    y = pre.new_empty((S, F))
    if y.numel():
        block = min(next_power_of_2(F), ROW_BLOCK)
        launch(
            unit_fwd_kernel,
            (S * cdiv(F, block),),
            pre,
            num_warps=_warps(block),
            Pre=pre,
            Y=y,
            F=F,
            alpha=float(alpha),
            limit=float(limit),
            up_offset=float(up_offset),
            ACTIVATION=activation,
            LIMITED=limit != float("inf"),
            INTERLEAVED=interleaved,
            BLOCK=block,
        )
    return y


def unit_bwd(
    pre, da, weights, order, offsets, activation, alpha, limit, up_offset, interleaved, want_dpre, want_wy, want_dweight
):
    """Launch the unit's backward. Returns (dpre, w · y, dweights by slot), each empty where not wanted."""
    S, F = pre.shape[0], pre.shape[1] // 2
    dpre = pre.new_empty(pre.shape if want_dpre else (0,))
    wy = pre.new_empty((S, F) if want_wy else (0,))
    dweights = weights.new_empty((S,) if want_dweight else (0,))
    if S:
        block = min(next_power_of_2(F), ROW_BLOCK)
        launch(
            unit_bwd_kernel, (S,), pre, num_warps=_warps(block),
            Pre=pre, DA=da, Weight=_dense(weights), Order=order, Offsets=offsets, DPre=dpre, WY=wy, DWeight=dweights,
            F=F, E=offsets.shape[0] - 1, alpha=float(alpha), limit=float(limit), up_offset=float(up_offset),
            WANT_DPRE=want_dpre, WANT_WY=want_wy, WANT_DWEIGHT=want_dweight, ACTIVATION=activation,
            LIMITED=limit != float("inf"), INTERLEAVED=interleaved, BLOCK=block,
        )  # fmt: skip
    return dpre, wy, dweights
