"""A model folder that does not fill the model is refused by name, before the run folder is made."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_helpers import CPU, SMALL, TINY_MODEL, records
from transformers import AutoModelForCausalLM, LlamaConfig

from tigon.data.tokenizer import load_tokenizer, train_bpe
from tigon.errors import RecipeError
from tigon.models.loading.auto_class import refuse_attention
from tigon.recipe.keys import ModelConfig
from tigon.trainer import engine, model
from tigon.trainer.guards import nan_guard

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def checkpoint(here) -> Path:
    """A tiny Llama with an untied head and a tokenizer."""
    folder = here / "base"
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY_MODEL, tie_word_embeddings=False)).save_pretrained(folder)
    train_bpe(["ka lo mi ne pu"], 300, here / "tokenizers").save_pretrained(folder)
    return folder


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace or, with None, remove tensors of the folder's file; `__` stands for a dot."""
    file = folder / "model.safetensors"
    found = load_file(file)
    for name, tensor in tensors.items():
        found.pop(name.replace("__", "."), None)
        if tensor is not None:
            found[name.replace("__", ".")] = tensor
    save_file(found, file, {"format": "pt"})


def read(folder: Path):
    named = ModelConfig(name=str(folder), kernels="none")
    config = model.load_config(named)
    built = model.build(named, config, dtype=torch.float32, device=CPU, seed=1)
    engine.refuse_nonfinite(built, named)
    return built


@pytest.mark.parametrize("command", ["train", "profile"])
def test_missing_tensor_is_named_before_the_run_folder_exists(recipe, tigon, here, checkpoint, command):
    change(checkpoint, lm_head__weight=None)
    path = recipe(model={"name": "base", "config": None})
    assert "needs 1 tensor: lm_head.weight" in tigon(command, path).error_line()
    assert not (here / "runs").exists()


def test_unused_tensors_are_announced_and_recorded(recipe, tigon, here, checkpoint):
    change(checkpoint, visual__patch=torch.zeros(3), model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(3))
    result = tigon("train", recipe(model={"name": "base", "config": None}, train={"steps": 1}))
    assert result.code == 0, result.err
    assert "the checkpoint holds 1 tensor: visual.patch, which the model lacks" in result.out
    (record,) = records(here / "runs" / "r", "checkpoint")
    assert record["unused_tensors"] == ["visual.patch"]


def test_whole_checkpoint_is_loaded_exactly(checkpoint):
    own = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in read(checkpoint).state_dict().items())


BLOCK = 16


def store_in_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Store the layers' matrices in FP8 with a scale per block, as Qwen's and DeepSeek's. Returns the dense weights."""
    own, stored = load_file(folder / "model.safetensors"), {}
    dense = {name: tensor.float() for name, tensor in own.items()}
    for name, tensor in own.items():
        if tensor.ndim == 2 and "layers" in name:
            rows, columns = tensor.shape
            blocks = tensor.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            packed = (blocks / scales).to(torch.float8_e4m3fn)
            stored[name] = packed.reshape(rows, columns)
            stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
            dense[name] = (packed.float() * scales).reshape(rows, columns)
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    about = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    return dense


def test_checkpoint_in_fp8_is_read_as_dense_weights_exactly(checkpoint):
    dense = store_in_fp8(checkpoint)
    built = read(checkpoint)
    assert all(torch.equal(tensor, dense[name]) for name, tensor in built.state_dict().items())
    assert {parameter.dtype for parameter in built.parameters()} == {torch.float32}
    assert getattr(built.config, "quantization_config", None) is None  # it is saved as what it now is


def test_run_over_a_checkpoint_in_fp8_says_how_it_is_read(recipe, tigon, here, checkpoint):
    store_in_fp8(checkpoint)
    base = {"name": "base", "config": None}
    result = tigon("train", recipe(model=base, train={"steps": 2}, lora={"rank": 2}))
    assert result.code == 0, result.err
    assert "base stores its weights in FP8; they are read in the dtype of" in " ".join(result.out.split())


