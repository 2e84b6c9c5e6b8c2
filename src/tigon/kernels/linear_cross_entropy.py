"""A matrix product that writes logits as exponentials, so that no softmax pass follows.

For a token with hidden state x, label y and the label's logit z_y (the shift, z_y · log2 e, needs one row of W_head):

    E_v = 2^(z_v · log2 e - shift - 64) · slope_v for v != y,   0 for v = y     written by the product's epilogue
    s   = e_y + Σ_v E_v / slope_v,   e_y = 2^-64                                summed per column tile

    l   = a · [ w · log(s / e_y) + λ · lse² ]                                   lse = z_y + log(s / e_y)

    dz  = f · E + c · 1[v = y],   f = a · W / s,   c = a · [ (W - w) · e_y - w · (s - e_y) ] / s · slope_y

a: token weight, w: class weight of y, λ: z-loss, W = w + 2λ · lse, slope: dz over the raw logit. The gradients are

    dX = f ⊙ (E W_head) + c ⊙ W_head[y]       dW = Eᵀ (f ⊙ X) + Σ_i c_i · x_i in row y_i

X and dX are multiplied by the row's normaliser f, because they are V / H times smaller than E. The label's own term is
kept out of E, in fp32. It is most of a gradient's norm while a model is unsure. The unfused op has it exactly (-1 + p
rounds to -1), but f ⊙ X would round it. The shift is the label's logit, because that is known before the product. z_v
is the fp32 accumulator, which the unfused op rounds to bf16 first.

E excludes the label. So 1 - p_y = Σ_v E_v / s and the loss keep their relative precision for a confident token. The
factor 2^-64 puts the label into the middle of bf16's range. A logit 99 above the label's would exceed this range. The
row (a loss above 99 nats) is then computed again on its own, with its maximum as the shift.

E needs the exponent range of bf16; fp16 does not suffice.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels import _launch
from tigon.kernels._launch import cdiv, launch, launch_by_triton
from tigon.kernels._logits import LOG2E, row_weights, squash, tile_at
from tigon.kernels._math import INTERPRETED

# C rows (tokens of a chunk), V columns (vocabulary), H hidden, P column tiles.

OFFSET = tl.constexpr(64.0)
# A row with a larger sum is computed again, because E · W and f must stay far from the ends of bf16's range.
LARGEST_SUM = tl.constexpr(2.0**80)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def label_logit_kernel(
    X,  # (C, H)
    W,  # (V, H)
    Bias,  # (V,) or None
    Target,  # (C,)
    ZY,  # (C,)
    Shift,  # (C,)
    Slope,  # (C,)
    V,
    H,
    stride_x,
    stride_w,
    ignore_index,
    softcap,
    scale,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """z_y and the shift, one program per row. A row without a valid label has shift +inf, so that all its E are 0."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(Target + row).to(tl.int64)
    counts = (y != ignore_index) & (y >= 0) & (y < V)
    y = tl.where(counts, y, 0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * stride_x + cols, mask=cols < H, other=0.0).to(tl.float32)
        w = tl.load(W + y * stride_w + cols, mask=cols < H, other=0.0).to(tl.float32)
        total += x * w
    r = tl.sum(total, axis=0)
    if HAS_BIAS:
        r += tl.load(Bias + y).to(tl.float32)
    z, slope = squash(r, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    if HAS_SOFTCAP:
        tl.store(Slope + row, slope)
    finite = tl.where(tl.abs(z) < float("inf"), z, 0.0)
    tl.store(ZY + row, tl.where(counts, z, 0.0))
    tl.store(Shift + row, tl.where(counts, finite * LOG2E + OFFSET, float("inf")))


@triton.jit
def _write_half(
    r,
    e_desc,  # (C, V)
    Bias,  # (V,) or None
    at_c,
    at_v,
    y,
    shift,
    V,
    softcap,
    scale,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    STORE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes E (if STORE) of the raw logits from column `at_v` on; returns its row sums."""
    cols = at_v + tl.arange(0, WIDTH)
    if HAS_BIAS:
        r += tl.load(Bias + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
    z, slope = squash(r, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    e = tl.exp2(z * LOG2E - shift[:, None])
    e = tl.where((cols[None, :] < V) & (cols[None, :] != y[:, None]), e, 0.0)
    if STORE:
        e_desc.store([at_c, at_v], (e * slope if HAS_SOFTCAP else e).to(tl.bfloat16))
    return tl.sum(e, axis=1)


@triton.jit
def exp_logits_kernel(
    x_desc,  # (C, H)
    w_desc,  # (V, H)
    e_desc,  # (C, V)
    Bias,  # (V,) or None
    Target,  # (C,)
    Shift,  # (C,)
    Partial,  # (C, P)
    C,
    V,
    H,
    P,
    group_tiles,
    softcap,
    scale,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Writes E (if STORE) and its sums over column tiles.

    The grid has as many programs as run at once. Each computes tile after tile, so that the loads of a tile begin
    during the epilogue of the tile before it.
    """
    row_tiles = tl.cdiv(C, BLOCK_C)
    column_tiles = tl.cdiv(V, BLOCK_V)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, group_tiles)
        at_c, at_v = row_tile * BLOCK_C, column_tile * BLOCK_V
        acc = tl.zeros([BLOCK_C, BLOCK_V], dtype=tl.float32)
        for k in range(tl.cdiv(H, BLOCK_H)):
            x = x_desc.load([at_c, k * BLOCK_H])
            w = w_desc.load([at_v, k * BLOCK_H])
            if INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
                acc = tl.dot(x.to(tl.float32), w.T.to(tl.float32), acc)
            else:
                acc = tl.dot(x, w.T, acc)
        rows = at_c + tl.arange(0, BLOCK_C)
        shift = tl.load(Shift + rows, mask=rows < C, other=float("inf"))
        y = tl.load(Target + rows, mask=rows < C, other=-1).to(tl.int32)
        # In two halves, because the exponentials and slopes of a whole tile would spill registers, and its staging
        # buffer would take the shared memory of one stage.
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_C, 2, BLOCK_V // 2)), (0, 2, 1)))
        total = _write_half(
            left,
            e_desc,
            Bias,
            at_c,
            at_v,
            y,
            shift,
            V,
            softcap,
            scale,
            HAS_BIAS,
            HAS_SOFTCAP,
            HAS_SCALE,
            STORE,
            BLOCK_V // 2,
        )
        total += _write_half(
            right,
            e_desc,
            Bias,
            at_c,
            at_v + BLOCK_V // 2,
            y,
            shift,
            V,
            softcap,
            scale,
            HAS_BIAS,
            HAS_SOFTCAP,
            HAS_SCALE,
            STORE,
            BLOCK_V // 2,
        )
        tl.store(Partial + rows.to(tl.int64) * P + column_tile, total, mask=rows < C)


@triton.jit
def _logits_again(
    X,  # (C, H)
    W,  # (V, H)
    Bias,  # (V,) or None
    row,
    cols,
    V,
    H,
    stride_x,
    stride_w,
    softcap,
    scale,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(z, dz/dr) of one row at `cols`, computed again; z is -inf past the vocabulary."""
    r = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, H, 64):
        h = start + tl.arange(0, 64)
        x = tl.load(X + row * stride_x + h, mask=h < H, other=0.0).to(tl.float32)
        at = cols.to(tl.int64)[:, None] * stride_w + h[None, :]
        w = tl.load(W + at, mask=(cols < V)[:, None] & (h < H)[None, :], other=0.0).to(tl.float32)
        r += tl.sum(w * x[None, :], axis=1)
    if HAS_BIAS:
        r += tl.load(Bias + cols, mask=cols < V, other=0.0).to(tl.float32)
    z, slope = squash(r, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    return tl.where(cols < V, z, -float("inf")), slope


@triton.jit
def row_factors_kernel(
    X,  # (C, H)
    W,  # (V, H)
    Bias,  # (V,) or None
    Target,  # (C,)
    ClassWeight,  # (V,) or None
    TokenWeight,  # (C,) or None
    GradScale,  # ()
    ZY,  # (C,)
    Slope,  # (C,)
    Partial,  # (C, P)
    E,  # (C, V)
    Loss,  # (C,)
    Stats,  # (3, N)
    Factors,  # (2, N)
    C,
    V,
    H,
    P,
    N,
    stride_x,
    stride_w,
    stride_e,
    ignore_index,
    softcap,
    scale,
    z_loss,
    HAS_BIAS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_TOKEN_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WANT_GRAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss, statistics, f and c, one program per row. Stats (3, N) holds m, log s and z_y; Factors (2, N) f and c."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(Target + row).to(tl.int64)
    ignored = y == ignore_index
    valid = (y >= 0) & (y < V)
    lanes = tl.zeros([BLOCK_P], dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        tiles = start + tl.arange(0, BLOCK_P)
        lanes += tl.load(Partial + row * P + tiles, mask=tiles < P, other=0.0)
    others = tl.sum(lanes, axis=0)
    z_y = tl.load(ZY + row)
    m = tl.where(tl.abs(z_y) < float("inf"), z_y, 0.0)
    e_y = tl.exp2((z_y - m) * LOG2E - OFFSET)
    if (others > LARGEST_SUM) & valid:
        top = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            z, _ = _logits_again(
                X,
                W,
                Bias,
                row,
                start + tl.arange(0, BLOCK),
                V,
                H,
                stride_x,
                stride_w,
                softcap,
                scale,
                HAS_BIAS,
                HAS_SOFTCAP,
                HAS_SCALE,
                BLOCK,
            )
            top = tl.maximum(top, z)
        m = tl.max(top, axis=0)
        e_y = tl.exp2((z_y - m) * LOG2E - OFFSET)
        again = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z, slope = _logits_again(
                X,
                W,
                Bias,
                row,
                cols,
                V,
                H,
                stride_x,
                stride_w,
                softcap,
                scale,
                HAS_BIAS,
                HAS_SOFTCAP,
                HAS_SCALE,
                BLOCK,
            )
            e = tl.where(cols == y, 0.0, tl.exp2((z - m) * LOG2E - OFFSET))
            again += e
            if WANT_GRAD:
                if HAS_SOFTCAP:
                    e *= slope
                tl.store(E + row * stride_e + cols, e.to(tl.bfloat16), mask=cols < V)
        others = tl.sum(again, axis=0)
        tl.debug_barrier()
    s = e_y + others
    # s · 2^64 is exact as long as fp32 can hold it, and log1p's series below keeps a small sum's precision.
    log_s = tl.where(s < 2.0**60, tl.log(s * 2.0**64), tl.log(s) + OFFSET * LN2)
    small = others * 2.0**64
    confident = (z_y == m) & (small < 1e-3)
    log_s = tl.where(confident, small * (1.0 - small * (0.5 - small * 0.3333333333)), log_s)
    lse = m + log_s
    w_y, a = row_weights(row, y, valid, ClassWeight, TokenWeight, HAS_CLASS_WEIGHT, HAS_TOKEN_WEIGHT)
    loss = w_y * ((m - z_y) + log_s)
    on_p = w_y
    if HAS_Z_LOSS:
        loss += z_loss * lse * lse
        on_p += 2.0 * z_loss * lse
    tl.store(Loss + row, tl.where(ignored, 0.0, a * loss))
    tl.store(Stats + row, tl.where(ignored, 0.0, m))
    tl.store(Stats + N + row, tl.where(ignored, 0.0, log_s))
    tl.store(Stats + 2 * N + row, tl.where(ignored, 0.0, z_y))
    if WANT_GRAD:
        factor = a * tl.load(GradScale)
        # This is p_y · W - w_y in a form that does not cancel.
        c = factor * ((on_p - w_y) * e_y - w_y * others) / s
        f = factor * (on_p / s)
        if HAS_SOFTCAP:
            c *= tl.load(Slope + row)
        elif HAS_SCALE:
            c *= scale
            f *= scale
        tl.store(Factors + row, tl.where(ignored, 0.0, f))
        tl.store(Factors + N + row, tl.where(ignored, 0.0, c))


def _rows_in_l2(rows, row_bytes, tile):
    """Row tiles per group: as many as stay in L2, in groups of equal size."""
    tiles = cdiv(rows, tile.tokens)
    return cdiv(tiles, cdiv(tiles * tile.tokens * row_bytes, tile.group_bytes))


def exp_logits(head, labels, options, tile, e_CV):
    """(loss (C,), stats (3, C), factors (2, C)) in fp32 of bf16 hidden and weight; E into `e_CV` if given.

    `head`, `labels` and `options` are the chunk's Head, TokenLabels and LossOptions. hidden_NH and weight_VH have unit
    stride along H and rows that start at multiples of 16 bytes, as e_CV's do. `factors` are f and c, the fp32 scalar
    `grad_scale` included; empty without `e_CV`.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # Triton 3.4

    x_CH, weight_VH, bias, *_ = head
    target, class_weight, token_weight, grad_scale = labels
    ignore_index, _, softcap, logit_scale, z_loss = options
    (C, H), V = x_CH.shape, weight_VH.shape[0]
    P = cdiv(V, tile.vocab)
    fp32 = {"dtype": torch.float32}
    loss, stats = x_CH.new_empty(C, **fp32), x_CH.new_empty((3, C), **fp32)
    z_y, shift, partial = x_CH.new_empty(C, **fp32), x_CH.new_empty(C, **fp32), x_CH.new_empty((C, P), **fp32)
    slope = x_CH.new_empty(C, **fp32) if softcap is not None else None
    want_grad = e_CV is not None
    factors = x_CH.new_empty((2, C if want_grad else 0), **fp32)
    if not C:
        return loss, stats, factors
    flags = {"HAS_BIAS": bias is not None, "HAS_SOFTCAP": softcap is not None, "HAS_SCALE": logit_scale != 1.0}
    cap = 1.0 if softcap is None else softcap
    x_desc = TensorDescriptor(x_CH, [C, H], [x_CH.stride(0), 1], [tile.tokens, tile.hidden])
    w_desc = TensorDescriptor(weight_VH, [V, H], [weight_VH.stride(0), 1], [tile.vocab, tile.hidden])
    e_desc = w_desc
    if want_grad:
        e_desc = TensorDescriptor(e_CV, [C, V], [e_CV.stride(0), 1], [tile.tokens, tile.vocab // 2])
    programs = min(_launch.multiprocessors(x_CH.device.index), cdiv(C, tile.tokens) * P)
    launch(
        label_logit_kernel, (C,), x_CH,
        X=x_CH, W=weight_VH, Bias=bias, Target=target, ZY=z_y, Shift=shift, Slope=slope, V=V, H=H,
        stride_x=x_CH.stride(0), stride_w=weight_VH.stride(0), ignore_index=ignore_index, softcap=cap,
        scale=logit_scale, **flags, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    launch_by_triton(
        exp_logits_kernel, (programs,), x_CH,
        x_desc=x_desc, w_desc=w_desc, e_desc=e_desc, Bias=bias, Target=target, Shift=shift, Partial=partial,
        C=C, V=V, H=H, P=P, group_tiles=_rows_in_l2(C, H * x_CH.element_size(), tile), softcap=cap,
        scale=logit_scale, **flags, STORE=want_grad, BLOCK_C=tile.tokens, BLOCK_V=tile.vocab, BLOCK_H=tile.hidden,
        PROGRAMS=programs, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    launch(
        row_factors_kernel, (C,), x_CH,
        X=x_CH, W=weight_VH, Bias=bias, Target=target, ClassWeight=class_weight, TokenWeight=token_weight,
        GradScale=grad_scale, ZY=z_y, Slope=slope, Partial=partial, E=e_CV, Loss=loss, Stats=stats, Factors=factors,
        C=C, V=V, H=H, P=P, N=C, stride_x=x_CH.stride(0), stride_w=weight_VH.stride(0),
        stride_e=e_CV.stride(0) if want_grad else 0, ignore_index=ignore_index, softcap=cap, scale=logit_scale,
        z_loss=z_loss, HAS_BIAS=flags["HAS_BIAS"], HAS_CLASS_WEIGHT=class_weight is not None,
        HAS_TOKEN_WEIGHT=token_weight is not None, HAS_Z_LOSS=z_loss != 0.0, HAS_SOFTCAP=flags["HAS_SOFTCAP"],
        HAS_SCALE=flags["HAS_SCALE"], WANT_GRAD=want_grad, BLOCK_P=512, BLOCK=64, num_warps=4,
    )  # fmt: skip
    return loss, stats, factors
