"""The bounded exponentials and log(1 - e^x) against Python's decimals."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch

from tigon.losses.numerics import MAX_EXPONENT, exp_bounded, expm1_bounded, log1mexp


@pytest.mark.parametrize("x", [-1e-12, -1e-6, -0.1, -math.log(2), -0.7, -5.0, -40.0, -300.0])
def test_log1mexp_is_accurate_at_both_ends(x: float) -> None:
    with localcontext() as context:
        context.prec = 200
        exact = float((1 - Decimal(x).exp()).ln())
    assert log1mexp(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(exact, rel=4e-16)


def test_log1mexp_has_its_gradient_and_is_finite_at_0() -> None:
    x = torch.tensor([-1e-3, -0.5, -1.0, -30.0], dtype=torch.float64, requires_grad=True)
    log1mexp(x).sum().backward()
    torch.testing.assert_close(x.grad, -torch.exp(x.detach()) / (1 - torch.exp(x.detach())))
    for value in (0.0, 1e-3, -1e-30, -1e4, -math.inf):
        y = torch.tensor(value, requires_grad=True)
        found = log1mexp(y)
        found.backward()
        assert found.isfinite() and y.grad.isfinite()


@pytest.mark.parametrize("function", [exp_bounded, expm1_bounded])
def test_exponentials_are_exact_up_to_the_bound_and_go_on_as_the_tangent(function: object) -> None:
    exact = torch.exp if function is exp_bounded else torch.expm1
    x = torch.tensor([-1e4, -1.0, 0.0, 1e-9, 1.0, MAX_EXPONENT], dtype=torch.float64, requires_grad=True)
    assert torch.equal(function(x), exact(x))  # type: ignore[operator]
    function(x).sum().backward()  # type: ignore[operator]
    torch.testing.assert_close(x.grad, torch.exp(x.detach()))
    beyond = torch.tensor([MAX_EXPONENT + 1, 1e4], requires_grad=True)
    found = function(beyond)  # type: ignore[operator]
    torch.testing.assert_close(found[0].item(), 2 * math.exp(MAX_EXPONENT), rtol=1e-6, atol=0)
    found.sum().backward()
    assert (found**2).isfinite().all()
    torch.testing.assert_close(beyond.grad, torch.full((2,), math.exp(MAX_EXPONENT)))
