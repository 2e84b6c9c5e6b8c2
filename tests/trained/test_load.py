"""A finished model is read with the checks of training: nothing random, nothing dropped, no code, no waiting."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

ADAPTER, WEIGHTS = "adapter_model.safetensors", "model.safetensors"
Read = Callable[[Path], Any]


@pytest.fixture(params=["chat", "export"])
def read(request: pytest.FixtureRequest, tigon: Any, tmp_path: Path) -> Read:
    """read(folder): a command that loads the model, with its adapters. Its outcome."""

    def run(folder: Path) -> Any:
        if request.param == "chat":
            return tigon("chat", folder, "--prompt", "hello", "--max-tokens", 2, "--temperature", 0)
        merge = ["--merge"] if (folder / ADAPTER).exists() or (folder / "adapter_config.json").exists() else []
        outcome = tigon("export", folder, tmp_path / "out", *merge)
        assert outcome.code == 0 or not [path for path in tmp_path.iterdir() if "out" in path.name]
        return outcome

    return run


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    def copy(folder: Path) -> Path:
        shutil.copytree(folder, tmp_path / "copy")
        return tmp_path / "copy"

    return copy


def edit(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a safetensors file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def declare(folder: Path, name: str = "config.json", **values: Any) -> None:
    """Change the values of a JSON file."""
    declared = json.loads((folder / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(declared | values), encoding="utf-8")


def first(tensors: dict[str, torch.Tensor]) -> str:
    return sorted(tensors)[0]


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[first(tensors)]


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["renamed.weight"] = tensors.pop(first(tensors))


def narrow(tensors: dict[str, torch.Tensor]) -> None:
    name = first(tensors)
    tensors[name] = tensors[name][:, :-1].contiguous()


def to_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[first(tensors)].view(-1)[0] = float("nan")


def to_integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[first(tensors)] = tensors[first(tensors)].to(torch.int8)


WORDS = ("lack", "not complete", "size mismatch", "is (", "not finite", "not a floating-point type")


@pytest.mark.parametrize("change", [drop, rename, narrow, to_nan, to_integers])
@pytest.mark.parametrize("part", ["checkpoint", "adapter"])
def test_files_that_are_not_those_of_the_model_are_refused(read, request, copied, part, change):
    folder = copied(request.getfixturevalue(part))
    edit(folder / (WEIGHTS if part == "checkpoint" else ADAPTER), change)
    line = read(folder).error_line()
    assert str(folder) in line
    assert any(word in line for word in WORDS), line


def test_a_tensor_that_the_model_lacks_is_named(read, checkpoint, copied):
    folder = copied(checkpoint)
    declare(folder, num_hidden_layers=1)
    outcome = read(folder)
    assert outcome.code == 0
    assert "model.layers.1." in outcome.err and "which the model lacks; they stay unused" in outcome.err


def test_an_adapter_that_the_config_does_not_name_is_named(read, adapter, copied):
    folder = copied(adapter)
    declare(folder, "adapter_config.json", target_modules=["q_proj"])
    outcome = read(folder)
    assert outcome.code == 0 and "v_proj" in outcome.err and "stay unused" in outcome.err


def test_a_saved_copy_of_a_trained_module_must_be_there(read, checkpoint, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    config.base_model_name_or_path = str(checkpoint)
    folder = tmp_path / "saved"
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(str(checkpoint)), config).save_pretrained(folder)
    assert "warning" not in read(folder).err
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    edit(folder / ADAPTER, lambda tensors: tensors.pop("base_model.model.lm_head.weight"))
    assert "base_model.model.lm_head.weight" in read(folder).error_line()


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def pickled(file: Path) -> None:
    torch.save(load_file(file), file.with_name(file.stem + ".bin"))
    file.unlink()


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def to_nan_in_place(file: Path) -> None:
    edit(file, to_nan)


def without_tensors(file: Path) -> None:
    save_file({}, file)


@pytest.mark.parametrize("damage", [truncated, emptied, pickled, piped, without_tensors, to_nan_in_place])
def test_damaged_adapters_are_not_exported_alone_either(tigon, adapter, copied, tmp_path, damage):
    folder = copied(adapter)
    damage(folder / ADAPTER)
    assert str(folder) in tigon("export", folder, tmp_path / "out").error_line()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", [truncated, emptied, pickled, piped, without_tensors])
@pytest.mark.parametrize("part", ["checkpoint", "adapter"])
def test_damaged_files_are_one_line(read, request, copied, part, damage):
    folder = copied(request.getfixturevalue(part))
    damage(folder / (WEIGHTS if part == "checkpoint" else ADAPTER))
    assert str(folder) in read(folder).error_line()


@pytest.mark.parametrize(
    "values",
    [
        {"num_key_value_heads": 0}, {"hidden_act": "nothing"}, {"rope_parameters": {"rope_type": "nothing"}},
        {"text_config": {}}, {"architectures": [5]}, {"num_hidden_layers": 1_000_000}, {"num_hidden_layers": 0},
        {"model_type": "nothing"}, {"model_type": 5}, {"vocab_size": -1}, {"hidden_size": "x"},
        {"attn_implementation": "owner/kernel"}, {"_experts_implementation": "owner/kernel"},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_allows_no_model_is_one_line(read, checkpoint, copied, values):
    folder = copied(checkpoint)
    declare(folder, **values)
    assert str(folder) in read(folder).error_line()


@pytest.mark.parametrize(
    "values",
    [{"attn_implementation": "owner/kernel"}, {"_attn_implementation": "owner/kernel:x"}, {"text_config": {}}],
    ids=str,
)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_plan_and_train_refuse_a_config_that_names_code_or_is_of_another_model(
    tigon, checkpoint, copied, tmp_path, monkeypatch, command, values
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = copied(checkpoint)
    declare(folder, **values)
    (tmp_path / "r.yaml").write_text(f"model: {{name: {folder}}}\ntrain: {{steps: 1, device: cpu}}\n", encoding="utf-8")
    words = ["plan", folder, "--gpu", "4090"] if command == "plan" else ["train", tmp_path / "r.yaml"]
    line = tigon(*words).error_line()
    assert "would fetch and run; remove" in line or "text_config" in line


@pytest.mark.parametrize("content", ["[]", "null", "{", "[" * 100_000], ids=["list", "null", "cut", "deep"])
def test_a_generation_config_that_is_no_object_is_one_line(read, checkpoint, copied, content):
    folder = copied(checkpoint)
    (folder / "generation_config.json").write_text(content)
    assert "generation_config.json" in read(folder).error_line()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(read, checkpoint, copied, name):
    folder = copied(checkpoint)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert read(folder).code == 2


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "generation_config.json", "vocab.txt"])
def test_a_text_of_gigabytes_is_not_read(read, checkpoint, copied, name):
    folder = copied(checkpoint)
    (folder / name).touch()
    os.truncate(folder / name, 2**30)  # sparse
    assert "over the limit of 268435456 bytes" in read(folder).error_line()


def test_a_pipe_among_more_chat_templates_is_refused_at_once(read, checkpoint, copied):
    folder = copied(checkpoint)
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "rag.jinja")
    assert "rag.jinja" in read(folder).error_line()


@pytest.mark.parametrize(
    "values",
    [
        {"megatron_config": {"a": 1}, "megatron_core": "evil"}, {"r": 10**12}, {"peft_type": "NOTHING"},
        {"peft_type": 5}, {"target_modules": ["nothing"]}, {"r": 0}, {"r": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_an_adapter_config_that_is_not_of_the_file_is_one_line(read, adapter, copied, values):
    folder = copied(adapter)
    declare(folder, "adapter_config.json", **values)
    assert str(folder) in read(folder).error_line()


# --- code that comes with a folder ------------------------------------------------------------------------------------


def with_code(folder: Path, proof: Path, part: str) -> None:
    """Add Python code to a checkpoint that writes the file `proof` when it is imported."""
    (folder / "own.py").write_text(
        f"open({str(proof)!r}, 'w').write('ran')\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    if part == "model":
        declare(
            folder, model_type="own",
            auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
        )  # fmt: skip
    else:
        declare(
            folder, "tokenizer_config.json", tokenizer_class="OwnTokenizer",
            auto_map={"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]},
        )  # fmt: skip


def as_run(run: Path) -> Path:
    """A run's own recipe allows its code."""
    recipe = (run / "recipe.yaml").read_text()
    if "trust_remote_code" not in recipe:
        (run / "recipe.yaml").write_text(recipe.replace("model: {", "model: {trust_remote_code: true, "))
    return run


