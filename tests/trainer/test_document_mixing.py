"""A packed run compares a packed document with the same document alone before its first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_technique_runs import fsdp_rank, zero_rank
from tiny_checkpoint import chats
from trainer_helpers import losses

from forks import forks, in_forks, need_deepspeed
from tigon.data.packing import Sample
from tigon.models import packed_documents
from tigon.models.verification.small_models import small_model
from tigon.techniques.keys.settings import Settings
from tigon.trainer import model as models
from tigon.trainer.family_training import NAME, letters
from tigon.trainer.guards import document_mixing
from tigon.trainer.guards.document_mixing import MOST_TOKENS, eps_of, joined, rounding, two_documents

DATA = {"source": "chats.jsonl", "sequence_length": 96, "eval_fraction": 0}


def forget_positions(model: Any) -> Any:
    """The model ignores where documents begin."""

    def forget(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {name: value for name, value in kwargs.items() if name != "position_ids"}

    return model.register_forward_pre_hook(forget, with_kwargs=True).remove


@pytest.fixture
def packed(recipe: Any, here: Path) -> Path:
    """A run of two steps on packed chats."""
    chats(here / "chats.jsonl")
    return recipe(data=DATA, train={"steps": 2})  # type: ignore[no-any-return]


@pytest.fixture
def mixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's model mixes documents, and its config does not show it."""
    monkeypatch.setattr(packed_documents, "keep_apart", forget_positions)


def trains_nothing(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return not metrics.exists() or '"train"' not in metrics.read_text(encoding="utf-8")


def test_model_that_mixes_documents_is_refused_before_its_first_step(
    packed: Path, mixes: None, tigon: Any, here: Path
) -> None:
    line = tigon("train", packed).error_line()
    assert "data.packing is true, but tigon-demo mixes the documents of a sample" in line
    assert "set data.packing: false, or data.cross_document_attention: true" in line
    assert trains_nothing(here / "runs" / "r")


@pytest.mark.parametrize("key", ["data.packing=false", "data.cross_document_attention=true"])
def test_keys_that_the_refusal_names_let_the_model_train(packed: Path, mixes: None, tigon: Any, key: str) -> None:
    outcome = tigon("train", packed, "--set", key)
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_comparison_changes_nothing_of_a_run_with_dropout(
    packed: Path, tigon: Any, here: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    if lora:
        pytest.importorskip("peft")
    sets = [
        "--set",
        "model.config.attention_dropout=0.2",
        *(["--set", "lora.rank=2", "--set", "lora.dropout=0.2"] * lora),
    ]
    assert tigon("train", packed, *sets).code == 0
    monkeypatch.setattr(document_mixing, "two_documents", lambda samples: None)
    assert tigon("train", packed, *sets, "--set", "output.name=without").code == 0
    assert losses(here / "runs" / "r") == losses(here / "runs" / "without")


@forks
@pytest.mark.parametrize("engine", ["fsdp", "zero"])
def test_processes_that_shard_the_model_refuse_it_together(
    packed: Path, tigon: Any, here: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """One process prints the line, and all of them end. Without the fault they train as one process does."""
    if engine == "zero":
        need_deepspeed()
    rank_of = {"fsdp": fsdp_rank, "zero": zero_rank}[engine]
    sets = ["train.batch_size=2", *(["sharding.zero=3"] if engine == "zero" else [])]
    said = here / "stderr.txt"

    def run(name: str) -> list[int]:
        return in_forks(lambda rank: rank_of(packed, [*sets, f"output.name={name}"]), 2, said=said)  # type: ignore[operator]

    assert run("apart") == [0, 0], said.read_text(encoding="utf-8")
    assert tigon("train", packed).code == 0
    assert losses(here / "runs" / "apart") == pytest.approx(losses(here / "runs" / "r"), rel=1e-5)
    monkeypatch.setattr(packed_documents, "keep_apart", forget_positions)
    assert 0 not in run("mixed")
    assert said.read_text(encoding="utf-8").count("mixes the documents of a sample") == 1


@pytest.fixture
def composite(here: Path, recipe: Any) -> Path:
    """A run on a model of text and images, whose text part reads its own config."""
    model, _ = small_model("qwen2_5_vl")
    model.save_pretrained(here / NAME)
    letters().save_pretrained(here / NAME)
    rows = "".join(f'{{"prompt": "say {word}", "completion": "{word}"}}\n' for word in ("karan", "lotis", "mivel"))
    (here / "rows.jsonl").write_text(rows, encoding="utf-8")
    return recipe(  # type: ignore[no-any-return]
        model={"name": NAME, "config": None}, data={**DATA, "source": "rows.jsonl", "sequence_length": 48},
        train={"steps": 1, "batch_size": 1},
    )  # fmt: skip


def test_composite_model_trains_packed_documents_apart(composite: Path, tigon: Any) -> None:
    outcome = tigon("train", composite)
    assert outcome.code == 0, outcome.err


def test_composite_model_with_the_cache_of_its_text_part_is_refused(
    composite: Path, tigon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that the guard was made for: `use_cache` was switched off in the top config alone."""
    monkeypatch.setattr(models, "without_cache", lambda built: setattr(built.config, "use_cache", False))
    assert "mixes the documents of a sample" in tigon("train", composite).error_line()


# --- its parts --------------------------------------------------------------------------------------------------------


def sample(*lengths: int) -> Sample:
    positions = torch.cat([torch.arange(n) for n in lengths]).int()
    tokens = torch.arange(len(positions)).int() + 5
    return Sample(tokens, torch.full_like(tokens, -100), positions)


def test_longest_document_after_the_first_is_compared() -> None:
    documents = two_documents([sample(9), sample(4, 3, 6, 2), sample(30, 30)])
    assert documents is not None
    before, document = documents
    assert before.tokens_T.tolist() == [5, 6, 7, 8] and set(before.labels_T.tolist()) == {-100}
    assert document.tokens_T.tolist() == [12, 13, 14, 15, 16, 17]
    assert document.labels_T.tolist() == [-100, 13, 14, 15, 16, 17]
    assert joined(before, document).positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]


def test_documents_are_cut_and_samples_of_one_document_are_not_compared() -> None:
    documents = two_documents([sample(900, 700)])
    assert documents is not None and [len(each.tokens_T) for each in documents] == [MOST_TOKENS, MOST_TOKENS]
    assert two_documents([sample(9), sample(1, 1)]) is None


def test_bound_follows_the_format_of_the_products() -> None:
    assert eps_of(Settings.of({"train.precision": "fp32"}), tf32=False) == torch.finfo(torch.float32).eps
    assert eps_of(Settings.of({"train.precision": "amp-bf16"}), tf32=True) == torch.finfo(torch.bfloat16).eps
    assert eps_of(Settings.of({"train.precision": "amp-fp16"}), tf32=False) == torch.finfo(torch.float16).eps
    assert eps_of(Settings.of({"train.precision": "fp8"}), tf32=False) == torch.finfo(torch.float8_e4m3fn).eps
    assert eps_of(Settings.of({"train.precision": "fp32"}), tf32=True) == 2**-10
    quantized = Settings.of(
        {"train.precision": "fp32", "lora.rank": 4, "lora.quantize": True, "lora.quantize_to": "int8"}
    )
    assert eps_of(quantized, tf32=False) == 2**-7
    assert rounding(2**-7, 32, 200, 3.0) == pytest.approx(4 * 2**-7 * 0.4, rel=1e-2)
    assert rounding(2**-23, 2, 20, 5.0) < 1e-4
