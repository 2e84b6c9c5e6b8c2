"""The products of the exponentials E that `linear_cross_entropy.py` writes: dX = f ⊙ (E W) + c ⊙ W[y], and dW's labels.

f and c are factors per row. The label's own term is added in fp32, because E lacks it.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels import _launch
from tigon.kernels._launch import cdiv, launch, launch_by_triton
from tigon.kernels._logits import tile_at
from tigon.kernels._math import INTERPRETED

# C rows (tokens of a chunk), V columns (vocabulary), H hidden.

# Row tiles of dX that share the tiles of W: 8 by 16 tiles are in work at once.
_GROUP = 8


@triton.jit
def _store_with_label(r, f, c, y, W, dx_desc, at_c, at_h, V, H, stride_w, WIDTH: tl.constexpr):
    """Stores dx = f · r + c · W[y] for the columns from at_h on."""
    cols = at_h + tl.arange(0, WIDTH)
    mask = ((y >= 0) & (y < V))[:, None] & (cols < H)[None, :]
    w = tl.load(W + y[:, None] * stride_w + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dx_desc.store([at_c, at_h], (r * f[:, None] + w * c[:, None]).to(tl.bfloat16))


@triton.jit
def scaled_product_kernel(
    e_desc,  # (C, V)
    w_desc,  # (V, H)
    dx_desc,  # (C, H)
    W,  # (V, H)
    Target,  # (C,)
    Factors,  # (2, N)
    C,
    V,
    H,
    N,
    stride_w,
    group_tiles,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """dX = f ⊙ (E W) + c ⊙ W[y], rounded once; each program computes tile after tile as in `exp_logits_kernel`."""
    row_tiles = tl.cdiv(C, BLOCK_C)
    column_tiles = tl.cdiv(H, BLOCK_H)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, group_tiles)
        at_c, at_h = row_tile * BLOCK_C, column_tile * BLOCK_H
        acc = tl.zeros([BLOCK_C, BLOCK_H], dtype=tl.float32)
        for k in range(tl.cdiv(V, BLOCK_V)):
            e = e_desc.load([at_c, k * BLOCK_V])
            w = w_desc.load([k * BLOCK_V, at_h])
            if INTERPRETED:
                acc = tl.dot(e.to(tl.float32), w.to(tl.float32), acc)
            else:
                acc = tl.dot(e, w, acc)
        rows = at_c + tl.arange(0, BLOCK_C)
        y = tl.load(Target + rows, mask=rows < C, other=-1).to(tl.int64)
        f = tl.load(Factors + rows, mask=rows < C, other=0.0)
        c = tl.load(Factors + N + rows, mask=rows < C, other=0.0)
        # In four quarters, so that the labels' rows of W and the staging buffer fit into shared memory together with
        # all stages of the loads.
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_C, 2, BLOCK_H // 2)), (0, 2, 1)))
        a, b = tl.split(tl.permute(tl.reshape(left, (BLOCK_C, 2, BLOCK_H // 4)), (0, 2, 1)))
        _store_with_label(a, f, c, y, W, dx_desc, at_c, at_h, V, H, stride_w, BLOCK_H // 4)
        _store_with_label(b, f, c, y, W, dx_desc, at_c, at_h + BLOCK_H // 4, V, H, stride_w, BLOCK_H // 4)
        a, b = tl.split(tl.permute(tl.reshape(right, (BLOCK_C, 2, BLOCK_H // 4)), (0, 2, 1)))
        _store_with_label(a, f, c, y, W, dx_desc, at_c, at_h + BLOCK_H // 2, V, H, stride_w, BLOCK_H // 4)
        _store_with_label(b, f, c, y, W, dx_desc, at_c, at_h + 3 * BLOCK_H // 4, V, H, stride_w, BLOCK_H // 4)


@triton.jit
def scaled_rows_kernel(P, W, Target, Factors, DX, V, H, N, stride_w, BLOCK: tl.constexpr):
    """dX = f ⊙ P + c ⊙ W[y] of a product P in fp32, one program per row."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(Target + row).to(tl.int64)
    f = tl.load(Factors + row)
    c = tl.load(Factors + N + row)
    valid = (y >= 0) & (y < V)
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < H
        w = tl.load(W + y * stride_w + cols, mask=tl.where(valid, mask, False), other=0.0).to(tl.float32)
        p = tl.load(P + row * H + cols, mask=mask, other=0.0)
        tl.store(DX + row * H + cols, (p * f + w * c).to(tl.bfloat16), mask=mask)


@triton.jit
def _label(Target, rows, mask, V):
    """Labels as int32, -1 if outside [0, V)."""
    y = tl.load(Target + rows, mask=mask, other=-1).to(tl.int64)
    return tl.where((y >= 0) & (y < V), y, -1).to(tl.int32)


