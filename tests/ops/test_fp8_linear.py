"""FP8 casts bit for bit, and how far rounded factors move a linear layer's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers import relative_error
from tigon.ops import OPS
from tigon.ops.linear.fp8 import fp8_amax, fp8_cast
from tigon.ops.linear.fp8_linear import fp8_linear

RECORD = OPS["fp8_linear"].quantisation_errors


@pytest.mark.parametrize("scaling", RECORD)
def test_recorded_quantisation_error_matches_the_measured_one(scaling: str) -> None:
    """512 x 256 x 384, normal values: the same on every device, because the rounded factors are."""
    torch.manual_seed(0)
    x, dy = torch.randn(512, 256).bfloat16().requires_grad_(), torch.randn(512, 384).bfloat16()
    weight = (torch.randn(384, 256) * 256**-0.5).bfloat16().requires_grad_()
    y = fp8_linear(x, weight, scaling=scaling)
    got = (y, *torch.autograd.grad(y, (x, weight), dy))
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = F.linear(exact_x, exact_weight)
    want = (exact, *torch.autograd.grad(exact, (exact_x, exact_weight), dy.double()))
    for name, ours, truth in zip(RECORD[scaling], got, want, strict=True):
        assert relative_error(ours.detach(), truth.detach()) == pytest.approx(RECORD[scaling][name], rel=0.05), name


def _every_magnitude(rows: int, columns: int) -> torch.Tensor:
    """Values over 24 powers of 2, so that normal and subnormal numbers of both formats and halfway cases occur."""
    torch.manual_seed(1)
    exponents = torch.randint(-23, 1, (rows, columns)).float()
    mantissas = 1 + torch.randint(0, 32, (rows, columns)).float() / 32
    return torch.exp2(exponents) * mantissas * torch.randn(rows, columns).sign()


@pytest.mark.parametrize("gradient", [False, True], ids=["e4m3", "gradient"])
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("special", [None, float("inf"), float("nan")], ids=["finite", "inf", "nan"])
def test_cast_is_pytorchs_rounding_of_the_scaled_values(
    rowwise: bool, gradient: bool, special: float | None, backend: Any
) -> None:
    x = _every_magnitude(70, 136).to(backend.device)
    if special is not None:
        x[3, 5] = special
    amax = fp8_amax(x, rowwise)
    rows, columns, row_scales, column_scales = fp8_cast(x, amax, rowwise, True, True, gradient)
    dtype = torch.float8_e5m2 if gradient and not rowwise else torch.float8_e4m3fn
    for q, scales, source in ((rows, row_scales, x), (columns, column_scales, x.t())):
        top = source.abs().amax(1, keepdim=True) if rowwise else source.abs().amax()
        largest = torch.full_like(top, torch.finfo(dtype).max)
        assert torch.equal(scales.view(-1).nan_to_num(-1.0), (top / largest).view(-1).nan_to_num(-1.0))
        want = (source * (largest / top)).to(dtype)
        got = q[:, : source.shape[1]]
        assert got.dtype == dtype
        assert torch.equal(got.float().nan_to_num(-1.0), want.float().nan_to_num(-1.0))
    assert columns.shape == (136, 80)
    assert not columns[:, 70:].float().any(), "the rows that fill up the summed dimension are zeros"


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_masks_of_the_tiles_do_not_change_a_cast(rowwise: bool, backend: Any) -> None:
    """One more row of zeros leaves every scale as it was, and the tiles no longer fill the rows."""
    fp8 = pytest.importorskip("tigon.kernels.fp8")
    x = _every_magnitude(2 * fp8.BLOCK_M, 2 * fp8.BLOCK_K).to(backend.device)
    longer, M = F.pad(x, (0, 0, 0, 1)), x.shape[0]
    amax = fp8_amax(x, rowwise)
    rows, columns, row_scales, column_scales = fp8_cast(x, amax, rowwise, True, True, False)
    masked = fp8_cast(longer, fp8_amax(longer, rowwise), rowwise, True, True, False)
    top = amax[:M, None] if rowwise else amax.amax()
    factor = torch.full_like(top, 448.0) / top
    assert torch.equal(rows.float(), (x * factor).to(torch.float8_e4m3fn).float())
    assert torch.equal(rows.float(), masked[0][:M].float())
    assert torch.equal(columns.float(), masked[1][:, :M].float())
    assert torch.equal(row_scales, masked[2][: len(row_scales)])
    assert torch.equal(column_scales, masked[3])


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_zeros_stay_zeros(rowwise: bool, backend: Any) -> None:
    x = torch.zeros(5, 32, device=backend.device)
    rows, columns, *scales = fp8_cast(x, fp8_amax(x, rowwise), rowwise, True, True, False)
    assert not rows.float().any()
    assert not columns.float().any()
    assert all(s.isfinite().all() and (s > 0).all() for s in scales)