def test_run_over_a_checkpoint_in_fp8_saves_its_weights_in_the_dtype_of_the_others(recipe, tigon, here, checkpoint):
    """A weight in FP8 without its scale would be another one."""
    change(checkpoint, **{name.replace(".", "__"): tensor.bfloat16() for name, tensor in
                          load_file(checkpoint / "model.safetensors").items()})  # fmt: skip
    dense = store_in_fp8(checkpoint)
    more = {"train": {"steps": 1, "learning_rate": 1e-9}, "output": {"save_model": True, "merge": True}}
    result = tigon("train", recipe(model={"name": "base", "config": None}, lora={"rank": 2}, **more))
    assert result.code == 0, result.err
    saved = load_file(here / "runs" / "r" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    torch.testing.assert_close(saved[UP].float(), dense[UP], rtol=2**-7, atol=0)


def test_checkpoint_in_fp8_is_not_quantised_once_more(recipe, tigon, here, checkpoint):
    pytest.importorskip("bitsandbytes")
    store_in_fp8(checkpoint)
    base = {"name": "base", "config": None}
    line = tigon("train", recipe(model=base, lora={"rank": 2, "quantize": True})).error_line()
    assert "stores its weights in FP8, and transformers does not quantise them once more; set lora.quantize" in line


def test_tensor_that_goes_missing_after_the_check_is_refused_as_it_is_loaded(checkpoint):
    change(checkpoint, **{UP.replace(".", "__"): None})
    with pytest.raises(RecipeError, match=f"needs 1 tensor: {UP}"):
        read(checkpoint)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_named_as_they_are_loaded(checkpoint, value, dtype):
    weight = torch.zeros(64, 32, dtype=dtype)
    weight[3, 4] = value
    change(checkpoint, **{UP.replace(".", "__"): weight})
    with pytest.raises(RecipeError, match=f"{UP} holds values that are not finite"):
        read(checkpoint)


def test_first_parameter_that_is_not_finite_is_found_in_every_kind_of_weight():
    holder = torch.nn.Module()
    holder.fine, holder.empty = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0))
    holder.ids = torch.nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    assert nan_guard.first_nonfinite(holder) is None
    holder.ids.quant_state = type("QuantState", (), {"absmax": torch.ones(2), "offset": torch.tensor(math.nan)})()
    assert nan_guard.first_nonfinite(holder) == 2
    holder.fine.ds_tensor = torch.tensor([math.inf])
    assert nan_guard.first_nonfinite(holder) == 0


def test_folder_with_adapters_is_refused(checkpoint):
    (checkpoint / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RecipeError, match="holds adapters"):
        model.load_config(ModelConfig(name=str(checkpoint), kernels="none"))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_damaged_tokenizer_is_refused_in_one_line(checkpoint, file, text):
    (checkpoint / file).write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match="base: no tokenizer could be loaded") as raised:
        load_tokenizer(str(checkpoint), revision=None, trust_remote_code=False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "zz"}', '{"model_type": "llama", "vocab_size": "x"}'])
def test_damaged_config_is_refused_in_one_line(checkpoint, text):
    (checkpoint / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=r"^model.name: ") as raised:
        model.load_config(ModelConfig(name=str(checkpoint), kernels="none"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rms_norm_eps", math.nan, "rms_norm_eps is nan"),
        ("rms_norm_eps", -1e-5, "rms_norm_eps is -1e-05"),
        ("rms_norm_eps", True, "rms_norm_eps"),
        ("attention_dropout", math.inf, "attention_dropout is inf"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": math.nan}, "rope_parameters.rope_theta is nan"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0}, "rope_theta is 0"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1,000,000,000, but tigon builds at most 1,024"),
        ("num_hidden_layers", True, "num_hidden_layers"),
        ("max_position_embeddings", -1, "max_position_embeddings is -1"),
    ],
)
def test_config_values_that_no_model_has_are_refused(name, value, message):
    with pytest.raises(RecipeError, match=message):
        model.load_config(replace(SMALL, config={**TINY_MODEL, name: value}))


@pytest.mark.parametrize("name", ["tigon-demo", "base"])
def test_revision_without_a_hub_model_is_refused(checkpoint, name):
    with pytest.raises(RecipeError, match=r"model\.revision is 'main', but"):
        model.load_config(ModelConfig(name=name, kernels="none", revision="main"))


def test_groups_that_do_not_divide_the_key_heads_leave_no_folder(recipe, tigon, here):
    line = tigon("train", recipe(train={"attention_groups": 3})).error_line()
    assert "the model has 1 key heads" in line
    assert not (here / "runs").exists()


def test_vocabulary_of_a_model_that_reads_images_is_that_of_its_text():
    from types import SimpleNamespace

    from transformers import AutoConfig

    from tigon.trainer.guards.preflight import check_vocabulary

    config = AutoConfig.for_model("gemma3", text_config={"vocab_size": 300, "num_hidden_layers": 1})
    recipe = SimpleNamespace(data=SimpleNamespace(tokenizer="auto"), model=SimpleNamespace(name="m"))
    check_vocabulary(recipe, config, 300)
    with pytest.raises(RecipeError, match="a vocabulary of 300; set"):
        check_vocabulary(recipe, config, 301)


def test_model_without_sdpa_names_the_attention_that_it_has(recipe, tigon, here):
    small = {"num_hidden_layers": 1, "hidden_size": 64, "num_local_experts": 4, "vocab_size": 512}
    line = tigon("train", recipe(model={"name": "gpt-oss-20b", "config": small})).error_line()
    assert "model.attention: transformers has no sdpa for gpt-oss-20b; set model.attention: eager" in line


@pytest.mark.parametrize(
    ("attention", "text", "said"),
    [
        ("flash_attention_2", "FlashAttention2 has been toggled on, but flash_attn seems to be not installed", True),
        ("flash_attention_2", "lab/M-Flash has no file named config.json", False),
        ("sdpa", "lab/M-Flash has no file named config.json; flash weights are elsewhere", False),
        ("sdpa", "an attention implementation through torch.nn.functional.scaled_dot_product_attention", True),
    ],
)
def test_attention_is_named_only_where_it_is_the_cause(attention, text, said):
    """A model may be named Flash, and another fault may name it."""
    with pytest.raises(RecipeError, match=r"model\.attention: ") if said else contextlib.nullcontext():
        refuse_attention("lab/M-Flash", attention, ValueError(text))