@pytest.mark.parametrize("place", ["folder", "run", "checkpoint of a run"])
@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_code_of_a_folder_runs_only_if_the_caller_says_so(tigon, monkeypatch, checkpoint, run, tmp_path, part, place):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    name, folder = {
        "folder": (tmp_path / "copy", tmp_path / "copy"),
        "run": (as_run(run), run / "model"),
        "checkpoint of a run": (as_run(run) / "checkpoints" / "kept-1", run / "checkpoints" / "kept-1"),
    }[place]
    shutil.copytree(checkpoint, folder)
    with_code(folder, tmp_path / "proof", part)
    for command in (["chat", name, "--prompt", "x"], ["export", name, tmp_path / "out"]):
        assert "--trust-remote-code" in tigon(*command).error_line()
    assert not (tmp_path / "proof").exists()


def test_code_of_a_tokenizer_runs_with_the_callers_option(tigon, checkpoint, copied, monkeypatch, tmp_path):
    from transformers.utils import hub

    monkeypatch.setattr(hub, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = copied(checkpoint)
    with_code(folder, tmp_path / "proof", "tokenizer")
    done = tigon("chat", folder, "--prompt", "hello", "--max-tokens", 2, "--trust-remote-code")
    assert done.code == 0 and (tmp_path / "proof").exists(), done.err
