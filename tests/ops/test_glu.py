"""swiglu and geglu: the packed projection, extreme gates, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import relative_error
from tigon.errors import OptionError, ShapeError
from tigon.ops import geglu, swiglu

CALLS: dict[str, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "geglu-tanh": lambda gate, up=None: geglu(gate, up, approximate="tanh"),
    "geglu-exact": lambda gate, up=None: geglu(gate, up, approximate="none"),
}
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "geglu-exact": F.gelu,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(3, 5, 128), (4, 14), (2, 3, 4100)], ids=str)
def test_packed_result_and_gradient_equal_separate(name: str, shape: tuple[int, ...], backend: Any) -> None:
    """[gate | up] read in place gives the same numbers, and one gradient with both halves written."""
    packed = torch.randn(shape, device=backend.device, requires_grad=True)
    gate, up = (t.detach().clone().requires_grad_() for t in packed.chunk(2, -1))
    one, two = CALLS[name](packed), CALLS[name](gate, up)
    # PyTorch's own exp takes another path over strided memory; the kernels do not.
    allowed = 4 * torch.finfo(torch.float32).eps if backend.name == "reference" else 0.0
    assert relative_error(one, two) <= allowed
    upstream = torch.randn_like(two)
    (dpacked,) = torch.autograd.grad(one, packed, upstream)
    assert dpacked.is_contiguous()
    assert relative_error(dpacked, torch.cat(torch.autograd.grad(two, (gate, up), upstream), -1)) <= allowed


def test_packed_input_is_read_without_a_copy(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The halves are strided views; a copy would cost what the packed form saves."""
    copies = []
    contiguous = Tensor.contiguous
    monkeypatch.setattr(Tensor, "contiguous", lambda t, *a, **k: copies.append(t.shape) or contiguous(t, *a, **k))
    packed = torch.randn(6, 3, 16, device=backend.device, requires_grad=True)
    y = swiglu(packed)
    y.backward(torch.ones_like(y))
    assert not copies


@pytest.mark.parametrize("name", CALLS)
def test_gate_far_from_zero_gives_the_right_limits(name: str, backend: Any) -> None:
    """exp(-x) overflows at -89 in fp32; silu and gelu there are 0, and the identity at the other end."""
    gate = torch.tensor([-1e4, -200.0, -89.0, -20.0, 0.0, 20.0, 89.0, 1e4], device=backend.device, requires_grad=True)
    up = torch.full_like(gate, 2.0).requires_grad_()
    y = CALLS[name](gate, up)
    dgate, dup = torch.autograd.grad(y, (gate, up), torch.ones_like(y))
    wide = gate.detach().double().requires_grad_()
    expected = TORCH[name](wide) * 2.0
    (dwide,) = torch.autograd.grad(expected, wide, torch.ones_like(expected))
    for got, truth in ((y, expected), (dgate, dwide), (dup, expected / 2.0)):
        torch.testing.assert_close(got.double(), truth.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", CALLS)
def test_activation_is_rounded_only_after_the_product(name: str, backend: Any) -> None:
    """One rounding, at the end: fp16's largest gate times a small up is in range and exact to half a step."""
    gate = torch.linspace(-4, 4, 333, dtype=torch.float16, device=backend.device)
    up = torch.linspace(1.0, 2.0, 333, dtype=torch.float16, device=backend.device)
    exact = TORCH[name](gate.double()) * up.double()
    got = CALLS[name](gate, up)
    step = torch.finfo(torch.float16).eps * exact.abs().clamp_min(2.0**-14)
    # 1 + erf(g) cancels for negative gates, also in PyTorch's formula: fp32's rounding of 1 is left, times g and up.
    cancelled = torch.finfo(torch.float32).eps / 2 * (gate.double() * up.double()).abs()
    assert bool(((got.double() - exact).abs() <= 0.5 * step * (1 + 1e-3) + cancelled).all())


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_tanh_and_exact_gelu_differ_and_match_torch(approximate: str) -> None:
    gate = torch.tensor([2.0])
    assert geglu(gate, torch.ones(1), approximate=approximate).item() == pytest.approx(  # type: ignore[arg-type]
        F.gelu(gate.double(), approximate=approximate).item(), rel=1e-6
    )
    assert abs(geglu(gate, torch.ones(1)).item() - geglu(gate, torch.ones(1), approximate="none").item()) > 1e-5
    assert math.isclose(geglu(gate, torch.ones(1)).item(), geglu(gate, torch.ones(1), approximate="tanh").item())


REFUSED: dict[str, tuple[Callable[[], Tensor], type[Exception], str]] = {
    "odd packed width": (lambda: swiglu(torch.ones(2, 7)), ShapeError, "even"),
    "packed scalar": (lambda: swiglu(torch.ones(())), ShapeError, "even"),
    "shapes that broadcast": (lambda: swiglu(torch.ones(2, 8), torch.ones(8)), ShapeError, "must agree"),
    "two devices": (lambda: swiglu(torch.ones(2), torch.ones(2, device="meta")), ShapeError, "one device"),
    "unknown gelu": (lambda: geglu(torch.ones(2, 8), approximate="sigmoid"), OptionError, "tanh"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", REFUSED)
def test_mismatched_inputs_are_refused(what: str) -> None:
    call, error, text = REFUSED[what]
    with pytest.raises(error, match=text):
        call()
