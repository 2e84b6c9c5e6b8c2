"""`data.packing: null` packs, except rows that would then be trained on in few steps; a run says what was chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tiny_checkpoint import save
from trainer_helpers import records

pytest.importorskip("transformers")
from transformers import BloomConfig, LlamaConfig

from tigon.data.tokenizer import IGNORE_INDEX, Encoded
from tigon.objectives.base import Objective
from tigon.objectives.recipe_checks import loads_saved
from tigon.recipe.keys import DataConfig, Recipe, TrainConfig
from tigon.trainer.guards.auto_packing import LEAST_STEPS, chosen, without_graphs


def encoded(count: int, *, is_text: bool = False) -> list[Encoded]:
    return [Encoded([5] * 8, [IGNORE_INDEX] * 4 + [5] * 4, f"d:{i}", is_text) for i in range(count)]


def choice(documents: list[Encoded], train: dict[str, Any], **data: Any) -> tuple[bool | None, int, tuple[str, ...]]:
    recipe = Recipe(train=TrainConfig(**{"batch_size": 4, **train}), data=DataConfig(**{"sequence_length": 80, **data}))
    made, packed, line = chosen(recipe, LlamaConfig(), documents, Objective(recipe.model), 1)
    return made.data.packing, len(packed.samples), line


def test_a_model_that_mixes_the_documents_of_a_sample_gets_them_apart():
    recipe = Recipe(train=TrainConfig(epochs=1.0), data=DataConfig(sequence_length=80))
    for config, data, packs in (
        (BloomConfig(), recipe.data, False),
        (BloomConfig(), replace(recipe.data, cross_document_attention=True), True),
        (LlamaConfig(), recipe.data, True),
    ):
        asked = replace(recipe, data=data)
        made, _, lines = chosen(asked, config, encoded(80 * LEAST_STEPS), Objective(recipe.model), 1)
        assert made.data.packing is packs
        assert lines == (() if packs else ("packing  off: bloom numbers the tokens of a whole sample itself",))


def test_few_rows_are_not_packed_and_the_line_says_why():
    packing, n_samples, (line,) = choice(encoded(80), {"epochs": 3.0})
    assert (packing, n_samples) == (False, 80)
    assert line == (
        "packing  off: packed, 80 rows are 8 samples and the run has 6 steps (data.packing: true packs them)"
    )


def test_rows_that_packed_are_fewer_than_a_step_are_not_packed():
    packing, n_samples, (line,) = choice(encoded(20), {"steps": 60})
    assert (packing, n_samples) == (False, 20)
    assert line == "packing  off: packed, 20 rows are 2 samples, fewer than the 4 of a step"
    assert choice(encoded(3), {"steps": 60}) == (True, 1, ())  # the run is refused either way


@pytest.mark.parametrize(
    "documents, train, data, packs",
    [
        (encoded(40 * LEAST_STEPS), {"epochs": 1.0}, {}, True),
        (encoded(40 * LEAST_STEPS - 40), {"epochs": 1.0}, {}, False),
        (encoded(80), {"steps": 3}, {}, True),
        (encoded(80), {"epochs": 3.0}, {"packing": True}, True),
        (encoded(8000), {"epochs": 3.0}, {"packing": False}, False),
        (encoded(80, is_text=True), {"epochs": 3.0}, {}, True),
        (encoded(80), {"epochs": 3.0}, {"sequence_length": 8}, True),  # each row fills a sample
    ],
    ids=["many rows", "just too few", "given steps", "asked for", "asked not to", "text", "long rows"],
)
def test_other_runs_keep_what_they_ask_for_and_packing_otherwise(documents, train, data, packs):
    packing, n_samples, lines = choice(documents, train, **data)
    assert packing is packs
    assert bool(lines) == (not packs and data.get("packing") is None)
    assert (n_samples < len(documents)) == (packs and data.get("sequence_length") != 8)


@pytest.mark.parametrize(
    ("packing", "packs", "stays"), [(None, False, False), (None, True, True), (False, False, True)]
)
def test_graphs_that_were_chosen_before_the_rows_were_read_go_with_packing(packing, packs, stays):
    asked = Recipe(data=DataConfig(packing=packing), train=TrainConfig(steps=1, cuda_graphs=True))
    decided = replace(asked, data=replace(asked.data, packing=packs))
    recipe, settings, line = without_graphs(asked, decided, asked.settings())
    assert recipe.train.cuda_graphs == settings.train.cuda_graphs == stays
    assert bool(line) != stays and recipe.data.packing == packs


def chats(here: Any, count: int) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": "x" * (i + 1)}]}
        for i in range(count)
    ]
    (here / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_run_says_its_steps_and_a_resumed_run_makes_the_same_choice(here, recipe, tigon):
    chats(here, 24)
    save(here / "m")
    path = recipe(
        model={"name": "m", "config": None}, data={"source": "my.jsonl", "sequence_length": 120, "vocab_size": 8192},
        train={"steps": None, "epochs": 1.5, "save_steps": 6}, output={"sample_tokens": 0, "save_model": False},
    )  # fmt: skip
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    assert "packing  off: packed, 22 rows are " in outcome.out
    assert "steps    9 optimizer steps of 4 samples, 1.5 epochs; 1 row per sample; " in outcome.out
    run = here / "runs" / "r"
    data = json.loads((run / "data.json").read_text(encoding="utf-8"))
    assert records(run, "train")[-1]["step"] == data["steps"] == 9
    learned = sum(i + 2 for i in range(24) if i not in (6, 18))  # with the end of the turn; two rows are held out
    assert (data["epochs"], data["rows_per_sample"], data["learned_tokens"]) == (1.5, 1, learned)
    assert f"; {learned} learned tokens per epoch" in outcome.out
    assert loads_saved(run / "recipe.yaml").data.packing is False
    assert "the run has 9 optimizer steps, fewer than 20" in (run / "report.md").read_text(encoding="utf-8")
    (run / "summary.json").unlink()
    resumed = tigon("train", path, "--resume")
    assert resumed.code == 0 and "packing  off" in resumed.out, resumed.err


def test_packed_run_with_too_few_samples_is_told_to_unpack(here, recipe, tigon):
    chats(here, 24)
    save(here / "m")
    path = recipe(
        model={"name": "m", "config": None},
        data={"source": "my.jsonl", "sequence_length": 120, "vocab_size": 8192, "packing": True},
        train={"batch_size": 16},
    )
    line = tigon("train", path).error_line()
    assert "fewer than train.batch_size 16; set data.packing: false, which gives 22, lower train.batch_size" in line


def test_few_rows_are_told_that_one_is_kept_for_evaluation(here, recipe, tigon):
    chats(here, 4)
    save(here / "m")
    path = recipe(
        model={"name": "m", "config": None},
        data={
            "source": "my.jsonl",
            "sequence_length": 120,
            "vocab_size": 8192,
            "eval_fraction": 0.02,
            "packing": False,
        },
        train={"batch_size": 4},
    )
    line = tigon("train", path).error_line()
    assert "3 samples of 120 tokens, fewer than train.batch_size 4; set data.eval_fraction: 0, which adds" in line
