"""What few rows teach a small chat model: the table of docs/your-data.md.

    python -m benchmarks.pages.small_data

The record is one of `python -m benchmarks small-data`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import small_rows
from benchmarks.pages import regions
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "your-data.md"
RECORD = ROOT / "benchmarks" / "results" / "nvidia-h100" / "few-rows" / "small-data.json"
UNTRAINED = 1e-20
"""A learning rate below this one trains nothing."""
_TITLES = ("rows", "weights", "packed", "batch", "epochs", "learning rate", "steps", "eval loss", "in style", "facts")


def table(cases: list[Mapping[str, Any]]) -> str:
    """The Markdown table: the model as it comes, then the cases by rows, weights, packing and steps."""

    def order(one: Mapping[str, Any]) -> tuple[Any, ...]:
        is_trained = one["learning_rate"] > UNTRAINED
        return is_trained, one["rows"], not one["lora"], one["packing"], one["epochs"], one["learning_rate"]

    return markdown_table(_TITLES, map(_row, sorted(cases, key=order)), texts=(1, 2))


def _row(case: Mapping[str, Any]) -> list[str]:
    style, facts = small_rows.in_style(case["answers"]), small_rows.facts_known(case["answers"], case["rows"])
    measured = [f"{case['eval_loss']:.2f}", f"{style[0]} of {style[1]}", f"{facts[0]} of {facts[1]}"]
    if case["learning_rate"] < UNTRAINED:
        return ["–", "as it comes", *"––––", "0", *measured]
    weights, packed = "LoRA" if case["lora"] else "all", "yes" if case["packing"] else "no"
    rate = f"{case['learning_rate']:.0e}".replace("e-0", "e-")
    settings = [str(case["rows"]), weights, packed, str(case["batch_size"]), f"{case['epochs']:g}", rate]
    return [*settings, str(case["steps"]), *measured]


def where(record: Mapping[str, Any], packages: Sequence[str] = ("torch", "transformers", "peft")) -> str:
    """The sentence that says where and with what the record was measured."""
    environment = record["environment"]
    versions = ", ".join(f"{name} {environment['versions'][name]}" for name in packages)
    commit, date = environment["tigon_commit"][:7], environment["date"]
    return f"*On one {environment['device']}: {versions}, commit {commit}, {date}.*"


def written(text: str) -> str:
    """`text` with the table of the record between its markers."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    parts = {"measured": lambda: f"{table(record['cases'])}\n\n{where(record)}"}
    return regions.written(text, "small data", parts, DOCUMENT)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
