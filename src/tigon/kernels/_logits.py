"""What kernels over rows of logits share: z of a raw logit, a row's weights, and the gradient of cross entropy."""

import triton
import triton.language as tl

from tigon.kernels import _math

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def squash(r, scale, softcap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """(z, dz/dr) of a raw logit.

    A kernel subtracts the row's maximum from z in more than one place. If the compiler fused the product below with one
    subtraction alone, a probability would be off by the rounding of the largest logit, 7e-6 of a logit of 190: as much
    as 1 - p of a confident token, whose gradient was wrong by up to a quarter (H100). Nothing is fused across
    the choice. A softcap needs none of it: its logits are small, and a capped token is never that confident.
    """
    slope = 1.0
    if HAS_SCALE:
        scaled = r * scale
        r = tl.where(scaled == scaled, scaled, r)
        slope = scale
    if HAS_SOFTCAP:
        t, derivative = _math.tanh(r / softcap)
        r = softcap * t
        slope = derivative * slope
    return r, slope


@triton.jit
def row_weights(
    row, y, valid, ClassWeight, TokenWeight, HAS_CLASS_WEIGHT: tl.constexpr, HAS_TOKEN_WEIGHT: tl.constexpr
):
    """(w_y, a) of a row. A weight that is not given is 1; a is NaN if the label is not valid."""
    w_y = tl.full([], 1.0, dtype=tl.float32)
    if HAS_CLASS_WEIGHT:
        w_y = tl.load(ClassWeight + y, mask=valid, other=0.0).to(tl.float32)
    a = tl.full([], 1.0, dtype=tl.float32)
    if HAS_TOKEN_WEIGHT:
        a = tl.load(TokenWeight + row).to(tl.float32)
    return w_y, tl.where(valid, a, float("nan"))


@triton.jit
def gradient(
    z,
    slope,
    cols,
    y,
    m,
    log_s,
    row,
    smoothing,
    z_loss,
    w_y,
    weight_sum,
    V,
    ClassWeight,  # (V,) or None
    mask,
    HAS_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    """dr of one tile, multiplied by `row`, the row's factor."""
    p = tl.exp2(((z - m) - log_s) * LOG2E)
    hit = (1.0 - smoothing) * w_y
    on_p = hit + smoothing / V * weight_sum
    if HAS_Z_LOSS:
        on_p += 2.0 * z_loss * (m + log_s)
    dz = on_p * p
    if HAS_SMOOTHING:
        if HAS_CLASS_WEIGHT:
            dz -= smoothing / V * tl.load(ClassWeight + cols, mask=mask, other=0.0).to(tl.float32)
        else:
            dz -= smoothing / V
    return tl.where(cols == y, dz - hit, dz) * (slope * row)


@triton.jit
def tile_at(tile, row_tiles, column_tiles, group_tiles):
    """(row tile, column tile) in an order that keeps `group_tiles` row tiles in L2 while all columns are read."""
    group = tile // (group_tiles * column_tiles) * group_tiles
    in_group = tl.minimum(row_tiles - group, group_tiles)
    return group + tile % in_group, tile % (group_tiles * column_tiles) // in_group
