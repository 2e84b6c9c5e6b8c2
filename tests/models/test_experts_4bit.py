"""4-bit weights of experts: read in 4 bits, dequantised for one product at a time, and adapted without dense copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_experts import IDS, adapted, step
from models_helpers import assert_agree

import tigon
from tigon.models.verification.tiny import tiny_model
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora import adapter_targets

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
FAMILIES = ("qwen3_moe", "gpt_oss")
# bitsandbytes 0.50.2 dequantises rows on a CPU wrongly unless their length is a multiple of its block of 64.
WIDTHS = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family, in fp32."""
    made = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in made.items():
        torch.manual_seed(0)
        tiny_model(family, WIDTHS).save_pretrained(folder)
    return made


def read(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def in_4_bits(folder: Path) -> Any:
    """The checkpoint as `tigon train` reads it with lora.quantize, for products in fp32."""
    from tigon.techniques.lora import expert_quantizer

    model = read(folder, quantization_config=expert_quantizer.config(torch.float32), device_map={"": "cpu"})
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def dequantised(model: Any, folder: Path) -> Any:
    """A plain model with the numbers of the 4-bit one."""
    plain = read(folder)
    with torch.no_grad():
        for path in adapter_targets.expert_parameters(model):
            plain.get_parameter(path).copy_(_weight(model, path))
        for path, module in model.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
                plain.get_parameter(f"{path}.weight").copy_(weight)
    return plain


def _weight(model: Any, path: str) -> torch.Tensor:
    module, _, name = path.rpartition(".")
    return getattr(model.get_submodule(module), name)  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_read_in_4_bits(family: str, folders: dict[str, Path]) -> None:
    model, plain = in_4_bits(folders[family]), read(folders[family])
    paths = list(adapter_targets.expert_parameters(model))
    assert sorted(paths) == sorted(adapter_targets.expert_parameters(plain)) and len(paths) == 4
    for path in paths:
        module, _, name = path.rpartition(".")
        stored = model.get_submodule(module).parametrizations[name].original
        assert stored.dtype == torch.uint8 and stored.numel() == plain.get_parameter(path).numel() // 2
        error = (_weight(model, path) - plain.get_parameter(path)).norm() / plain.get_parameter(path).norm()
        assert 0 < error < 0.15, "NF4 of normal values is off by a tenth"
    assert model.is_loaded_in_4bit and model.config.quantization_config.quant_method == "bitsandbytes"


@pytest.mark.parametrize("family", FAMILIES)
def test_patched_4_bit_experts_with_adapters_agree_with_dense_ones(family: str, folders: dict[str, Path]) -> None:
    model = in_4_bits(folders[family])
    dense = adapted(dequantised(model, folders[family]), "linear", "experts")
    want = step(dense)
    model = adapted(model, "linear", "experts")
    report = tigon.patch(model, linear_cross_entropy=False)
    assert sum(entry.op == "experts" for entry in report.replaced) == 2, "the experts and their adapters"
    assert_agree(step(model), want)
    assert_agree(step(model), want)  # nothing of the first forward is left


@pytest.mark.parametrize("adapters", [True, False])
def test_no_dense_weight_waits_for_the_backward(adapters: bool, folders: dict[str, Path]) -> None:
    model = in_4_bits(folders["qwen3_moe"])
    shapes = {tuple(_weight(model, path).shape) for path in adapter_targets.expert_parameters(model)}
    model = adapted(model, "linear", "experts") if adapters else model.requires_grad_(False).train()
    model.enable_input_require_grads()
    kept: set[tuple[int, ...]] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tuple(tensor.shape))
        return tensor

    tigon.patch(model, linear_cross_entropy=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(input_ids=IDS, use_cache=False).logits
    logits.sum().backward()
    transposed = {(shape[0], shape[2], shape[1]) for shape in shapes}
    assert kept and not kept & (shapes | transposed)


def test_saved_adapters_load_in_peft_with_the_trained_results(folders: dict[str, Path], tmp_path: Path) -> None:
    model = in_4_bits(folders["qwen3_moe"])
    dense = dequantised(model, folders["qwen3_moe"])
    model = adapted(model, "linear", "experts")
    tigon.patch(model, linear_cross_entropy=False)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(dense, str(tmp_path))
    with torch.no_grad():
        got, want = (each.eval()(input_ids=IDS, use_cache=False).logits for each in (loaded, model))
    assert float((got - want).norm() / want.norm()) <= 1e-4


def test_adapters_of_4_bit_experts_without_the_op_are_refused(folders: dict[str, Path]) -> None:
    from tigon.errors import RecipeError
    from tigon.trainer.guards import adapter_checks

    settings = Settings.of({"lora.rank": 3, "lora.targets": ("linear", "experts"), "lora.quantize": True})
    model = adapted(in_4_bits(folders["qwen3_moe"]), "linear", "experts")
    with pytest.raises(RecipeError, match=r"does not run .*mlp\.experts.*leave experts out of lora.targets"):
        adapter_checks.check_fused_experts(model, settings)
    tigon.patch(model)
    adapter_checks.check_fused_experts(model, settings)


def test_pefts_own_forward_leaves_nothing_on_a_4_bit_weight(folders: dict[str, Path]) -> None:
    model = in_4_bits(folders["qwen3_moe"])
    dense = adapted(dequantised(model, folders["qwen3_moe"]), "linear", "experts")
    model = adapted(model, "linear", "experts")
    for module in model.modules():
        if type(module).__name__.endswith("Qwen3MoeExperts"):
            module.register_forward_pre_hook(lambda *_: None)  # so that the op is not used
    tigon.patch(model, linear_cross_entropy=False)
    with torch.no_grad():
        want = dense(input_ids=IDS, use_cache=False).logits
        for _ in range(2):
            got = model(input_ids=IDS, use_cache=False).logits
            assert float((got - want).norm() / want.norm()) <= 1e-4
