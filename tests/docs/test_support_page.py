"""docs/support.md says what the tests, the workflow and the records say."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("triton", reason="the chips of the ahead-of-time tests need triton")

from benchmarks.pages import support
from tigon.kernels.chips import CHIPS

if not support.WORKFLOW.is_file():
    pytest.skip("the sdist has no workflows", allow_module_level=True)


def test_tables_are_those_of_the_tests_the_workflow_and_the_records() -> None:
    text = support.DOCUMENT.read_text(encoding="utf-8")
    assert support.written(text) == text, "make pages writes them again"


def test_every_chip_that_is_compiled_for_has_a_row() -> None:
    known = {chip.arch if isinstance(chip.arch, str) else f"sm_{chip.arch[0]}{chip.arch[1]}" for chip in CHIPS}
    assert {*support.targets()} <= known


def test_every_card_of_a_record_has_a_row() -> None:
    devices = {row["device"] for row in support.runs()}
    assert devices and all(any(device in line for line in support.gpus().splitlines()) for device in devices)


def test_chip_that_no_test_compiles_for_is_not_shown_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "targets", dict)
    assert "| RTX 30 | `sm_86` | no | no |" in support.gpus()
