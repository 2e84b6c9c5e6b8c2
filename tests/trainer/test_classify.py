"""`tigon train` with train.objective: classify and classify_tokens, on decoders and encoders."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoint import save, tokenizer
from torch.nn import functional as F
from trainer_helpers import TINY_MODEL, records

pytest.importorskip("datasets")

from tigon.errors import RecipeError
from tigon.objectives.classify import Classify
from tigon.recipe.keys import ModelConfig, Recipe

LABELS = ("bad", "fine", "good")
ENCODERS = {"bert": {}, "modernbert": {"cls_token_id": 2, "sep_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}}
QUICK: dict[str, dict[str, Any]] = {
    "data": {"source": "rows.jsonl", "sequence_length": 48, "eval_fraction": 0.25},
    "train": {"objective": "classify", "steps": 3, "log_steps": 1, "batch_size": 4, "learning_rate": 3e-3},
    "output": {"name": "r", "save_model": True},
}


def sections(model: object, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    made = {**QUICK, "model": {"name": str(model), "config": None, "kernels": "tigon"}}
    for name, values in more.items():
        made[name] = {**made.get(name, {}), **values}
    return made


@pytest.fixture(autouse=True)
def rows(here: Path) -> None:
    draw = random.Random(0)
    texts = [{"text": f"It was {(label := draw.choice(LABELS))} {i}.", "label": label, "n": i} for i in range(48)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")


def encoder(folder: Path, model_type: str) -> Path:
    """A masked language model, whose checkpoint lacks the head of a classification and, for BERT, the pooler."""
    from transformers import AutoConfig, AutoModelForMaskedLM, set_seed

    fast = tokenizer()
    shape = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "vocab_size": len(fast), "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    set_seed(0)
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(model_type, **shape, **ENCODERS[model_type])).save_pretrained(
        folder
    )
    fast.save_pretrained(folder)
    return folder


def logits_of(model: Any, fast: Any, texts: list[str]) -> torch.Tensor:
    batch = fast(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()


@pytest.mark.charts
def test_a_run_reports_accuracy_macro_f1_and_the_confusion_of_labels(recipe, tigon, here):
    made = sections(save(here / "model"), train={"steps": 6, "eval_steps": 3, "gradient_accumulation": 2})
    outcome = tigon("train", recipe(**made))
    assert outcome.code == 0, outcome.err
    run = here / "runs" / "r"
    assert "labels   3: bad" in outcome.out and "classify one of 3 labels per text: bad, fine, good" in outcome.out
    assert "unused" not in outcome.out and "perplexity" not in outcome.out and "entropy" not in outcome.out
    evaluated = records(run, "eval")[-1]
    summary = json.loads((run / "summary.json").read_text())
    confusion = torch.tensor(summary["labels"]["confusion"])
    assert confusion.sum() == 12 and summary["labels"]["labels"] == list(LABELS)
    assert evaluated["accuracy"] == pytest.approx(float(confusion.diagonal().sum()) / 12)
    assert f"accuracy {evaluated['accuracy']:.1%}, macro F1 {evaluated['macro_f1']:.1%}, of 12 labels" in outcome.out
    report = (run / "report.md").read_text()
    assert "## Labels" in report and "| bad |" in report and "precision" in report

    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(run / "model", dtype=torch.float32)
    fast = AutoTokenizer.from_pretrained(run / "model")
    assert model.config.id2label == dict(enumerate(LABELS)) and model.config.pad_token_id == 0
    held_out = [json.loads(line) for line in (here / "rows.jsonl").read_text().splitlines()]
    held_out = [row for row in held_out if row["text"] in _held_out(here, made)]
    given = logits_of(model, fast, [row["text"] for row in held_out]).argmax(-1)
    expected = torch.zeros(3, 3, dtype=torch.long)
    for row, number in zip(held_out, given, strict=True):
        expected[LABELS.index(row["label"]), number] += 1
    assert torch.equal(confusion, expected)


def _held_out(here: Path, made: dict[str, Any]) -> list[str]:
    from tigon.data.document_table import split_eval
    from tigon.data.labelled_rows import LabelledRows
    from tigon.data.source import reading

    read = reading.read([str(here / "rows.jsonl")], LabelledRows("sequence"), None)
    return [document.text for document in split_eval(read, made["data"]["eval_fraction"])[1]]


@pytest.mark.parametrize("model_type", ENCODERS)
def test_adapters_of_an_encoder_hold_the_whole_new_head_so_that_the_merge_is_the_trained_model(
    model_type, recipe, tigon, here
):
    peft = pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    base = encoder(here / "base", model_type)
    made = sections(base, lora={"rank": 4}, output={"merge": True}, train={"learning_rate": 1e-2, "save_steps": 3})
    outcome = tigon("train", recipe(**made))
    assert outcome.code == 0, outcome.err
    run = here / "runs" / "r"
    fast = AutoTokenizer.from_pretrained(run / "adapters")
    config = AutoConfig.from_pretrained(run / "adapters")
    plain = AutoModelForSequenceClassification.from_pretrained(base, config=config, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(plain, run / "adapters")
    merged = AutoModelForSequenceClassification.from_pretrained(run / "model", dtype=torch.float32)
    texts = ["It was good 3.", "bad"]
    torch.testing.assert_close(logits_of(merged, fast, texts), logits_of(adapted, fast, texts), rtol=1e-4, atol=1e-5)
    done = tigon("export", run, here / "out", "--merge")
    assert done.code == 0 and "labels of tokens on the run's data" in done.out, done.err
    done = tigon("export", run / "checkpoints" / "checkpoint-3", here / "of-checkpoint", "--merge")
    assert done.code == 0, done.err
    exported = AutoModelForSequenceClassification.from_pretrained(here / "of-checkpoint", dtype=torch.float32)
    torch.testing.assert_close(logits_of(exported, fast, texts), logits_of(merged, fast, texts), rtol=1e-4, atol=1e-5)


def test_a_trained_classifier_is_trained_on_with_its_labels_and_refuses_others(recipe, tigon, here):
    tiny = {"name": "tigon-demo", "config": TINY_MODEL}
    made = {**sections("tigon-demo"), "model": tiny}
    made["data"] = {**made["data"], "vocab_size": 512}
    assert tigon("train", recipe(**made)).code == 0
    first = here / "runs" / "r" / "model"
    again = tigon("train", recipe(**sections(first, output={"name": "again"})))
    assert again.code == 0, again.err
    saved = json.loads((here / "runs" / "again" / "model" / "config.json").read_text())
    assert saved["id2label"] == {"0": "bad", "1": "fine", "2": "good"}
    (here / "rows.jsonl").write_text('{"text": "x", "label": "new"}\n' * 8, encoding="utf-8")
    assert (
        "the label 'new' is not one of the model's"
        in tigon("train", recipe(**sections(first, output={"name": "other"}))).error_line()
    )
    line = tigon("train", recipe(model={"name": str(first), "config": None}, output={"name": "text"})).error_line()
    assert "is a classifier (LlamaForSequenceClassification)" in line and "train.objective: classify" in line


def test_a_resumed_run_ends_as_one_without_interruption(recipe, tigon, here):
    made = sections(save(here / "model", dtype=torch.float32), train={"steps": 4, "save_steps": 2})
    path = recipe(**made)
    assert tigon("train", path).code == 0
    whole = json.loads((here / "runs" / "r" / "summary.json").read_text())
    last = here / "runs" / "r" / "checkpoints" / "checkpoint-4"
    for each in sorted(last.rglob("*"), reverse=True):
        each.unlink() if each.is_file() else each.rmdir()
    last.rmdir()
    (here / "runs" / "r" / "summary.json").unlink()
    resumed = tigon("train", path, "--resume")
    assert resumed.code == 0, resumed.err
    again = json.loads((here / "runs" / "r" / "summary.json").read_text())
    assert again["eval_loss"] == whole["eval_loss"] and again["labels"] == whole["labels"]


def test_words_get_labels_in_a_run_of_token_classification(recipe, tigon, here):
    row = {"tokens": ["Ada", "lives", "in", "Rome"], "ner_tags": ["PER", "O", "O", "LOC"]}
    (here / "rows.jsonl").write_text((json.dumps(row) + "\n") * 24, encoding="utf-8")
    made = sections(
        save(here / "model"),
        train={"objective": "classify_tokens", "steps": 5},
        data={"columns": {"labels": "ner_tags"}},
    )
    outcome = tigon("train", recipe(**made))
    assert outcome.code == 0, outcome.err
    assert "one of 3 labels per word: LOC, O, PER" in outcome.out and "of 24 labels for evaluation" in outcome.out
    config = json.loads((here / "runs" / "r" / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForTokenClassification"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"data": {"packing": True}}, "data.packing: true puts several texts into a sample"),
        ({"data": {"format": "text"}}, "data.format is for text that a model continues"),
        ({"sharding": {"zero": 3}}, "sharding.zero: 3 has not been tried with a new classification head"),
        ({"eval": {"generate": ["Hi"]}}, "eval.generate is for text that a model continues"),
    ],
)
def test_what_does_not_go_with_a_classification_is_refused(more, words, recipe, tigon, here):
    line = tigon("train", recipe(**sections(encoder(here / "base", "bert"), **more))).error_line()
    assert words in line


def test_a_head_that_transformers_would_keep_in_4_bits_is_refused(here):
    from transformers import AutoConfig

    config = Classify.config_for(AutoConfig.for_model("bert"))
    recipe = Recipe().having({"train.objective": "classify", "lora.rank": 4, "lora.quantize": True})
    with pytest.raises(RecipeError, match="the new head of bert models in 4 bits"):
        Classify.of_recipe(recipe, config, lambda: {"bert.pooler.dense.weight": (1,), "classifier.weight": (1,)})
    assert Classify.of_recipe(recipe, config, lambda: {"score.weight": (1,)}) is not None


def test_micro_batches_of_different_size_have_the_loss_and_gradient_of_the_whole_batch():
    objective = Classify(ModelConfig(), recipe=Recipe(), labels=LABELS)
    torch.manual_seed(0)
    logits = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 2, 1, 1, -100, 0, 2])
    whole = F.cross_entropy(logits, labels, ignore_index=-100)
    (expected,) = torch.autograd.grad(whole, logits)
    parts = [
        objective.outputs_loss(SimpleNamespace(logits=logits[part]), labels[part][:, None], num_items_in_batch=6)
        for part in (slice(0, 5), slice(5, 7))
    ]
    (got,) = torch.autograd.grad(sum(parts), logits)
    torch.testing.assert_close(sum(parts).double(), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    model = torch.nn.Linear(1, 1)
    assert set(objective.metrics(model, lambda counts: counts)) == {"accuracy", "macro_f1"}
    assert objective.metrics(model, lambda counts: counts) == {}


def test_a_reward_model_is_not_trained_from_a_classifier_of_several_labels():
    from transformers import AutoConfig

    from tigon.models.loading.classifier import SEQUENCE, as_classifier
    from tigon.objectives.reward import Reward

    objective = Reward(ModelConfig(), recipe=Recipe())
    several = SimpleNamespace(config=as_classifier(AutoConfig.for_model("llama"), SEQUENCE, LABELS))
    with pytest.raises(RecipeError, match="a classifier of 3 labels"):
        objective.with_head(several)
    one = SimpleNamespace(config=as_classifier(AutoConfig.for_model("llama"), SEQUENCE, ("score",)))
    assert objective.with_head(one) is one
