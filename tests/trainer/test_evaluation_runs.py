"""`tigon train` with what is evaluated besides the loss: the best checkpoint, early stopping, texts, tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoint import chats, save
from trainer_helpers import records, words

OVERFITS: dict[str, Any] = {"steps": 60, "eval_steps": 5, "learning_rate": 0.05, "schedule": "constant"}
"""On a few words the eval loss falls at first and rises soon."""


@pytest.fixture
def few_words(here: Path) -> dict[str, Any]:
    (here / "few.txt").write_text(words(200), encoding="utf-8")
    return {"source": "few.txt", "sequence_length": 16, "eval_fraction": 0.3}


def eval_losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["eval_loss"] for record in records(run, "eval")}


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def test_the_checkpoint_with_the_lowest_eval_loss_is_kept_and_becomes_the_model(
    recipe: Any, tigon: Any, few_words: Any
) -> None:
    train = {**OVERFITS, "steps": 30, "load_best": True, "save_steps": 10, "keep_checkpoints": 1}
    path = recipe(data=few_words, train=train, output={"save_model": True})
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    losses = eval_losses(Path("runs/r"))
    best = min(losses, key=lambda step: losses[step])
    assert best < 30, f"the eval loss should rise at the end: {losses}"
    assert {p.name for p in Path("runs/r/checkpoints").iterdir()} == {f"checkpoint-{best}", "checkpoint-30"}
    saved = load_file("runs/r/model/model.safetensors")
    kept = load_file(f"runs/r/checkpoints/checkpoint-{best}/model.safetensors")
    assert all(torch.equal(saved[name], kept[name]) for name in saved)
    assert (summary(Path("runs/r"))["best_step"], summary(Path("runs/r"))["eval_loss"]) == (best, losses[best])
    assert f"best     checkpoint of step {best}" in outcome.out
    assert "missing keys" not in outcome.out + outcome.err  # the tied lm_head.weight is stored once
    assert f"step {best}" in Path("runs/r/report.html").read_text(encoding="utf-8")


def test_training_ends_when_the_eval_loss_has_not_fallen_for_the_given_evaluations(
    recipe: Any, tigon: Any, few_words: Any
) -> None:
    path = recipe(data=few_words, train={**OVERFITS, "early_stopping_patience": 3})
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    losses = eval_losses(Path("runs/r"))
    best = min(losses, key=lambda step: losses[step])
    assert max(losses) == best + 15 < 60
    assert summary(Path("runs/r"))["stopped_early_step"] == best + 15
    assert f"stopped  at step {best + 15}" in outcome.out


def test_a_resumed_run_counts_evaluations_without_progress_from_its_checkpoint(
    recipe: Any, tigon: Any, few_words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops at the step at which a run without interruption stops, with the same best checkpoint."""
    train = {**OVERFITS, "early_stopping_patience": 3, "load_best": True, "save_steps": 5, "keep_checkpoints": 1}
    assert tigon("train", recipe(data=few_words, train=train)).code == 0
    losses = eval_losses(Path("runs/r"))
    from tigon.trainer.guarded import GuardedTrainer

    step, whole = max(losses) - 5, GuardedTrainer._save_checkpoint

    def killed(self: Any, *args: Any) -> None:
        whole(self, *args)
        if self.state.global_step == step:
            raise KeyboardInterrupt

    path = recipe("again.yaml", data=few_words, train=train, output={"name": "again"})
    with monkeypatch.context() as patched:
        patched.setattr(GuardedTrainer, "_save_checkpoint", killed)
        assert tigon("train", path).code != 0
    outcome = tigon("train", path, "--resume")
    assert outcome.code == 0, outcome.err
    assert eval_losses(Path("runs/again")) == losses
    names = ("best_step", "stopped_early_step", "eval_loss")
    assert [summary(Path("runs/again"))[n] for n in names] == [summary(Path("runs/r"))[n] for n in names]


def test_the_best_adapters_are_loaded(recipe: Any, tigon: Any, few_words: Any) -> None:
    pytest.importorskip("peft")
    train = {**OVERFITS, "load_best": True, "learning_rate": 0.3}
    path = recipe(data=few_words, train=train, lora={"rank": 8}, output={"save_model": True})
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    best = summary(Path("runs/r"))["best_step"]
    assert best < OVERFITS["steps"]
    saved = load_file("runs/r/adapters/adapter_model.safetensors")
    kept = load_file(f"runs/r/checkpoints/checkpoint-{best}/adapter_model.safetensors")
    assert saved.keys() == kept.keys()
    assert all(torch.equal(saved[name], kept[name].to(saved[name].dtype)) for name in saved)


