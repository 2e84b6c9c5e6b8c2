"""The dense weight of NF4, by the reference and by the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tigon.ops import LoraLayer, lora_linears
from tigon.ops.linear.nf4 import BLOCK, OUTER_BLOCK, dequantiser, nf4_weight


def stored(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Random bytes and scales in bitsandbytes' layout."""
    torch.manual_seed(4)
    blocks = rows * columns // BLOCK
    return tuple(
        part.to(device)
        for part in (
            torch.linspace(-1, 1, 16).pow(3),
            torch.randint(0, 256, (rows * columns // 2, 1), dtype=torch.uint8),
            torch.randint(0, 256, (blocks,), dtype=torch.uint8),
            torch.linspace(-1, 1, 256),
            torch.rand(-(-blocks // OUTER_BLOCK)) + 0.5,
            torch.tensor(3.0),
        )
    )


def by_element(parts: tuple[torch.Tensor, ...], rows: int, columns: int) -> torch.Tensor:
    """The formula of the kernel's file in fp64, weight by weight."""
    code, packed, scales, code_of_scales, outer_scales, offset = (part.cpu() for part in parts)
    w = torch.empty(rows * columns, dtype=torch.float64)
    for i in range(w.numel()):
        byte, block = int(packed[i // 2, 0]), i // BLOCK
        nibble = byte >> 4 if i % 2 == 0 else byte & 15
        scale = code_of_scales[int(scales[block])].double() * outer_scales[block // OUTER_BLOCK].double()
        w[i] = code[nibble].double() * (scale + offset.double())
    return w.reshape(rows, columns)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_weight_is_the_formula_rounded_once(rows: int, dtype: torch.dtype, backend: Any) -> None:
    """70 rows of 256: more than one program, and more than one scale of scales."""
    columns = 4 * BLOCK
    parts = stored(rows, columns, backend.device)
    expected = by_element(parts, rows, columns)
    got = nf4_weight(*parts, rows, columns, dtype)
    assert got.dtype == dtype and got.shape == (rows, columns)
    # The interpreter cuts fp32 off to bf16 instead of rounding it.
    steps = 4 if dtype == torch.float32 or backend.interpreted else 1
    assert torch.all((got.cpu().double() - expected).abs() <= steps * torch.finfo(dtype).eps * expected.abs())


def test_weight_of_bitsandbytes_is_the_same(backend: Any) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(5)
    w = torch.randn(48, 128).to(backend.device)
    packed, state = functional.quantize_4bit(w.bfloat16(), quant_type="nf4", compress_statistics=True)
    expected = functional.dequantize_4bit(packed, state)
    made = dequantiser(packed, state)
    parts = state.code, packed, state.absmax, state.state2.code, state.state2.absmax, state.offset
    got = nf4_weight(*parts, 48, 128, torch.bfloat16) if made is None else made(torch.bfloat16)
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)
    assert (got == expected).double().mean() > (0.4 if backend.interpreted else 0.99)


def test_format_that_the_kernel_does_not_know_is_left_to_bitsandbytes(backend: Any) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    w = torch.randn(8, 128).to(backend.device)
    for options in (
        {"quant_type": "fp4", "compress_statistics": True},
        {"quant_type": "nf4", "compress_statistics": False},
        {"quant_type": "nf4", "compress_statistics": True, "blocksize": 128},
    ):
        packed, state = functional.quantize_4bit(w.bfloat16(), **options)
        assert dequantiser(packed, state) is None


def test_layers_with_such_weights_are_those_with_the_dense_ones(backend: Any) -> None:
    torch.manual_seed(6)
    parts = stored(6, BLOCK, backend.device)

    def weight() -> torch.Tensor:
        return nf4_weight(*parts, 6, BLOCK, torch.float32)

    x, a, b = (
        torch.randn(*shape, device=backend.device, requires_grad=True) for shape in ((2, 5, BLOCK), (3, BLOCK), (6, 3))
    )
    results = []
    for each in (weight, weight()):
        layers = [LoraLayer(each, a, b, 0.5), LoraLayer(each, a * 2, b, 2.0)]
        ys = lora_linears(x, layers)
        results.append((*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), (x, a, b))))
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))
