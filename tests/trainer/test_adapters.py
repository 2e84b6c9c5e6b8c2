"""Runs with adapters, from a bf16 checkpoint with a chat template to plain transformers and PEFT."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_checkpoint import EXPERTS, chats, save, tokenizer
from trainer_helpers import records

peft = pytest.importorskip("peft")
IDS = torch.tensor([[4 + (7 * i) % 250 for i in range(24)]])


@dataclass(frozen=True)
class Done:
    """A finished command, and the logits of the model that it trained."""

    outcome: Any
    logits: torch.Tensor

    @property
    def code(self) -> int:
        return int(self.outcome.code)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoints(kind): a checkpoint, made once."""
    kinds: dict[str, dict[str, Any]] = {
        "bf16": {}, "fp32": {"dtype": torch.float32}, "tied": {"tie_word_embeddings": True},
        "experts": {"model_type": "qwen3_moe", **EXPERTS}, "biases": {"attention_bias": True},
    }  # fmt: skip
    store = tmp_path_factory.mktemp("checkpoints")

    def made(kind: str) -> Path:
        return store / kind if (store / kind).exists() else save(store / kind, **kinds[kind])

    return made


@pytest.fixture
def run(here: Path, tigon: Any, checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """run(kind, sets...): `tigon train` on chats; returns what the command printed and the trained model's logits."""
    from tigon.trainer.checkpoint.final_model import FinalModel

    chats(here / "chats.jsonl")
    mapping = {
        "data": {"source": "chats.jsonl", "sequence_length": 64, "eval_fraction": 0.1},
        "train": {"steps": 4, "batch_size": 4, "learning_rate": 0.02, "log_steps": 1, "device": "cpu",
                  "precision": "amp-bf16"},
        "output": {"name": "r", "sample_tokens": 0},
    }  # fmt: skip
    seen: dict[str, torch.Tensor] = {}
    saved = FinalModel.save

    def look(self: Any, built: Any, trainer: Any) -> None:
        built.eval()
        with torch.no_grad():
            seen["logits"] = logits_of(built)
        saved(self, built, trainer)

    monkeypatch.setattr(FinalModel, "save", look)

    def train(kind: str, *sets: str, kernels: str = "none", resume: bool = False) -> Done:
        path, model = here / "recipe.yaml", {"name": str(checkpoints(kind)), "kernels": kernels}
        path.write_text(yaml.safe_dump({"model": model, **mapping}), encoding="utf-8")
        words = [word for text in sets for word in ("--set", text)]
        outcome = tigon("train", path, *words, *(["--resume"] if resume else []))
        return Done(outcome, seen.pop("logits", torch.empty(0)))

    return train


def logits_of(model: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


def adapted(checkpoint: Path, adapters: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The checkpoint with the saved adapters, by transformers and PEFT alone."""
    from transformers import AutoModelForCausalLM

    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype), adapters).eval()


def whole(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options).eval()


def dtypes_in(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for file in folder.glob("*.safetensors") for tensor in load_file(file).values()}


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder, "train")]


def test_adapters_load_in_peft_with_the_trained_models_logits(run, here, checkpoints):
    outcome = run("bf16", "lora.rank=4")
    assert outcome.code == 0
    folder = here / "runs" / "r" / "adapters"
    assert not (here / "runs" / "r" / "model").exists(), "merging is on request"
    assert dtypes_in(folder) == {torch.float32}, "the adapters keep the dtype of training"
    assert torch.equal(logits_of(adapted(checkpoints("bf16"), folder)), outcome.logits)
    with torch.no_grad():
        before = logits_of(whole(checkpoints("bf16")))
    assert (outcome.logits - before).abs().max() > 0.1, "the adapters learned something"
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    assert torch.equal(logits_of(auto), outcome.logits), "base_model_name_or_path names the checkpoint"


def test_adapter_files_are_those_that_an_inference_server_reads(run, here, checkpoints):
    """vLLM reads r, lora_alpha and target_modules, and refuses DoRA, modules_to_save and biases (its PEFTHelper). It
    takes a module from each tensor's name."""
    assert run("bf16", "lora.rank=4", "lora.targets=[q_proj, down_proj]").code == 0
    folder = here / "runs" / "r" / "adapters"
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["peft_type"], config["task_type"]) == (4, 8, "LORA", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(checkpoints("bf16"))
    assert config["modules_to_save"] is None and config["bias"] == "none" and config["use_dora"] is False
    path = r"base_model\.model\.model\.layers\.[01]\.(self_attn\.q_proj|mlp\.down_proj)\.lora_[AB]\.weight"
    names = set(load_file(folder / "adapter_model.safetensors"))
    assert len(names) == 8 and all(re.fullmatch(path, name) for name in names)
    beside = {"README.md", "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert beside <= {file.name for file in folder.iterdir()}


def test_resumed_adapters_are_those_of_an_uninterrupted_run(run, here):
    sets = ("lora.rank=4", "lora.dropout=0.1", "train.save_steps=2", "output.name=whole")
    assert run("bf16", *sets).code == 0
    runs = here / "runs"
    shutil.copytree(runs / "whole", runs / "cut")
    shutil.rmtree(runs / "cut" / "checkpoints" / "checkpoint-4")
    shutil.rmtree(runs / "cut" / "adapters")
    (runs / "cut" / "summary.json").unlink()
    recipe = runs / "cut" / "recipe.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("name: whole", "name: cut"), encoding="utf-8")
    assert run("bf16", *sets[:-1], "output.name=cut", resume=True).code == 0
    want, got = (load_file(runs / name / "adapters" / "adapter_model.safetensors") for name in ("whole", "cut"))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    assert losses(runs / "cut")[-2:] == losses(runs / "whole")[-2:]


# What is trained -> (checkpoint, recipe keys).
KINDS = {
    "pattern": ("bf16", (r"lora.targets=['.*\.layers\.1\..*_proj']", "lora.rslora=true", "lora.alpha=3")),
    "dora": ("bf16", ("lora.dora=true", "lora.init=gaussian")),
    "modules_to_save": ("bf16", ("lora.targets=all-linear", "lora.modules_to_save=[lm_head, norm]")),
    "tied head saved": ("tied", ("lora.modules_to_save=[lm_head]",)),
    "tied embeddings": ("tied", ("lora.targets=[linear, embeddings]",)),
    "biases": ("biases", ("lora.bias=all", "lora.init=orthogonal")),
    "olora": ("bf16", ("lora.init=olora",)),
    "pissa": ("bf16", ("lora.init=pissa_niter_4", "lora.rslora=true")),
    "experts": ("experts", ("lora.targets=[linear, experts]",)),
    "fp32 base": ("fp32", ("lora.base=fp32", "lora.init=pissa")),
}  # fmt: skip
# olora and pissa split a bf16 weight in two, and what remains is rounded to bf16. PEFT loads whole modules in the dtype
# of the base model.
ROUNDED = {"olora", "pissa", "modules_to_save"}


@pytest.mark.parametrize("name", KINDS)
def test_adapters_of_each_kind_load_in_peft_and_merge_on_request(name, run, here, checkpoints):
    kind, sets = KINDS[name]
    outcome = run(kind, "lora.rank=4", *sets, "output.merge=true")
    assert outcome.code == 0
    dtype = torch.float32 if name == "fp32 base" else torch.bfloat16
    got = logits_of(adapted(checkpoints(kind), here / "runs" / "r" / "adapters", dtype))
    scale = float(outcome.logits.std())
    torch.testing.assert_close(got, outcome.logits, rtol=0, atol=0.1 * scale if name in ROUNDED else 2e-3 * scale)
    assert float((got - logits_of(whole(checkpoints(kind)))).std()) > 0.1 * scale, "nothing was learned"
    merged = whole(here / "runs" / "r" / "model")
    assert merged.dtype == dtype
    torch.testing.assert_close(logits_of(merged), got, rtol=0, atol=0.1 * scale)
    assert not (here / "runs" / "r" / "initial-adapters").exists()
