"""The errors of the ops over an lm_head on peaked logits, and the cost of fp32 logits: two tables of
docs/post-training-ops.md.

    python -m benchmarks.pages.head_accuracy

The record is one of `python -m benchmarks head-accuracy`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from benchmarks.pages.small_data import where
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "post-training-ops.md"
RECORD = ROOT / "benchmarks" / "results" / "nvidia-h100" / "accuracy" / "heads.json"
_DTYPE = "bf16"


def errors(rows: Sequence[Mapping[str, Any]]) -> str:
    """The largest error of a gradient by case and deviation, in percent: the op's, and with logits in 16 bits."""
    of_dtype = [row for row in rows if row["dtype"] == _DTYPE]
    deviations = sorted({row["deviation"] for row in of_dtype})
    rows_shown = []
    for name in dict.fromkeys(row["case"] for row in of_dtype):
        by_deviation = {row["deviation"]: row["errors"] for row in of_dtype if row["case"] == name}
        cells = [
            " / ".join(_percent(_largest(by_deviation[d][variant])) for variant in ("tigon", "16-bit logits"))
            for d in deviations
        ]
        rows_shown.append([name, *cells])
    titles = [f"{_DTYPE}, largest error of a gradient", *(f"std {d:g}" for d in deviations)]
    return markdown_table(titles, rows_shown, texts=(0,))


def _largest(results: Mapping[str, float]) -> float:
    return max(error for name, error in results.items() if name != "value")


def _percent(error: float) -> str:
    if math.isnan(error):
        return "NaN"
    return f"{100 * error:.2g} %" if error < 1 else "–"


def times(rows: Sequence[Mapping[str, Any]]) -> str:
    """The time and memory of each op, with logits in fp32 and in 16 bits."""
    titles = ("forward and backward", "ms", "ms, 16-bit logits", "MiB", "MiB, 16-bit logits")
    shown = []
    for row in rows:
        if "16-bit logits" not in row:
            continue
        ours, narrow = row["fp32 logits"], row["16-bit logits"]
        size = " x ".join(map(str, row["shape"]))
        cells = (f"{ours['ms']:.1f}", f"{narrow['ms']:.1f}", f"{ours['mib']:,.0f}", f"{narrow['mib']:,.0f}")
        shown.append([f"{size}, {row['dtype']}: {row['op']}", *cells])
    return markdown_table(titles, shown, texts=(0,))


def written(text: str) -> str:
    """`text` with the tables of the record between their markers."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))

    def part(table: Any, field: str) -> str:
        return f"{table(record[field])}\n\n{where(record, ('torch', 'triton'))}"

    parts = {"errors": lambda: part(errors, "errors"), "times": lambda: part(times, "times")}
    return regions.written(text, "head accuracy", parts, DOCUMENT)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