@triton.jit
def label_order_kernel(Target, Order, C, V, BLOCK: tl.constexpr, BLOCK_OTHERS: tl.constexpr):
    """Order[p] = the row with the p-th smallest (label, row). A row's place is the number of smaller pairs.

    The C² comparisons take one launch and a hundredth of the time of the products.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    y = _label(Target, rows, rows < C, V)
    smaller = tl.zeros([BLOCK, BLOCK_OTHERS], dtype=tl.int32)
    for start in range(0, C, BLOCK_OTHERS):
        others = start + tl.arange(0, BLOCK_OTHERS)[None, :]
        z = _label(Target, others, others < C, V)
        before = (z < y) | ((z == y) & (others < rows))
        smaller += (before & (others < C)).to(tl.int32)
    place = tl.sum(smaller, axis=1, keep_dims=True)
    tl.store(Order + place, rows, mask=rows < C)


@triton.jit
def label_rows_kernel(
    X, Target, Factors, Order, DW, C, V, H, N, stride_x, stride_dw, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr
):
    """dW[y] += Σ c_i · x_i over the rows i with label y, in the order of rows. The program of the first row adds."""
    p = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    y = _label(Target, tl.load(Order + p), True, V)
    before = _label(Target, tl.load(Order + tl.maximum(p - 1, 0)), True, V)
    first = (p == 0) | (before != y)
    if first & (y >= 0):
        total = tl.zeros([BLOCK_H], dtype=tl.float32)
        more = tl.full([], 1, dtype=tl.int1)
        while more:
            at = p + tl.arange(0, BLOCK_C)
            rows = tl.load(Order + at, mask=at < C, other=0).to(tl.int64)
            same = (at < C) & (_label(Target, rows, at < C, V) == y)
            c = tl.load(Factors + N + rows, mask=same, other=0.0)
            mask = same[:, None] & (cols < H)[None, :]
            x = tl.load(X + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(c[:, None] * x, axis=0)
            p += BLOCK_C
            more = tl.sum(same.to(tl.int32), axis=0) == BLOCK_C
        into = DW + y.to(tl.int64) * stride_dw + cols
        dw = tl.load(into, mask=cols < H, other=0.0).to(tl.float32)
        tl.store(into, (dw + total).to(DW.dtype.element_ty), mask=cols < H)


def suits_scaled_product(rows, hidden, tile, index):
    """Whether `scaled_product` is fast for this size.

    Most multiprocessors need a tile in every turn, because programs do not share the sum over V. Rows of W must start
    at multiples of 16 elements, because other rows take more shared memory for the conversion to the product's layout.
    """
    if hidden % 16:
        return False
    tiles = cdiv(rows, tile.tokens) * cdiv(hidden, tile.vocab)
    programs = _launch.multiprocessors(index)
    return tiles >= 0.75 * programs * cdiv(tiles, programs)


def scaled_product(e_CV, weight_VH, factors, target, tile):
    """f ⊙ (E W) + c ⊙ W[y], (C, H) in bf16. Rows start at multiples of 16 bytes; `factors` is (2, C) fp32."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # Triton 3.4

    (C, V), H = e_CV.shape, weight_VH.shape[1]
    dx_CH = torch.empty((C, H), dtype=e_CV.dtype, device=e_CV.device)
    if not C:
        return dx_CH
    columns = tile.vocab  # the wide side of the tile
    programs = min(_launch.multiprocessors(e_CV.device.index), cdiv(C, tile.tokens) * cdiv(H, columns))
    launch_by_triton(
        scaled_product_kernel, (programs,), e_CV,
        e_desc=TensorDescriptor(e_CV, [C, V], [e_CV.stride(0), 1], [tile.tokens, tile.hidden]),
        w_desc=TensorDescriptor(weight_VH, [V, H], [weight_VH.stride(0), 1], [tile.hidden, columns]),
        dx_desc=TensorDescriptor(dx_CH, [C, H], [H, 1], [tile.tokens, columns // 4]),
        W=weight_VH, Target=target, Factors=factors, C=C, V=V, H=H, N=C, stride_w=weight_VH.stride(0),
        group_tiles=_GROUP, BLOCK_C=tile.tokens, BLOCK_H=columns, BLOCK_V=tile.hidden, PROGRAMS=programs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dx_CH


def scaled_rows(product_CH, weight_VH, factors, target):
    """f ⊙ P + c ⊙ W[y], (C, H) in bf16, of a product P that is already computed in fp32."""
    (C, H), V = product_CH.shape, weight_VH.shape[0]
    dx_CH = torch.empty((C, H), dtype=weight_VH.dtype, device=product_CH.device)
    if C:
        launch(
            scaled_rows_kernel,
            (C,),
            product_CH,
            P=product_CH,
            W=weight_VH,
            Target=target,
            Factors=factors,
            DX=dx_CH,
            V=V,
            H=H,
            N=C,
            stride_w=weight_VH.stride(0),
            BLOCK=1024,
            num_warps=4,
        )
    return dx_CH


def add_label_rows(x_CH, target, factors, dw_VH):
    """dw[target[i]] += c_i · x[i], summed in fp32 in the order of rows, so that runs repeat bit for bit.

    Labels outside [0, V) add nothing. `factors` is (2, C) fp32; the rows of x and dw have unit stride.
    """
    (C, H), V = x_CH.shape, dw_VH.shape[0]
    if not C:
        return
    order = torch.empty(C, dtype=torch.int32, device=x_CH.device)
    block = 1024
    launch(
        label_order_kernel,
        (cdiv(C, 32),),
        x_CH,
        Target=target,
        Order=order,
        C=C,
        V=V,
        BLOCK=32,
        BLOCK_OTHERS=128,
        num_warps=4,
    )
    launch(
        label_rows_kernel,
        (C, cdiv(H, block)),
        x_CH,
        X=x_CH,
        Target=target,
        Factors=factors,
        Order=order,
        DW=dw_VH,
        C=C,
        V=V,
        H=H,
        N=C,
        stride_x=x_CH.stride(0),
        stride_dw=dw_VH.stride(0),
        BLOCK_C=4,
        BLOCK_H=block,
        num_warps=4,
    )
