"""Training itself: accumulation, exact evaluation, resume, and runs that must stop. Real models of one layer."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trainer_helpers import SMALL, records, rows, small_trainer, words
from transformers import Trainer

from tigon.data.packing import IGNORE_INDEX
from tigon.recipe.keys import Recipe, TrainConfig
from tigon.trainer import guarded


def trainer_of(tmp_path, train, kernels="none", **options):
    return small_trainer(tmp_path, Recipe(model=replace(SMALL, kernels=kernels), train=train), **options)


def config(**changes):
    return TrainConfig(**{"steps": 3, "batch_size": 8, "learning_rate": 0.01, "log_steps": 1, **changes})


def test_evaluation_is_the_mean_over_learned_tokens_whatever_the_batch(tmp_path):
    data = rows()
    by_batch = []
    for batch_size in (1, 5):
        trainer = trainer_of(tmp_path, config(batch_size=batch_size), data=data, evaluate=True)
        by_batch.append(trainer.evaluate()["eval_loss"])
    model, total, n_learned = trainer.model.eval(), 0.0, 0
    with torch.no_grad():
        for row in data.samples:
            logits = model(input_ids=row.tokens_T.long()[None]).logits[0, :-1].double()
            labels = row.labels_T[1:].long()
            total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            n_learned += int((labels != IGNORE_INDEX).sum())
    assert by_batch == pytest.approx([total / n_learned] * 2, rel=1e-5)


def test_an_alpaca_list_trains_through_a_chat_template_and_its_rows_are_shown(recipe, tigon, here):
    lines = [{"instruction": words(4, seed=i), "input": "", "output": words(3, seed=i + 100)} for i in range(60)]
    (here / "alpaca.json").write_text(json.dumps(lines, indent=1), encoding="utf-8")
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (here / "chat.jinja").write_text(template, encoding="utf-8")
    path = recipe(
        data={"source": "alpaca.json", "sequence_length": 96, "template": "chat.jinja", "show": 1},
        train={"batch_size": 2, "steps": 1}, output={"save_model": True},
    )  # fmt: skip
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    assert "60 alpaca (chat template); answers are learned" in outcome.out
    row = outcome.out.partition("learned tokens in «»\n")[2].replace("│", "")
    assert row.startswith(f"<user>{lines[0]['instruction']}<|end|><assistant>«{lines[0]['output']}<|end|>»\n")
    assert (here / "runs" / "r" / "model" / "chat_template.jinja").read_text(encoding="utf-8") == template


def test_a_checkpoint_folder_trains_again_as_a_model(recipe, tigon, here):
    assert tigon("train", recipe(output={"save_model": True, "name": "first"})).code == 0
    saved = here / "runs" / "first" / "model"
    outcome = tigon("train", recipe(model={"name": str(saved), "config": None}, output={"name": "second"}))
    assert outcome.code == 0, outcome.err
    first, second = (records(here / "runs" / name, "train") for name in ("first", "second"))
    assert second[0]["loss"] < first[0]["loss"] - 0.1, "the saved weights were not loaded"


def test_skipped_bad_rows_are_counted_and_leave_the_run_unchanged(recipe, tigon, here):
    good = [json.dumps({"prompt": words(5, seed=i), "completion": words(4, seed=i + 100)}) for i in range(40)]
    bad = ['{"prompt": "p", "completion": ', '{"prompt": "p"}', '{"prompt": "p", "completion": " "}', "[]"]
    (here / "good.jsonl").write_text("\n".join(good), encoding="utf-8")
    (here / "mixed.jsonl").write_text("\n".join([*good[:20], *bad, *good[20:]]), encoding="utf-8")
    data = {"sequence_length": 64, "eval_fraction": 0.0}
    path = recipe(data={**data, "source": "good.jsonl"}, train={"batch_size": 2})
    mixed = recipe("mixed.yaml", data={**data, "source": "mixed.jsonl"}, train={"batch_size": 2})
    assert tigon("train", path).code == 0
    words_ = ("--set", "output.name=mixed")
    assert "mixed.jsonl:21: not valid JSON" in tigon("train", mixed, *words_).error_line()
    outcome = tigon("train", mixed, *words_, "--set", "data.bad_rows=skip")
    assert outcome.code == 0, outcome.err
    assert "warning  4 rows left out (data.bad_rows: skip): mixed.jsonl:21: not valid JSON" in outcome.out
    found = [records(here / "runs" / name, "train") for name in ("r", "mixed")]
    assert [r["loss"] for r in found[0]] == [r["loss"] for r in found[1]]
    assert records(here / "runs" / "mixed", "data")[0]["bad_rows"] == 4


def test_id_beyond_the_vocabulary_is_refused_or_skipped():
    from tigon.data.documents import BadRows, Document, Segment
    from tigon.data.tokenizer import encode, train_bpe
    from tigon.errors import DataError

    tokenizer = train_bpe([words(200)], 400)
    documents = [Document("d:1", (Segment("ka", True),)), Document("d:2", (Segment("\u00e9", True),))]
    largest = [max(e.tokens) for e in encode(documents, tokenizer)]
    limit = min(largest) + 1
    bad = BadRows("skip")
    (kept,) = encode(documents, tokenizer, vocab_size=limit, bad=bad)
    assert max(kept.tokens) < limit and len(bad.problems) == 1
    with pytest.raises(DataError, match=rf"d:\d: the tokenizer gives id \d+, but the model's vocabulary has {limit}"):
        encode(documents, tokenizer, vocab_size=limit)


PRIVATE = {
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
}
"""The private methods that tigon overrides, and their parameters in the Trainer."""


@pytest.mark.parametrize(
    ("how", "rates"),
    [
        ({"schedule": "cosine", "min_lr_rate": 0.5}, [1.0, 0.9268, 0.75, 0.5732]),
        ({"schedule": "warmup_stable_decay", "decay_steps": 2}, [1.0, 1.0, 1.0, 0.5]),
        ({"schedule": "warmup_stable_decay", "decay_steps": 2, "min_lr_rate": 0.2}, [1.0, 1.0, 1.0, 0.6]),
        ({"schedule": "warmup_stable_decay", "decay_steps": 2, "warmup_steps": 2}, [0.0, 0.5, 1.0, 0.5]),
        (
            {"schedule": "warmup_stable_decay", "decay_steps": 2, "steps": None, "epochs": 2, "batch_size": 12},
            [1.0, 1.0, 1.0, 0.5],
        ),
    ],
)
def test_learning_rate_follows_the_schedule_and_ends_at_its_lowest(tmp_path, how, rates):
    trainer = trainer_of(tmp_path, config(**{"steps": 4, **how}))
    trainer.train()
    found = [entry["learning_rate"] / 0.01 for entry in trainer.state.log_history if "learning_rate" in entry]
    assert found == pytest.approx(rates, abs=1e-3)
    lowest = how.get("min_lr_rate", 0.0)
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.01 * lowest, abs=1e-9)


@pytest.mark.parametrize("name", PRIVATE)
def test_the_trainer_still_calls_the_private_methods_that_tigon_overrides(name):
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == PRIVATE[name]
    assert f"self.{name}(" in inspect.getsource(Trainer)


def test_the_trainer_takes_the_norm_from_the_public_method_that_tigon_overrides():
    assert "self.accelerator.clip_grad_norm_(" in inspect.getsource(Trainer), "guards/nan_guard.py: ClippedNorm"


def test_the_trainer_counts_a_shared_row_as_its_version_says():
    source = inspect.getsource(Trainer._get_num_items_in_batch)
    counted = {"self.get_cp_size()", "self.get_tp_size()"} <= set(re.findall(r"self\.get_\wp_size\(\)", source))
    assert counted != guarded.COUNTS_SHARED_ROWS_AGAIN


def test_the_trainer_multiplies_a_loss_by_the_processes_that_its_version_says():
    assert ("tp_size" in inspect.getsource(Trainer.compute_loss)) != guarded.LOSS_COUNTS_TENSOR_GROUPS


@pytest.mark.parametrize(("counts", "factor"), [(False, 1), (True, 2)])
def test_learned_tokens_have_the_factor_of_tensor_groups_only_if_the_loss_has_it(counts, factor, tmp_path, monkeypatch):
    """Versions from 5.10 on multiply the loss by the groups, as they count the tokens."""
    trainer = trainer_of(tmp_path, config())
    batch = next(iter(trainer.get_train_dataloader()))
    once = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)[1]
    monkeypatch.setattr(guarded, "COUNTS_SHARED_ROWS_AGAIN", True)
    monkeypatch.setattr(guarded, "LOSS_COUNTS_TENSOR_GROUPS", counts)
    groups = SimpleNamespace(non_data_parallel_size=2)
    monkeypatch.setattr(type(trainer.accelerator), "parallelism_config", groups)
    monkeypatch.setattr(Trainer, "_get_num_items_in_batch", lambda *_: once)
    assert trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)[1] == factor * once


def test_learned_tokens_of_shared_rows_are_counted_once_also_by_older_trainers(tmp_path, monkeypatch):
    """Versions before 5.19 count them in every process that shares the rows."""
    trainer = trainer_of(tmp_path, config())
    batch = next(iter(trainer.get_train_dataloader()))
    once = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)[1]
    monkeypatch.setattr(guarded, "shards_of", lambda model: 2)
    monkeypatch.setattr(guarded, "COUNTS_SHARED_ROWS_AGAIN", True)
    monkeypatch.setattr(Trainer, "_get_num_items_in_batch", lambda *_: once * 2)
    assert trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)[1] == once
