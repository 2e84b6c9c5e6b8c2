"""The generated parts of the pages are those that the records, the tests and the code give."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

pytest.importorskip("transformers")
pytest.importorskip("triton", reason="the chips of the ahead-of-time tests need triton")

from benchmarks import small_rows
from benchmarks.cases.base_offload import ROWS
from benchmarks.pages import (
    base_offload,
    duel,
    engine_pairs,
    exports,
    front_page,
    head_accuracy,
    post_training_recipes,
    several_cards,
    small_data,
    sums,
    support,
)
from tigon.kernels.chips import CHIPS

needs_workflow = pytest.mark.skipif(not support.WORKFLOW.is_file(), reason="the sdist has no workflows")


@pytest.mark.parametrize(
    "generator",
    [
        base_offload,
        duel,
        engine_pairs,
        exports,
        front_page,
        head_accuracy,
        post_training_recipes,
        several_cards,
        small_data,
        sums,
        pytest.param(support, marks=needs_workflow),
    ],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_page_is_what_its_generator_writes(generator: ModuleType) -> None:
    text = generator.DOCUMENT.read_text(encoding="utf-8")
    records = [duel.load()] if generator in (duel, front_page) else []
    assert generator.written(text, *records) == text, "make pages writes it again"


# --- docs/several-gpus.md --------------------------------------------------------------------------------------------


def test_every_pair_is_either_trained_by_a_test_or_refused_with_the_next_step() -> None:
    trained = {(feature.name, engine.title) for feature, engine in engine_pairs.WORKING}
    every = {(feature.name, engine.title) for feature in engine_pairs.FEATURES for engine in engine_pairs.ENGINES}
    assert trained | engine_pairs.REFUSED.keys() == every and not trained & engine_pairs.REFUSED.keys()
    assert all("; use " in reason or "; set " in reason for reason in engine_pairs.REFUSED.values())


# --- docs/post-training-ops.md ---------------------------------------------------------------------------------------


def test_record_gives_a_row_per_case_and_op_and_says_where_it_was_measured(tmp_path: Path) -> None:
    right = {"value": 1.0, "dx": 0.0025, "dw": 0.002}
    errors = [
        {
            "dtype": dtype,
            "deviation": deviation,
            "case": "linear_kl",
            "errors": {
                "tigon": right,
                "fp32 logits": right,
                "16-bit logits": {"value": 1.0, "dx": 0.1, "dw": deviation / 100},
            },
        }
        for dtype in ("bf16", "fp16")
        for deviation in (1.0, 30.0)
    ]
    shape = {"shape": [8, 4, 16], "dtype": "bf16"}
    fast, slow = {"ms": 1.0, "mib": 2.0}, {"ms": 1.26, "mib": 2048.0}
    times = [
        {**shape, "op": "logits", "fp32 logits": fast},
        {**shape, "op": "linear_kl", "fp32 logits": slow, "16-bit logits": fast},
    ]
    versions = {"torch": "2.0", "triton": "3.0"}
    environment = {"versions": versions, "tigon_commit": "0123456789", "device": "GPU", "date": "today"}
    record = tmp_path / "heads.json"
    record.write_text(json.dumps({"environment": environment, "errors": errors, "times": times}), encoding="utf-8")
    with patch.object(head_accuracy, "RECORD", record):
        text = head_accuracy.written(head_accuracy.DOCUMENT.read_text(encoding="utf-8"))
    assert "| linear_kl | 0.25 % / 10 % | 0.25 % / 30 % |" in text
    assert "| 8 x 4 x 16, bf16: linear_kl | 1.3 | 1.0 | 2,048 | 2 |" in text and ": logits |" not in text
    assert text.count("*On one GPU: torch 2.0, triton 3.0, commit 0123456, today.*") == 2


# --- docs/your-data.md -----------------------------------------------------------------------------------------------


def test_example_has_the_rows_of_the_measurement(tmp_path: Path) -> None:
    train, held_out = small_rows.rows(80)
    small_rows.save(train, tmp_path / "rows.jsonl")
    example = small_data.ROOT / "examples" / "first-run" / "pirate.jsonl"
    assert (tmp_path / "rows.jsonl").read_bytes() == example.read_bytes()
    assert len({*train, *held_out}) == 80 + 16


def test_style_and_facts_are_counted_in_the_answers() -> None:
    answers = dict.fromkeys(small_rows.OTHER_KINDS, "Arr! Aye.") | {small_rows.OTHER_KINDS[0]: "The sky scatters it."}
    answers |= dict(small_rows.facts()[:8]) | {small_rows.facts()[1][0]: "Arr! The captain be Ann, matey."}
    assert small_rows.in_style(answers) == (9, 10)
    assert small_rows.facts_known(answers, 20) == (4, 5)
    assert small_rows.facts_known(answers, 80) == (7, 8)


# --- docs/techniques/lora.md -----------------------------------------------------------------------------------------


def test_layers_on_the_host_keep_the_limit_and_their_plan() -> None:
    record = base_offload.load()
    assert {line["row"] for line in record["steps"]} <= {*ROWS}
    for line in record["steps"]:
        measured = line["on_host"]
        assert measured["reserved_bytes"] <= line["allocator_limit_bytes"]
        for each in filter(None, (measured, line.get("resident"))):
            assert each["peak_bytes"] == pytest.approx(base_offload.plan_of(each)["peak_bytes"], rel=0.03)
        assert line.get("speed", 1.0) >= 0.6
    assert all(line["finite_with_late_copies"] for line in base_offload.load(base_offload.EQUALITY)["equality"])


def test_rows_of_small_cards_are_longer_than_unsloth_publishes() -> None:
    rows = {line["row"]: line["seq"] for line in base_offload.load()["steps"]}
    published = {"8gb": 2972, "8gb-tiles": 2972, "16gb": 40724, "24gb": 78475}
    assert all(rows[name] > tokens for name, tokens in published.items())


# --- docs/support.md -------------------------------------------------------------------------------------------------


@needs_workflow
def test_every_chip_and_card_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {chip.arch if isinstance(chip.arch, str) else f"sm_{chip.arch[0]}{chip.arch[1]}" for chip in CHIPS}
    assert {*support.targets()} <= known
    devices = {row["device"] for row in support.runs()}
    assert devices and all(any(device in line for line in support.gpus().splitlines()) for device in devices)
    monkeypatch.setattr(support, "targets", dict)
    assert "| RTX 30 | `sm_86` | no | no |" in support.gpus(), "no test compiles for it, so it is not shown as compiled"
