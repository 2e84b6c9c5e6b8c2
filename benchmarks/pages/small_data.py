"""What few rows teach a small chat model: the table of docs/your-data.md.

    python -m benchmarks.pages.small_data

The record is one of `python -m benchmarks small-data`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import small_rows
from benchmarks.pages import regions

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "your-data.md"
RECORD = ROOT / "benchmarks" / "results" / "nvidia-h100" / "few-rows" / "small-data.json"
UNTRAINED = 1e-20
"""A learning rate below this one trains nothing."""
_HEADER = "| rows | weights | packed | batch | epochs | learning rate | steps | eval loss | in style | facts |"
_LINE = "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|"


def table(cases: list[Mapping[str, Any]]) -> str:
    """The Markdown table: the model as it comes, then the cases by rows, weights, packing and steps."""
    ordered = sorted(cases, key=lambda one: (one["learning_rate"] > UNTRAINED, one["rows"], not one["lora"],
                                             one["packing"], one["epochs"], one["learning_rate"]))  # fmt: skip
    return "\n".join([_HEADER, _LINE, *map(_row, ordered)])


def _row(case: Mapping[str, Any]) -> str:
    style, facts = small_rows.in_style(case["answers"]), small_rows.facts_known(case["answers"], case["rows"])
    measured = f"{case['eval_loss']:.2f} | {style[0]} of {style[1]} | {facts[0]} of {facts[1]} |"
    if case["learning_rate"] < UNTRAINED:
        return f"| – | as it comes | – | – | – | – | 0 | {measured}"
    weights, packed = "LoRA" if case["lora"] else "all", "yes" if case["packing"] else "no"
    settings = (
        case["rows"],
        weights,
        packed,
        case["batch_size"],
        f"{case['epochs']:g}",
        f"{case['learning_rate']:.0e}",
    )
    return f"| {' | '.join(map(str, settings))} | {case['steps']} | {measured}".replace("e-0", "e-")


def where(record: Mapping[str, Any]) -> str:
    """The sentence that says where and with what the record was measured."""
    environment = record["environment"]
    versions = ", ".join(f"{name} {environment['versions'][name]}" for name in ("torch", "transformers", "peft"))
    commit, date = environment["tigon_commit"][:7], environment["date"]
    return f"*On one {environment['device']}: {versions}, commit {commit}, {date}.*"


def written(text: str) -> str:
    """`text` with the table of the record between its markers."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    parts = {"measured": lambda: f"{table(record['cases'])}\n\n{where(record)}"}
    return regions.written(text, "small data", parts, DOCUMENT)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
