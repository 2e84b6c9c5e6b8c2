"""A path on a CPU: a checkpoint and Alpaca rows, a plan, LoRA that is killed and resumed, a chat, an export."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_models import make_tokenizer

peft = pytest.importorskip("peft")
yaml = pytest.importorskip("yaml")
CAPITALS = {"Peru": "Lima", "Chile": "Santiago", "Kenya": "Nairobi", "Ghana": "Accra"}
IDS = torch.arange(5, 45)[None]


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of LoRA on Alpaca's array of objects, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [
        {"instruction": "Name the capital.", "input": land, "output": city} for land, city in [*CAPITALS.items()] * 8
    ]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows), encoding="utf-8")
    mapping = {
        "model": {"name": str(checkpoint)},
        "data": {"source": "alpaca.json", "sequence_length": 64, "eval_fraction": 0},
        "train": {"steps": 4, "batch_size": 4, "learning_rate": 0.05, "log_steps": 1, "precision": "amp-bf16"},
        "lora": {"rank": 4, "targets": ["all-linear", "head"]},
        "output": {"name": "capitals", "sample_tokens": 0},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(mapping), encoding="utf-8")
    return path


def killed_in_step(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tigon.trainer import guarded

    original, calls = guarded.GuardedTrainer.compute_loss, []

    def compute_loss(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    monkeypatch.setattr(guarded.GuardedTrainer, "compute_loss", compute_loss)


def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder)).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def greedy(model: Any, question: str, tokens: int) -> str:
    tokenizer = make_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(made[0, ids.shape[1] :].tolist(), skip_special_tokens=True)).strip()


def test_alpaca_rows_become_adapters_and_a_model_that_transformers_and_peft_load(
    tigon: Any,
    recipe: Path,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    planned = tigon("plan", recipe, "--gpu", "4090")
    assert planned.code == 0 and "GiB" in planned.out, planned.err

    with monkeypatch.context() as patch:
        killed_in_step(2, patch)
        stopped = tigon("train", recipe)
    assert stopped.code == 143 and "checkpoint-2 is complete" in stopped.err
    resumed = tigon("train", recipe, "--resume")
    assert resumed.code == 0 and "alpaca" in resumed.out and "full logits" not in resumed.err, resumed.err
    assert tigon("train", recipe, "--set", "output.name=whole").code == 0
    run = tmp_path / "runs/capitals"
    ours, uninterrupted = (
        peft.PeftModel.from_pretrained(plain(checkpoint), str(folder / "adapters")).eval()
        for folder in (run, tmp_path / "runs/whole")
    )
    assert any("lm_head.lora_B" in name for name, _ in ours.named_parameters())
    assert torch.equal(logits(ours), logits(uninterrupted))
    assert (logits(ours) - logits(plain(checkpoint))).norm() > 0.1 * logits(ours).norm()

    question = "Name the capital.\n\nPeru"
    answer = tigon("chat", run, "--prompt", question, "--temperature", "0", "--max-tokens", "8")
    assert answer.code == 0 and answer.out.strip() == greedy(ours, question, 8)

    assert tigon("export", run, tmp_path / "alone").code == 0
    alone = peft.PeftModel.from_pretrained(plain(checkpoint), str(tmp_path / "alone")).eval()
    assert torch.equal(logits(alone), logits(ours))
    assert tigon("export", run, tmp_path / "merged", "--merge", "--dtype", "fp32").code == 0
    exact = peft.PeftModel.from_pretrained(plain(checkpoint).float(), str(run / "adapters")).eval()
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), logits(exact), rtol=1e-3, atol=1e-3)
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "transformers"
    assert f"LoRA adapters merged into `{checkpoint}`" in card and "from transformers import" in card
    assert "PeftModel" not in card and "vllm" not in card.lower() and "## Recipe" in card
    assert not [warning for warning in recwarn if "save_embedding_layers" in str(warning.message)]
