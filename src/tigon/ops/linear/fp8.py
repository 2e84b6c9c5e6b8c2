"""FP8 operands and their products, as operators: the largest magnitude, the cast, the product.

A factor x of a product is replaced by q · scale, where q is x / scale rounded to FP8 (Micikevicius et al. 2022, arXiv
2209.05433). scale is chosen from x itself at each call: amax / 448 for e4m3. `tensorwise` has one scale per tensor, and
e5m2 for gradients, whose values span more powers of 2. `rowwise` has one scale for each row along the summed dimension,
and e4m3 throughout.

The product of two FP8 matrices is summed by the GPU's FP8 tensor cores if it is written in bf16. On other devices, and
for other dtypes and sizes, the same FP8 values are multiplied after a cast back. That is as accurate and not faster.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.kernels import chips
from tigon.ops.dispatch import Primitive

# M rows, K columns: the summed dimension of a product by rows. P: M rounded up to a multiple of 16. N: result columns.

KERNELS = "tigon.kernels.fp8"
SCALINGS = ("tensorwise", "rowwise")
ALIGNMENT = 16
"""FP8 tensor cores take matrices whose sizes are multiples of this."""
_SMALLEST = 1e-30
PART_ELEMENTS, MOST_PARTS = 8192, 512
"""Elements and number of the parts of a tensor whose largest magnitudes one launch finds; as in `kernels/fp8.py`."""


def format_of(rowwise: bool, gradient: bool) -> torch.dtype:
    """The FP8 format of a factor."""
    return torch.float8_e5m2 if gradient and not rowwise else torch.float8_e4m3fn


def transposed_rows(rows: int) -> int:
    """P: the columns of the transposed operand of M rows."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


# --- the largest magnitude ---


