"""docs/post-training.md: the errors of heads and their cost, as the record gives them."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

from benchmarks.pages import head_accuracy

ERRORS = [
    {
        "dtype": dtype, "deviation": deviation, "case": "linear_kl",
        "errors": {
            "tigon": {"value": 1.0, "dx": 0.0025, "dw": 0.002},
            "fp32 logits": {"value": 1.0, "dx": 0.0025, "dw": 0.002},
            "16-bit logits": {"value": 1.0, "dx": 0.1, "dw": deviation / 100},
        },
    }
    for dtype in ("bf16", "fp16") for deviation in (1.0, 30.0)
]  # fmt: skip
TIMES = [
    {"shape": [8, 4, 16], "dtype": "bf16", "op": "logits", "fp32 logits": {"ms": 1.0, "mib": 2.0}},
    {
        "shape": [8, 4, 16], "dtype": "bf16", "op": "linear_kl", "fp32 logits": {"ms": 1.26, "mib": 2048.0},
        "16-bit logits": {"ms": 1.0, "mib": 2.0},
    },
]  # fmt: skip


def test_tables_are_those_of_the_record() -> None:
    text = head_accuracy.DOCUMENT.read_text(encoding="utf-8")
    assert head_accuracy.written(text) == text, "make pages writes it again"


def test_record_gives_a_row_per_case_and_op_and_says_where_it_was_measured(tmp_path: Path) -> None:
    environment = {
        "versions": {"torch": "2.0", "triton": "3.0"}, "tigon_commit": "0123456789", "device": "GPU", "date": "today"
    }  # fmt: skip
    record = tmp_path / "heads.json"
    record.write_text(json.dumps({"environment": environment, "errors": ERRORS, "times": TIMES}), encoding="utf-8")
    with patch.object(head_accuracy, "RECORD", record):
        text = head_accuracy.written(head_accuracy.DOCUMENT.read_text(encoding="utf-8"))
    assert "| linear_kl | 0.25 % / 10 % | 0.25 % / 30 % |" in text
    assert "| 8 x 4 x 16, bf16: linear_kl | 1.3 | 1.0 | 2,048 | 2 |" in text and ": logits |" not in text
    assert text.count("*On one GPU: torch 2.0, triton 3.0, commit 0123456, today.*") == 2
    assert head_accuracy.NO_RECORD not in text
