"""LoftQ's initial adapters: the nearest correction of 4-bit weights that their rank allows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tigon.techniques.lora.loftq import factors, initialise

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPES = [(128, 64), (64, 128), (64, 64)]


def rest(singular_values: torch.Tensor, rank: int) -> float:
    """The least error that a matrix of `rank` can have, by the theorem of Eckart and Young."""
    return float(singular_values[rank:].square().sum().sqrt())


@pytest.mark.parametrize("shape", SHAPES)
def test_factors_are_the_nearest_matrix_of_their_rank(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    left, right = factors(matrix, 8)
    least = rest(torch.linalg.svdvals(matrix), 8)
    assert float((matrix - left @ right).norm()) == pytest.approx(least, rel=1e-4)
    assert float(left.norm()) == pytest.approx(float(right.norm()), rel=1e-3)


def test_factors_of_an_exact_weight_are_finite_and_nearly_zero() -> None:
    left, right = factors(torch.zeros(16, 8), 4)
    assert torch.isfinite(left).all() and torch.isfinite(right).all()
    assert float((left @ right).abs().max()) == 0


@pytest.mark.parametrize("scale", [{"lora_alpha": 16}, {"lora_alpha": 3, "use_rslora": True}], ids=["alpha", "rslora"])
@pytest.mark.parametrize("device", DEVICES)
def test_adapters_of_4_bit_layers_are_the_nearest_correction_whatever_the_scale(
    scale: dict[str, Any], device: str
) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    whole: Any = nn.ModuleDict({"up": nn.Linear(64, 128, bias=False), "head": nn.Linear(64, 32, bias=False)})
    quantised = copy.deepcopy(whole)
    quantised["up"] = bitsandbytes.nn.Linear4bit(64, 128, bias=False, quant_type="nf4")
    quantised["up"].load_state_dict(whole["up"].state_dict())
    quantised.to(device)  # this quantises
    vars(quantised)["is_loaded_in_4bit"] = True  # PEFT asks for it
    config = peft.LoraConfig(r=8, target_modules=["up", "head"], **scale)
    wrapped: Any = peft.get_peft_model(quantised, config)
    head: Any = wrapped.base_model.model["head"]
    before = head.lora_B["default"].weight.clone()

    assert initialise(wrapped, whole) == 1

    layer: Any = wrapped.base_model.model["up"]
    stored = layer.get_base_layer().weight
    rounded = bitsandbytes.functional.dequantize_4bit(stored.data, stored.quant_state)
    error = whole["up"].weight.detach().to(device) - rounded
    left = error - layer.get_delta_weight("default").detach()
    assert float(left.norm()) == pytest.approx(rest(torch.linalg.svdvals(error), 8), rel=1e-4)
    assert float(left.norm()) < 0.9 * float(error.norm())
    assert torch.equal(head.lora_B["default"].weight, before), "it is not quantised"