def _parts(x_MK: Tensor) -> int:
    return max(1, min(MOST_PARTS, -(-x_MK.numel() // PART_ELEMENTS)))


def _amax(x_MK: Tensor, rowwise: bool) -> Tensor:
    amax, size = _amax_fake(x_MK, rowwise).zero_(), x_MK.float().abs()
    if not size.numel():
        return amax
    if rowwise:
        return torch.cat([size.amax(1), size.amax(0)])
    amax[0] = size.amax()
    return amax


def _amax_fake(x_MK: Tensor, rowwise: bool) -> Tensor:
    return x_MK.new_empty(sum(x_MK.shape) if rowwise else _parts(x_MK), dtype=torch.float32)


fp8_amax = Primitive(
    "fp8_amax", "(Tensor x_MK, bool rowwise) -> Tensor", fake=_amax_fake, kernel=f"{KERNELS}:fp8_amax", reference=_amax
)
"""max |x| in fp32: those of the M rows and then of the K columns; or numbers whose maximum is that of the whole."""


# --- the cast ---

_Cast = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _cast(x_MK: Tensor, amax: Tensor, rowwise: bool, want_rows: bool, want_columns: bool, gradient: bool) -> _Cast:
    M, dtype = x_MK.shape[0], format_of(rowwise, gradient)
    amax = amax if rowwise else amax.amax().reshape(1)
    amax = torch.where(amax < _SMALLEST, _SMALLEST, amax)
    # A number divided by a tensor would be multiplied by its rounded reciprocal, and the kernel divides.
    largest = torch.full_like(amax, torch.finfo(dtype).max)
    scales, factors = amax / largest, largest / amax
    rows = columns = row_scales = column_scales = None
    if want_rows:
        row_scales, factor = (scales[:M].clone(), factors[:M, None]) if rowwise else (scales, factors)
        rows = (x_MK.float() * factor).to(dtype)
    if want_columns:
        column_scales, factor = (scales[M:].clone(), factors[M:]) if rowwise else (scales.clone(), factors)
        q_MK = (x_MK.float() * factor).to(dtype)
        columns = torch.zeros(x_MK.shape[1], transposed_rows(M), dtype=dtype, device=x_MK.device)
        columns.view(torch.uint8)[:, :M] = q_MK.view(torch.uint8).t()
    return rows, columns, row_scales, column_scales


def _cast_fake(
    x_MK: Tensor, amax: Tensor, rowwise: bool, want_rows: bool, want_columns: bool, gradient: bool
) -> tuple[Tensor, ...]:
    (M, K), dtype = x_MK.shape, format_of(rowwise, gradient)
    return (
        x_MK.new_empty((M, K) if want_rows else 0, dtype=dtype),
        x_MK.new_empty((K, transposed_rows(M)) if want_columns else 0, dtype=dtype),
        x_MK.new_empty((M if rowwise else 1) if want_rows else 0, dtype=torch.float32),
        x_MK.new_empty((K if rowwise else 1) if want_columns else 0, dtype=torch.float32),
    )


def _complete(results: _Cast, x_MK: Tensor, amax: Tensor, rowwise: bool, *flags: bool) -> tuple[Tensor, ...]:
    dtypes = (format_of(rowwise, flags[-1]),) * 2 + (torch.float32,) * 2
    return tuple(x_MK.new_empty(0, dtype=d) if r is None else r for r, d in zip(results, dtypes, strict=True))


fp8_cast = Primitive(
    "fp8_cast",
    "(Tensor x_MK, Tensor amax, bool rowwise, bool want_rows, bool want_columns, bool gradient)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_cast_fake,
    kernel=f"{KERNELS}:fp8_cast",
    reference=_cast,
    complete=_complete,
)
"""rows (M, K), columns (K, P), and their scales. `amax` is that of `fp8_amax`. Unwanted results are None or empty."""


# --- the product ---


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies FP8 matrices."""
    return device.type == "cuda" and torch.version.hip is None and _has_fp8(device.index or 0)


@functools.cache
def _has_fp8(index: int) -> bool:
    chip = chips.chip(index)
    # A GPU that is newer than the table has them too.
    return chip.casts_to_fp8 if chip is not None else torch.cuda.get_device_capability(index) >= (8, 9)


def _runs_on_tensor_cores(a_MK: Tensor, b_NK: Tensor, dtype: torch.dtype) -> bool:
    return (
        dtype is torch.bfloat16
        and a_MK.numel() > 0
        and a_MK.shape[1] % ALIGNMENT == 0
        and b_NK.shape[0] % ALIGNMENT == 0
        and has_fp8(a_MK.device)
    )


def _product(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    leading: Sequence[int],
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    N, rowwise = b_NK.shape[0], a_scales.numel() != 1 or b_scales.numel() != 1
    # y has all its dimensions from the start: a view of it would show a gated unit two holders.
    y = torch.empty(*leading, N, dtype=dtype, device=a_MK.device)
    y_MN = y.view(a_MK.shape[0], N)
    if _runs_on_tensor_cores(a_MK, b_NK, dtype):
        if rowwise:
            a_scales, b_scales = a_scales[:, None].contiguous(), b_scales[None].contiguous()
        torch._scaled_mm(a_MK, b_NK.t(), a_scales, b_scales, bias=bias, out_dtype=dtype, use_fast_accum=fast, out=y_MN)
        return y
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    product = a_MK.to(wide) @ b_NK.to(wide).t()
    product = product * a_scales.to(wide)[:, None] * b_scales.to(wide)
    y_MN.copy_(product if bias is None else product + bias)
    return y


def _product_fake(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    leading: Sequence[int],
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    return a_MK.new_empty(*leading, b_NK.shape[0], dtype=dtype)


fp8_product = Primitive(
    "fp8_product",
    "(Tensor a_MK, Tensor b_NK, Tensor a_scales, Tensor b_scales, Tensor? bias, SymInt[] leading, ScalarType dtype,"
    " bool fast) -> Tensor",
    fake=_product_fake,
    composite=_product,
)
"""(a · a_scales) (b · b_scales)ᵀ + bias, of shape (*leading, N), where leading has M elements.

fast: sums stay in the tensor cores' accumulators, which have fewer bits than fp32, instead of moving to fp32 registers
every few terms. PyTorch calls it `use_fast_accum`.
"""


@dataclass(frozen=True, slots=True)
class Operand:
    """x in FP8: by rows for sums over K, and by columns for sums over M."""

    rows: Tensor | None
    columns: Tensor | None
    row_scales: Tensor | None
    column_scales: Tensor | None


def operand(
    x_MK: Tensor, scaling: str, *, rows: bool, columns: bool, amax: Tensor | None = None, gradient: bool = False
) -> Operand:
    """Cast x to FP8. amax: that of `fp8_amax`, if it is known."""
    rowwise = scaling == "rowwise"
    if amax is None:
        amax = fp8_amax(x_MK, rowwise)
    return Operand(*fp8_cast(x_MK, amax, rowwise, rows, columns, gradient))