@pytest.mark.parametrize(
    ("train", "data", "words_of_it"),
    [
        ({"load_best": True}, {}, "set train.eval_steps"),
        ({"early_stopping_patience": 2}, {}, "set train.eval_steps"),
        ({"load_best": True, "eval_steps": 2}, {"eval_fraction": 0}, "need an eval loss"),
        ({"load_best": True, "eval_steps": 2, "save_steps": 3}, {}, "multiple of train.eval_steps"),
    ],
)
def test_a_best_checkpoint_without_what_it_needs_is_refused(
    recipe: Any, tigon: Any, train: Any, data: Any, words_of_it: str
) -> None:
    assert words_of_it in tigon("train", recipe(train=train, data=data)).error_line()
    assert not Path("runs").exists()


def test_perplexity_is_in_the_records_the_console_and_the_report(recipe: Any, tigon: Any) -> None:
    outcome = tigon("train", recipe(train={"eval_steps": 2}))
    assert outcome.code == 0, outcome.err
    for record in records(Path("runs/r"), "eval"):
        assert record["eval_perplexity"] == pytest.approx(float(torch.tensor(record["eval_loss"]).exp()), rel=1e-4)
    last = summary(Path("runs/r"))["eval_perplexity"]
    assert f"perplexity {last:,.2f}" in outcome.out
    assert f"{last:,.2f}" in Path("runs/r/report.md").read_text(encoding="utf-8")


def test_texts_are_written_before_training_at_each_evaluation_and_at_the_end(recipe: Any, tigon: Any) -> None:
    prompts = ["karan lotis", "mivel <b>&"]
    path = recipe(train={"eval_steps": 3}, eval={"generate": prompts, "generate_tokens": 5})
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    texts = records(Path("runs/r"), "generate")
    assert [(t["label"], t["prompt"]) for t in texts] == [
        (label, prompt) for label in ("before training", "step 3", "step 4") for prompt in prompts
    ]
    assert all(f"generate {t['label']}: {t['prompt']!r} -> {t['text']!r}" in outcome.out for t in texts)
    page = Path("runs/r/report.html").read_text(encoding="utf-8")
    assert "What the model writes" in page and "mivel &lt;b&gt;&amp;" in page and "<b>&amp;" not in page


def test_texts_of_a_run_on_chats_follow_the_chat_template(here: Path, tigon: Any, recipe: Any) -> None:
    save(here / "base", dtype=torch.float32)
    chats(here / "chats.jsonl")
    path = recipe(
        model={"name": str(here / "base"), "config": None},
        data={"source": "chats.jsonl", "sequence_length": 64, "vocab_size": 8192},
        train={"steps": 60, "learning_rate": 0.01}, eval={"generate": ["say karan"], "generate_tokens": 20},
    )  # fmt: skip
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    assert records(here / "runs/r", "generate")[-1]["text"] == "karan karan karan"


def test_a_prompt_without_room_for_its_text_is_refused(recipe: Any, tigon: Any) -> None:
    path = recipe(eval={"generate": ["karan " * 200], "generate_tokens": 20})
    assert "shorten the prompt" in tigon("train", path).error_line()


def test_lm_eval_without_its_package_is_refused_with_the_install_command(
    recipe: Any, tigon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.util import find_spec

    monkeypatch.setattr("importlib.util.find_spec", lambda n, *a: None if n == "lm_eval" else find_spec(n, *a))
    line = tigon("train", recipe(eval={"lm_eval": ["hellaswag"]})).error_line()
    assert "pip install 'lm_eval" in line
    assert not Path("runs").exists()


TASK = """\
task: tiny_words
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def test_tasks_of_lm_eval_are_run_on_the_trained_model(here: Path, recipe: Any, tigon: Any) -> None:
    pytest.importorskip("lm_eval")
    rows = [{"question": "karan lotis", "choices": [" mivel", " Zzqx#%"], "answer": 0}] * 4
    (here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (here / "task.yaml").write_text(TASK, encoding="utf-8")
    outcome = tigon("train", recipe(train={"steps": 10}, eval={"lm_eval": ["task.yaml"], "lm_eval_limit": 3}))
    assert outcome.code == 0, outcome.err
    found = json.loads((here / "runs/r/lm_eval.json").read_text(encoding="utf-8"))
    assert found["tiny_words"]["acc,none"] == 1.0
    assert "lm_eval  tiny_words: acc 1.0000" in outcome.out
    assert "tiny_words" in (here / "runs/r/report.html").read_text(encoding="utf-8")
