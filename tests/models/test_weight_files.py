"""A checkpoint's files are judged by their headers: whole, inside their folder, and this model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tigon.errors import UsageError
from tigon.models.loading import weight_files
from tigon.models.loading.auto_class import auto_class, text_part
from tigon.models.loading.config import declared_in, load_config
from tigon.models.verification.small_models import small_model

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": {}, "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4}, "mixtral": {"num_local_experts": 4}, "phi3": {},
    "gemma3_text": {},
}  # fmt: skip
UP = "model.layers.0.mlp.up_proj.weight"


def checkpoint(folder: Path, family: str = "llama", *, tied: bool = False, shard: str | None = None) -> Path:
    """A random model of two layers in `folder`."""
    config = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family], tie_word_embeddings=tied)
    options = {} if shard is None else {"max_shard_size": shard}
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **options)
    return folder


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Edit the tensors of the folder's one file."""
    tensors = load_file(folder / weight_files.SINGLE)
    edit(tensors)
    save_file(tensors, folder / weight_files.SINGLE, {"format": "pt"})
    return folder


def report_of(folder: Path) -> weight_files.LoadReport:
    headers = weight_files.read_headers(weight_files.files_in(folder))
    return weight_files.compare(AutoConfig.from_pretrained(folder), headers)


@pytest.mark.parametrize("shard", [None, "40KB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_checkpoint_fills_its_model(tmp_path, family, tied, shard):
    assert report_of(checkpoint(tmp_path, family, tied=tied, shard=shard)) == weight_files.LoadReport()


def test_composite_checkpoint_fills_the_model_of_its_text_part(tmp_path):
    """`AutoModelForCausalLM` gives the class of Qwen3.5's text part the config of that part."""
    small_model("qwen3_5")[0].save_pretrained(tmp_path)
    assert report_of(tmp_path) == weight_files.LoadReport()
    change(tmp_path, lambda tensors: tensors.pop("model.language_model.norm.weight"))
    assert report_of(tmp_path).missing == ("model.norm.weight",)


def test_part_that_is_loaded_of_a_composite_config_is_named():
    """transformers drops the weights of the vision tower without a report."""
    parts = {family: text_part(AutoConfig.for_model(family)) for family in ("qwen3_5", "llama4", "gemma3", "llama")}
    assert parts == {"qwen3_5": "qwen3_5_text", "llama4": "llama4_text", "gemma3": None, "llama": None}


@pytest.mark.parametrize(
    ("family", "loader"),
    [
        ("llama", "AutoModelForCausalLM"), ("gemma3", "AutoModelForCausalLM"), ("qwen3_5", "AutoModelForCausalLM"),
        ("llama4", "AutoModelForCausalLM"), ("llava", "AutoModelForImageTextToText"),
        ("mllama", "AutoModelForImageTextToText"), ("emu3", "AutoModelForImageTextToText"),
    ],
)  # fmt: skip
def test_loaded_class_is_one_whose_saved_model_loads_again(family, loader):
    config = AutoConfig.for_model(family)
    assert auto_class(config).__name__ == loader
    if family != "llava":
        saved_as = AutoModelForCausalLM._model_mapping[type(config)].config_class
        assert (saved_as in AutoModelForCausalLM._model_mapping) == (loader == "AutoModelForCausalLM")


def test_missing_and_renamed_tensors_are_named(tmp_path):
    checkpoint(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"model.up": tensors.pop(UP)}))
    change(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    report = report_of(tmp_path)
    assert report.missing == ("lm_head.weight", UP) and report.unexpected == ("model.up",)
    assert "2 tensors: lm_head.weight" in report.problem and "1 tensor: model.up" in report.problem


def test_tied_head_may_be_missing_from_the_file(tmp_path):
    folder = checkpoint(tmp_path, tied=True)
    assert "lm_head.weight" not in load_file(folder / weight_files.SINGLE)
    assert report_of(folder).problem is None


def test_unexpected_tensors_are_reported_and_old_rotary_tables_are_not(tmp_path):
    extra = {"visual.patch": torch.zeros(3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    report = report_of(change(checkpoint(tmp_path), lambda tensors: tensors.update(extra)))
    assert report.unexpected == ("visual.patch",) and report.problem is None


def test_shapes_of_another_model_are_named_with_both(tmp_path):
    checkpoint(tmp_path, "mixtral")
    expert = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    change(tmp_path, lambda tensors: tensors.update({expert: torch.zeros(5, 5)}))
    with pytest.raises(UsageError, match="cannot load these files as MixtralForCausalLM"):
        report_of(tmp_path)
    report = report_of(change(checkpoint(tmp_path / "b"), lambda tensors: tensors.update({UP: torch.zeros(5, 5)})))
    assert report.mismatched == (f"{UP} is (5, 5), and the model's (64, 32)",) and UP in report.problem


def test_integer_tensors_in_place_of_weights_are_refused(tmp_path):
    edit = change(checkpoint(tmp_path), lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}))
    assert report_of(edit).mismatched == (f"{UP} is I8, which is not a floating-point type",)
    expert = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    mixture = checkpoint(tmp_path / "mixture", "mixtral")
    change(mixture, lambda tensors: tensors.update({expert: tensors[expert].to(torch.int8)}))
    assert report_of(mixture).mismatched == (f"{expert} is I8, which is not a floating-point type",)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[: len(content) // 2], "not a complete safetensors file"),
        (lambda content: content + b"\0", "not a complete safetensors file"),
        (lambda content: b"", "not a complete safetensors file"),
        (lambda content: b"\xff" * 100, "header too large"),
        (lambda content: b"PK\3\4" + content, "not a complete safetensors file"),
        (lambda content: content[:8] + b"!" + content[9:], "not a complete safetensors file"),
        (lambda content: LFS, "git lfs pull"),
    ],
    ids=["half", "longer", "empty", "garbage", "zip", "header", "lfs"],
)
def test_damaged_file_is_named_in_one_line(tmp_path, damage, message):
    file = checkpoint(tmp_path) / weight_files.SINGLE
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UsageError, match=message) as raised:
        weight_files.read_headers(weight_files.files_in(tmp_path))
    assert str(file) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"metadata": {}, "weight_map": {"a": "../../etc/x.safetensors"}}, "not a file in this folder"),
        ({"metadata": {}, "weight_map": {"a": "/etc/passwd.safetensors"}}, "not a file in this folder"),
        ({"metadata": {}, "weight_map": {"a": "weights.bin"}}, "not a .safetensors file"),
        ({"metadata": {}, "weight_map": {"a": 3}}, "not a file in this folder"),
        ({"metadata": {}, "weight_map": {"a": "b.safetensors"}}, "lacks 1 file: b.safetensors"),
        ({"weight_map": {"a": "b.safetensors"}}, "weight_map or metadata"),
        ({"metadata": {}, "weight_map": {}}, "weight_map or metadata"),
        ([1], "not an object"),
        ("[" * 100_000, "not a JSON file"),
        ("{", "not a JSON file"),
    ],
)
def test_index_must_name_existing_files_of_its_folder(tmp_path, index, message):
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / weight_files.INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        weight_files.files_in(tmp_path)


