"""Quantisation-aware training: the forward computes with the rounded merged weight, and gradients are its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vision
from tigon.errors import RecipeError
from tigon.techniques import TECHNIQUES, matrix
from tigon.techniques.keys.settings import Settings
from tigon.techniques.qat import qat
from tigon.techniques.qat.formats import FORMATS, group_of, linear_layers
from tigon.techniques.technique import RunInfo

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
IDS = torch.tensor([[1, 5, 9, 3, 7, 2, 8], [4, 4, 6, 1, 0, 2, 3]])
GRIDS = {"int4": 16, "mxfp4": 15, "fp8": 253}  # values of either sign, -0 with 0


def model(width: int = 96, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, initializer_range=0.2, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def adapted(plain: Any) -> Any:
    wrapped = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return wrapped


def with_rounded_weights(merged: Any, name: str) -> Any:
    """The model that an export would hold."""
    chosen, layers = FORMATS[name], linear_layers(merged)
    for layer in layers.values():
        layer.weight.data = qat.rounded(layer.weight.data, chosen, group_of(layers, chosen))
    return merged


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_takes_the_nearest_value_of_the_grid(name: str) -> None:
    chosen = FORMATS[name]
    torch.manual_seed(0)
    weight = (torch.randn(64, 256) * torch.logspace(-3, 1, 64)[:, None]).bfloat16()
    weight[3] = 0
    codes = chosen.codes(weight, (chosen.groups or (None,))[0])
    grid = codes.values_RGE.unique()
    assert len(grid) <= GRIDS[name] and len(grid) > GRIDS[name] // 2
    scaled = weight.double().reshape(codes.values_RGE.shape) / codes.scales_RG.double().unsqueeze(-1)
    scaled = scaled.clamp(grid.min().double(), grid.max().double())
    nearest = (scaled.unsqueeze(-1) - grid.double()).abs().amin(-1)
    assert torch.allclose((scaled - codes.values_RGE.double()).abs(), nearest, atol=1e-6)
    assert torch.equal(codes.weight()[3], torch.zeros(256, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", FORMATS)
def test_compressed_tensors_reads_the_packed_weight_bit_for_bit(name: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    chosen = FORMATS[name]
    group = (chosen.groups or (None,))[0]
    codes = chosen.codes(torch.randn(24, 256).bfloat16(), group)
    scheme = QuantizationConfig.model_validate(chosen.config(group, ["lm_head"])).config_groups["group_0"]
    read = BaseCompressor.get_value_from_registry(chosen.file_format).decompress(chosen.pack(codes), scheme)
    assert torch.equal(read["weight"], codes.weight())


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_torchao_rounds_a_bf16_weight_to_the_same_numbers(name: str) -> None:
    quantizers = pytest.importorskip("torchao.quantization.qat")
    weight = torch.randn(24, 256).bfloat16()
    theirs = (
        quantizers.IntxFakeQuantizer(quantizers.IntxFakeQuantizeConfig(torch.int4, group_size=128, is_symmetric=True))
        if name == "int4"
        else quantizers.Float8FakeQuantizer(quantizers.Float8FakeQuantizeConfig())
    )
    assert torch.equal(theirs(weight), qat.rounded(weight, FORMATS[name], 128 if name == "int4" else None))


@pytest.mark.parametrize("name", FORMATS)
def test_loss_sees_the_rounded_merged_weights_and_adapters_get_their_gradient(name: str) -> None:
    wrapped = adapted(model())
    exported = with_rounded_weights(copy.deepcopy(wrapped).merge_and_unload(), name)
    qat.round_layers(wrapped, FORMATS[name])
    if FORMATS[name].rounds_inputs:
        for layer in linear_layers(exported).values():
            layer.register_forward_pre_hook(lambda _, x: (qat.rounded_input(x[0]),))
    logits = wrapped(input_ids=IDS).logits
    assert torch.equal(logits, exported(input_ids=IDS).logits)
    layer = wrapped.base_model.model.model.layers[1].mlp.down_proj
    seen = {}
    layer.register_forward_hook(
        lambda _, x, y: (seen.update(x=x[0]), y.register_hook(lambda g: seen.update(g=g)))[1] and None
    )
    wrapped(input_ids=IDS).logits.logsumexp(-1).sum().backward()
    x = seen["x"].flatten(0, 1).double()
    x = qat.rounded_input(x) if FORMATS[name].rounds_inputs else x
    of_weight = seen["g"].flatten(0, 1).double().T @ x  # the gradient of the merged weight, which rounding lets through
    a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    scaling = layer.scaling["default"]
    assert torch.allclose(b.grad.double(), scaling * of_weight @ a.double().T, rtol=1e-4, atol=1e-5)
    assert torch.allclose(a.grad.double(), scaling * b.double().T @ of_weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_a_trained_weight_gets_the_gradient_of_the_rounded_one(name: str) -> None:
    trained, chosen = nn.Sequential(nn.ModuleList([nn.Linear(64, 8)])), FORMATS[name]
    group = (chosen.groups or (None,))[-1]
    layer = trained[0][0]
    layer.__class__ = qat.RoundedLinear
    vars(layer).update(chosen=chosen, group=group)
    x = torch.randn(5, 64, requires_grad=True)
    y = layer(x)
    weight = qat.rounded(layer.weight, chosen, group).requires_grad_()
    entering = qat.rounded_input(x.detach()) if chosen.rounds_inputs else x.detach()
    want = F.linear(entering, weight, layer.bias)
    assert torch.equal(y, want)
    y.square().sum().backward()
    want.square().sum().backward()
    assert torch.equal(layer.weight.grad, weight.grad)
    assert torch.allclose(x.grad, 2 * want.detach() @ weight.detach(), rtol=1e-5, atol=1e-5)


def test_undo_restores_the_layers_and_disabled_adapters_leave_the_rounded_base() -> None:
    wrapped = adapted(model())
    before = wrapped(input_ids=IDS).logits
    base = with_rounded_weights(model(), "int4")(input_ids=IDS).logits
    undo = qat.round_layers(wrapped, FORMATS["int4"])
    with wrapped.disable_adapter():
        assert torch.equal(wrapped(input_ids=IDS).logits, base)
    undo()
    assert torch.equal(wrapped(input_ids=IDS).logits, before)


def test_the_head_stays_as_it_is_and_names_of_weights_too() -> None:
    plain = model()
    names = list(plain.state_dict())
    qat.round_layers(plain, FORMATS["fp8"])
    rounded = [path for path, module in plain.named_modules() if isinstance(module, qat.RoundedLinear)]
    assert len(rounded) == 14 and type(plain.lm_head) is nn.Linear and list(plain.state_dict()) == names


@pytest.mark.parametrize("family", ["smolvlm", "llava"])
def test_only_the_text_layers_of_a_vision_language_model_are_rounded(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    plain = AutoModelForImageTextToText.from_pretrained(getattr(vision, family)(tmp_path))
    for whole in (plain, peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj"]))):
        paths = list(linear_layers(whole))
        n_layers = plain.config.text_config.num_hidden_layers
        assert len(paths) == 7 * n_layers and not [path for path in paths if "vision" in path]


def test_rows_that_no_group_divides_are_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"down_proj has 72 elements, and int4 needs a multiple of 32 \(fp8 of 1\); set train"
    ):
        qat.round_layers(model(width=72), FORMATS["int4"])


def test_experts_are_refused() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(RecipeError, match="has experts"):
        qat.round_layers(MixtralForCausalLM(config), FORMATS["int4"])


@pytest.mark.parametrize(
    ("key", "value"), [("lora.dropout", 0.1), ("lora.dora", True), ("lora.quantize", True), ("lora.init", "pissa")]
)
def test_adapters_that_are_no_sum_are_refused(key: str, value: object) -> None:
    reasons = matrix.refusals(Settings.of({"train.qat": "int4", "lora.rank": 4, key: value}))
    assert any("train.qat: int4" in reason and key in reason for reason in reasons)


def test_the_technique_rounds_the_model_of_a_run() -> None:
    settings = Settings.of({"train.qat": "mxfp4"})
    rounded = TECHNIQUES["qat"].model(model(), settings, RunInfo())
    assert isinstance(rounded.model.layers[0].mlp.up_proj, qat.RoundedLinear)


def test_the_plan_counts_the_rounded_weights_that_wait_for_the_backward() -> None:
    from transformers import LlamaConfig

    from tigon.planner.estimate import estimate
    from tigon.planner.gpus import find_gpu
    from tigon.planner.request import Request

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, vocab_size=64
    )
    peaks = {}
    for name in ("none", "int4"):
        settings = Settings.of({"train.precision": "amp-bf16", "lora.rank": 4, "train.qat": name})
        request = Request(model="llama", config=config, batch=1, seq=32, settings=settings)
        peaks[name] = estimate(request, gpu=find_gpu("h100"), evaluation=False).phases["backward"]
    in_layers = 4 * (4 * 512 * 512 + 3 * 512 * 1024)
    assert 1.5 * in_layers < peaks["int4"] - peaks["none"] < 4 * in_layers  # in bf16, two bytes each, and one in fp32
