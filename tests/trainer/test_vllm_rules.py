"""What tigon says about serving adapters with vLLM, against vLLM's own steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import EXPERTS

from tigon.trainer.report import vllm_rules
from vllm_loader import served

peft = pytest.importorskip("peft")
LINEAR = ["q_proj", "down_proj"]
SHAPE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
    "num_key_value_heads": 1, "attention_bias": True,
}  # fmt: skip


@pytest.fixture
def adapters(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """adapters(model_type, options of LoraConfig...): a folder of adapters with random factors, and the PEFT model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def made(model_type: str = "llama", shape: dict[str, Any] | None = None, **options: Any) -> tuple[Path, Any]:
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SHAPE, **(shape or {})}))
        config = peft.LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": LINEAR, **options})
        wrapped = peft.get_peft_model(plain, config)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter)
        wrapped.save_pretrained(tmp_path, save_embedding_layers=False)
        return tmp_path, wrapped

    return made


SERVED = {
    "linear": ({}, 8, ()),
    "ranks": ({"rank_pattern": {"down_proj": 9}, "alpha_pattern": {"q_proj": 5}}, 16, ()),
    "rslora": ({"use_rslora": True, "r": 9}, 16, ()),
    "head and embeddings": (
        {"target_modules": [*LINEAR, "lm_head", "embed_tokens"]}, 8, ("embed_tokens and lm_head load only if",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("options, max_rank, conditions", SERVED.values(), ids=SERVED)
def test_vllm_adds_to_the_weights_what_peft_adds(options, max_rank, conditions, adapters) -> None:
    folder, wrapped = adapters(**options)
    verdict = vllm_rules.judge(folder)
    assert (verdict.refusals, verdict.max_rank, len(verdict.conditions)) == ((), max_rank, len(conditions))
    assert all(text in condition for text, condition in zip(conditions, verdict.conditions, strict=True))
    deltas = served(folder, max_rank=verdict.max_rank)
    layers = {path: layer for path, layer in wrapped.get_base_model().named_modules() if hasattr(layer, "lora_A")}
    assert deltas.keys() == layers.keys()
    for path, layer in layers.items():
        delta = deltas[path].T if "embed" in path else deltas[path]
        torch.testing.assert_close(delta, layer.get_delta_weight("default"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "model_type, shape",
    [("qwen3_moe", EXPERTS), ("gpt_oss", {"num_local_experts": 4, "head_dim": 8, "num_experts_per_tok": 2})],
)
def test_vllm_adds_to_experts_what_peft_adds(model_type, shape, adapters) -> None:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    folder, wrapped = adapters(model_type, shape, target_parameters=targets)
    verdict = vllm_rules.judge(folder)
    assert verdict.refusals == () and "is_3d_moe_weight" in verdict.conditions[0]
    deltas = served(folder, n_experts=4)
    wrappers = {
        path: layer
        for path, layer in wrapped.get_base_model().named_modules()
        if type(layer).__name__ == "ParamWrapper"
    }
    assert len(wrappers) == 4 and wrappers.keys() <= deltas.keys()
    for path, layer in wrappers.items():
        assert layer.parameter_name == ("gate_up_proj" if path.endswith(".base_layer") else "down_proj")
        delta = layer.get_delta_weight("default")
        if getattr(layer.get_base_layer(), "is_transposed", False):
            delta = delta.transpose(1, 2)
        torch.testing.assert_close(deltas[path], delta, rtol=1e-5, atol=1e-5)


REFUSED = {
    "dora": ({"use_dora": True}, "no DoRA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "no whole modules"),
    "biases": ({"bias": "all"}, "no trained biases"),
    "rank": ({"r": 513}, "their rank is 513, and its highest is 512"),
}  # fmt: skip


@pytest.mark.parametrize("options, reason", REFUSED.values(), ids=REFUSED)
def test_adapters_that_vllm_does_not_load_are_named_with_the_reason(options, reason, adapters) -> None:
    folder, _ = adapters(**options)
    verdict = vllm_rules.judge(folder)
    assert len(verdict.refusals) == 1 and reason in verdict.refusals[0] and reason in verdict.refusal_line


def test_an_initialisation_that_moved_weights_is_refused(adapters) -> None:
    folder, _ = adapters()
    file = folder / "adapter_config.json"
    for init, refused in (("pissa_niter_4", True), ("gaussian", False), (True, False)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": init}))
        assert bool(vllm_rules.judge(folder).refusals) == refused


def test_experts_need_both_projections_in_order(adapters) -> None:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    folder, _ = adapters("qwen3_moe", EXPERTS, target_parameters=targets)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "base_layer" not in name}, file)
    assert "both projections" in vllm_rules.judge(folder).refusals[0]
    swapped = {
        name.replace(".experts.base_layer.", ".experts.") if ".base_layer." in name
        else name.replace(".experts.", ".experts.base_layer."): tensor
        for name, tensor in tensors.items()
    }  # fmt: skip
    save_file(swapped, file)
    assert "is not the first projection" in vllm_rules.judge(folder).refusals[0]


def test_a_tensor_of_another_name_is_refused_and_copies_of_the_base_are_not(adapters) -> None:
    folder, _ = adapters()
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    head = "base_model.model.lm_head"
    save_file({**tensors, f"{head}.base_layer.weight": torch.zeros(2)}, file)
    assert not vllm_rules.judge(folder).refusals
    save_file({name: tensor for name, tensor in tensors.items() if "layers.1.mlp.down_proj.lora_B" not in name}, file)
    assert "one of the two factors of model.layers.1.mlp.down_proj" in vllm_rules.judge(folder).refusals[0]
    save_file({**tensors, f"{head}.weight": torch.zeros(2)}, file)
    assert vllm_rules.judge(folder).refusals == (f"it reads no tensor named {head}.weight",)


def test_config_has_the_keys_that_vllm_reads(adapters) -> None:
    folder, _ = adapters()
    from vllm_loader import READ_BY

    assert json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).keys() >= READ_BY
