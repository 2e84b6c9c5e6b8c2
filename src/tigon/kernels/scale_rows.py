"""Rows times their factors: out[index[i]] = x[i] · scale[i], multiplied in fp32 and rounded once."""

import triton
import triton.language as tl

from tigon.kernels._launch import launch

# N rows, H columns.


@triton.jit
def scale_rows_kernel(
    X,  # (N, H)
    Scale,  # (N,) or ()
    Index,  # (N,) or None
    Out,  # (rows, H)
    H,
    stride_x,
    stride_scale,
    stride_out,
    HAS_INDEX: tl.constexpr,
    INPLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Out[Index[row]] = X[row] · Scale[row], multiplied in fp32 and rounded once.

    In place, a row with factor 1 (the usual upstream gradient) is neither read nor written.
    """
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(Scale + row * stride_scale).to(tl.float32)
    to = tl.load(Index + row) if HAS_INDEX else row
    if not INPLACE or factor != 1.0:
        for start in range(0, H, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(X + row * stride_x + cols, mask=cols < H, other=0.0).to(tl.float32)
            tl.store(Out + to * stride_out + cols, (x * factor).to(Out.dtype.element_ty), mask=cols < H)


def scale_rows(x_NH, scale, index_N, rows, dtype):
    """A new (rows, H) tensor with out[index[i]] = x[i] · scale[i], other rows 0. `scale` is (N,) or 0-dim."""
    x_NH = x_NH if x_NH.stride(1) == 1 else x_NH.contiguous()
    make = x_NH.new_empty if index_N is None else x_NH.new_zeros
    return _scale_rows(x_NH, scale, index_N, make((rows, x_NH.shape[1]), dtype=dtype))


def scale_rows_(x_NH, scale):
    """x[i] *= scale[i] in place; rows with factor 1 cause no memory traffic."""
    return _scale_rows(x_NH, scale, None, x_NH)


def _scale_rows(x_NH, scale, index_N, out_MH):
    if x_NH.numel():
        launch(
            scale_rows_kernel, (x_NH.shape[0],), x_NH,
            X=x_NH, Scale=scale, Index=index_N, Out=out_MH, H=x_NH.shape[1], stride_x=x_NH.stride(0),
            stride_scale=scale.stride(0) if scale.ndim else 0, stride_out=out_MH.stride(0),
            HAS_INDEX=index_N is not None, INPLACE=out_MH is x_NH, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out_MH
