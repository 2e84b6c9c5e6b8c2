"""Runs over checkpoints of compressed-tensors, as llm-compressor and `tigon export --format` write them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_helpers import CPU
from transformers import AutoModelForCausalLM, LlamaConfig

from tigon.data.tokenizer import train_bpe
from tigon.errors import RecipeError
from tigon.recipe.keys import ModelConfig
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora import stored_weights
from tigon.techniques.qat import formats
from tigon.trainer import model
from tigon.trainer.guards.adapter_checks import check_quantized

SHAPE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
BASE = {"name": "stored", "config": None}


@pytest.fixture
def stored(here, tigon):
    """Returns a function that stores a small model, with a tokenizer, in a format of compressed-tensors."""
    pytest.importorskip("compressed_tensors")

    def store(name: str) -> Path:
        config = LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(here / "base")
        train_bpe(["ka lo mi ne pu"], 300, here / "tokenizers").save_pretrained(here / "base")
        outcome = tigon("export", "base", "stored", "--format", name, "--no-verify")
        assert outcome.code == 0, outcome.err
        return here / "stored"

    return store


@pytest.mark.parametrize("name", formats.FORMATS)
def test_checkpoint_is_read_as_dense_weights(name, stored, here):
    """As compressed-tensors itself decompresses them."""
    from compressed_tensors.compressors import ModelCompressor

    folder = stored(name)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ModelCompressor.from_compression_config(own.config.quantization_config).decompress_model(own)
    want = dict(own.named_parameters())
    named = ModelConfig(name=str(folder), kernels="none")
    built = model.build(named, model.load_config(named), dtype=torch.float32, device=CPU, seed=1)
    base = load_file(here / "base" / "model.safetensors")
    for key, tensor in built.named_parameters():
        torch.testing.assert_close(tensor, want[key].float(), rtol=2**-8, atol=0)  # the product with a bf16 scale
        assert torch.equal(tensor, base[key].float()) == ("proj" not in key), key
    assert getattr(built.config, "quantization_config", None) is None  # it is saved as what it now is
    assert {type(module) for key, module in built.named_modules() if key.endswith("proj")} == {torch.nn.Linear}


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_adapters_are_trained_over_it_and_merged_into_dense_weights(name, stored, recipe, tigon, here):
    stored(name)
    more = {"train": {"steps": 3, "learning_rate": 0.01}, "lora": {"rank": 2}}
    outcome = tigon("train", recipe(model=BASE, output={"save_model": True, "merge": True}, **more))
    assert outcome.code == 0, outcome.err
    said = " ".join(outcome.out.split())
    assert "stored stores its weights in the format of compressed-tensors; they are read in the dtype of" in said
    merged = load_file(here / "runs" / "r" / "model" / "model.safetensors")
    dense = AutoModelForCausalLM.from_pretrained(here / "runs" / "r" / "model", dtype=torch.float32)
    assert "quantization_config" not in json.loads((here / "runs" / "r" / "model" / "config.json").read_text())
    adapters = load_file(here / "runs" / "r" / "adapters" / "adapter_model.safetensors")
    named = ModelConfig(name="stored", kernels="none")
    before = model.read(named, model.load_config(named), dtype=torch.float32).state_dict()
    key = "model.layers.0.self_attn.q_proj"
    change = 2 * adapters[f"base_model.model.{key}.lora_B.weight"] @ adapters[f"base_model.model.{key}.lora_A.weight"]
    assert change.abs().max() > 0 and merged[f"{key}.weight"].shape == (64, 64)
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    wanted = before[f"{key}.weight"] + change
    torch.testing.assert_close(dense.state_dict()[f"{key}.weight"], wanted, rtol=2**-7, atol=2**-12)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"lora": {"rank": 2, "quantize": True}},
            "and transformers does not quantise them once more; set lora.quantize",
        ),
        ({"sharding": {"zero": 3}}, "into the parts of ZeRO-3; set sharding.fsdp: true"),
    ],
    ids=["4 bits", "ZeRO-3"],
)
def test_settings_that_such_a_checkpoint_lacks_are_refused_with_one_line(more, says, stored):
    config = model.load_config(ModelConfig(name=str(stored("int4"))))
    keys = {f"{section}.{key}": value for section, pairs in more.items() for key, value in pairs.items()}
    with pytest.raises(RecipeError, match="stored stores its weights in the format of compressed-tensors") as raised:
        check_quantized("stored", config, Settings.of(keys))
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_missing_package_is_named_before_the_run_folder_exists(stored, recipe, tigon, here, monkeypatch):
    stored("int4")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        stored_weights.importlib.util, "find_spec", lambda name: None if name == "compressed_tensors" else found(name)
    )
    line = tigon("train", recipe(model=BASE, lora={"rank": 2})).error_line()
    assert "compressed-tensors is not installed here: pip install" in line and not (here / "runs").exists()


def test_plan_counts_16_bits(stored, tigon):
    stored("int4")
    found = [
        tigon("plan", name, "--gpu", "24GiB", "--method", "lora", "--batch", "1", "--seq", "64", "--json")
        for name in ("stored", "base")
    ]
    assert [outcome.code for outcome in found] == [0, 0], found[0].err
    one, other = (json.loads(outcome.out) for outcome in found)
    assert one["peak_allocated_bytes"] == other["peak_allocated_bytes"]