def test_tensor_in_two_files_is_refused(tmp_path):
    folder = checkpoint(tmp_path, shard="40KB")
    first, second = weight_files.files_in(folder)[:2]
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: torch.zeros(1)}, second, {"format": "pt"})
    with pytest.raises(UsageError, match=f"{name} is in .*{first.name} and in {second.name}"):
        weight_files.read_headers(weight_files.files_in(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not an object"),
        ("{", "not a JSON file"),
        ("{}", "no model_type"),
        ('{"model_type": 3}', "no model_type"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "at most 1,024"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "at least one layer"),
        ('{"model_type": "x", "text_config": {"n_layer": 1000000000}}', "n_layer is 1,000,000,000"),
        ('{"model_type": "mixtral", "num_local_experts": 1000000000}', "num_local_experts"),
    ],
)
def test_damaged_config_is_named_in_one_line(tmp_path, text, message):
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    for read in (declared_in, lambda file: load_config(str(file.parent))):
        with pytest.raises(UsageError, match=message) as raised:
            read(file)
        assert str(file) in str(raised.value) and "\n" not in str(raised.value)


def test_config_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "config.json").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(UsageError, match=r"config\.json.*a folder, not a file"):
        load_config(str(tmp_path))


def test_library_calls_keep_the_report_of_transformers(tmp_path, caplog):
    """`tigon train` refuses; a call of the library says what transformers says, and loads."""
    import tigon

    checkpoint(tmp_path)
    change(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    logger = transformers.logging.get_logger("transformers")
    level = logger.level  # `tigon train`, which other tests call in this process, turns it down
    transformers.logging.set_verbosity_warning()
    logger.addHandler(caplog.handler)
    try:
        tigon.AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
        transformers.logging.set_verbosity(level)
    assert "lm_head.weight" in caplog.text and "MISSING" in caplog.text
