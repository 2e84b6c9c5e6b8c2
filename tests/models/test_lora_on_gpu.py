"""LoRA and DoRA layers on a GPU, over 16-bit and 4-bit weights: gradients beside fp64's and PEFT's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tigon
from tigon.techniques.base_offload.streamed_layers import StreamedLayers

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
ADAPTERS = {"LoRA": {}, "DoRA": {"use_dora": True}}
N_LAYERS = 3


def base(four_bit: bool) -> Any:
    """A small Llama in bf16. In 4 bits, its layers are those that transformers makes with bitsandbytes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=N_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    if four_bit:
        bitsandbytes = pytest.importorskip("bitsandbytes")
        for block in model.model.layers:
            for parent in (block.self_attn, block.mlp):
                for name, linear in list(parent.named_children()):
                    if type(linear) is nn.Linear:
                        stored = bitsandbytes.nn.Linear4bit(
                            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
                            compress_statistics=True, quant_type="nf4",
                        )  # fmt: skip
                        stored.weight = bitsandbytes.nn.Params4bit(
                            linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                        )
                        setattr(parent, name, stored)
        model.is_loaded_in_4bit = True
    return model.to(GPU)


def adapted(model: Any, **options: Any) -> Any:
    """The model with fp32 adapters of random values, DoRA's magnitudes away from the initial ones."""
    settings = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", **options)
    model = peft.get_peft_model(model, settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.data = torch.randn_like(parameter, dtype=torch.float32) * 0.05
            elif "magnitude" in name:
                parameter.data = parameter.float() * torch.linspace(0.5, 1.5, parameter.numel(), device=GPU)
    return model.train()


def in_fp64(model: Any, **options: Any) -> Any:
    """The same model with dense weights in fp64."""
    dense = base(four_bit=False)
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            from bitsandbytes.functional import dequantize_4bit  # loads bitsandbytes

            path = name.removeprefix("base_model.model.").removesuffix(".base_layer")
            dense.get_submodule(path).weight.data = dequantize_4bit(module.weight.data, module.weight.quant_state)
    whole = adapted(dense, **options)
    given = dict(model.named_parameters())
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:
            parameter.data = given[name].detach().clone()
    return whole.double()


def step(model: Any, autocast: bool = True) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(4 * 256, device=GPU).mul(37).remainder(512).view(4, 256)
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative Frobenius distance of all gradients together."""
    error = sum(float((got[name] - expected[name]).square().sum()) for name in expected)
    return float((error / sum(float(t.square().sum()) for t in expected.values())) ** 0.5)


@pytest.mark.parametrize("four_bit", [False, True], ids=["16 bits", "4 bits"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapted_layers_on_a_gpu_are_no_farther_from_fp64_than_pefts(kind: str, four_bit: bool) -> None:
    options = ADAPTERS[kind]
    model = adapted(base(four_bit), **options)
    truth = step(in_fp64(model, **options), autocast=False)
    unfused = step(model)
    tigon.patch(model)
    fused = step(model)
    ours, theirs = distance(fused[1], truth[1]), distance(unfused[1], truth[1])
    print(f"{kind}, 4 bits: {four_bit}: relative error of the gradients {ours:.2e}, PEFT's {theirs:.2e}")
    assert fused[1].keys() == truth[1].keys()
    assert abs(fused[0] - truth[0]) <= 2 * abs(unfused[0] - truth[0]) + 2**-8 * truth[0]
    assert ours <= 2 * theirs


@pytest.mark.parametrize("four_bit", [False, True], ids=["16 bits", "4 bits"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_streamed_layers_on_a_gpu_give_the_gradients_of_resident_ones(kind: str, four_bit: bool) -> None:
    model = adapted(base(four_bit), **ADAPTERS[kind])
    tigon.patch(model)
    resident, again = step(model), step(model)
    streamed = StreamedLayers(model, model.get_base_model().model.layers, GPU)
    found = step(model)
    assert found[0] == pytest.approx(resident[0], rel=1e-3)
    assert distance(found[1], resident[1]) <= 2 * distance(again[1], resident[1]) + 1e-3
    streamed.undo()
