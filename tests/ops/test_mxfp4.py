"""The dense weight of MXFP4, by the reference and by the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tigon.ops import experts
from tigon.ops.expert_operators import ExpertUnit
from tigon.ops.linear.mxfp4 import BLOCK, CODE, mxfp4_weight


def stored(*shape: int, device: torch.device, low: int = 100, high: int = 140) -> tuple[torch.Tensor, ...]:
    """The code, random bytes and exponents, as in GPT-OSS's checkpoints; `shape` ends with the blocks of a row."""
    torch.manual_seed(4)
    packed = torch.randint(0, 256, (*shape, BLOCK // 2), dtype=torch.uint8)
    scales = torch.randint(low, high, shape, dtype=torch.uint8)
    return torch.tensor(CODE, device=device), packed.to(device), scales.to(device)


def by_element(_: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The formula of the kernel's file in fp64, weight by weight."""
    rows = []
    for block, exponent in zip(packed.cpu().reshape(-1, BLOCK // 2), scales.cpu().reshape(-1), strict=True):
        for byte in block.tolist():
            rows += [CODE[byte & 15] * 2.0 ** (int(exponent) - 127), CODE[byte >> 4] * 2.0 ** (int(exponent) - 127)]
    return torch.tensor(rows, dtype=torch.float64).reshape(*scales.shape[:-1], -1)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 50, 2)], ids=["one-block", "several-programs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_weight_is_the_formula_exactly(shape: tuple[int, ...], dtype: torch.dtype, backend: Any) -> None:
    parts = stored(*shape, device=backend.device)
    got = mxfp4_weight(*parts, dtype)
    assert got.dtype == dtype and got.shape == (*shape[:-1], shape[-1] * BLOCK)
    assert torch.equal(got.cpu().double(), by_element(*parts))


def test_smallest_and_largest_exponents_are_exact(backend: Any) -> None:
    for exponent in (0, 1, 2, 251):  # 6 · 2^127 would be more than fp32 holds
        parts = stored(2, 3, device=backend.device, low=exponent, high=exponent + 1)
        got = mxfp4_weight(*parts, torch.float32)
        assert torch.equal(got.cpu().double(), by_element(*parts))


def test_weight_is_that_of_transformers(backend: Any) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    parts = stored(3, 10, 2, device=backend.device)
    want = mxfp4.convert_moe_packed_tensors(*parts[1:], dtype=torch.bfloat16)
    assert torch.equal(mxfp4_weight(*parts, torch.bfloat16).transpose(1, 2), want)


def test_experts_with_such_weights_are_those_with_the_dense_ones(backend: Any) -> None:
    T, E, H, inner = 9, 3, 32, 32
    gate_up = stored(E, 2 * inner, H // BLOCK, device=backend.device, low=122, high=127)
    down = stored(E, H, inner // BLOCK, device=backend.device, low=122, high=127)
    hidden = torch.randn(T, H, device=backend.device, requires_grad=True)
    index = torch.rand(T, E, device=backend.device).argsort(1)[:, :2]
    weights = torch.rand(T, 2, device=backend.device, requires_grad=True)

    def made(parts: tuple[torch.Tensor, ...]) -> Any:
        return lambda: mxfp4_weight(*parts, torch.float32).transpose(1, 2)

    results = []
    for of in (made, lambda parts: made(parts)()):
        y = experts(
            hidden, index, weights, of(gate_up), of(down), transposed=True, unit=ExpertUnit(interleaved=True)
        )  # fmt: skip
        results.append((y, *torch.autograd.grad(y.square().sum(), (hidden, weights))))
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))
