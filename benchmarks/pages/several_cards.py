"""The tables of docs/several-gpus.md that show the record of `python -m benchmarks several-cards`.

python -m benchmarks.pages.several_cards
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from tigon.planner.gpus import GIB
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "several-gpus.md"
RECORD = ROOT / "benchmarks" / "results" / "nvidia-h100" / "several-gpus" / "several-cards.json"
PLANS = ROOT / "benchmarks" / "results" / "planned" / "several-cards.json"

SCALED = "8B, 16 layers"
"""The rows that ran on one, two and four GPUs."""


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    return rows


def losses() -> str:
    """Rows that repeat the losses of one process."""
    lines = []
    for row in (one for one in _rows() if "difference" in one):
        first, every = (f"{row[name]:.1e}" for name in ("difference", "difference_of_all"))
        right = "equal" if row["equal"] else "not equal"
        lines.append((row["name"].removeprefix("losses, "), str(len(row["cards"])), right, first, every))
    return markdown_table(("", "GPUs", "", "first loss", "all losses"), lines)


def times() -> str:
    """Rows with the widths of a real model, beside the plans of today."""
    plans: Mapping[str, Any] = json.loads(PLANS.read_text(encoding="utf-8"))["rows"]
    lines = []
    for row in (one for one in _rows() if not one["name"].startswith("losses")):
        plan = plans.get(row["name"]) or {}
        if row["status"] != "ok":
            lines.append((row["name"], str(len(row["cards"])), row["status"], "", "", ""))
            continue
        peak = row["peak_bytes"] / GIB
        lines.append(
            (
                row["name"],
                str(len(row["cards"])),
                f"{row['ms']:,.0f}",
                _beside(plan.get("ms"), row["ms"], 1),
                f"{peak:.2f}",
                _beside(plan.get("peak_bytes"), row["peak_bytes"], GIB),
            )
        )
    return markdown_table(("", "GPUs", "ms per step", "predicted", "GiB per GPU", "predicted"), lines)


def scaling() -> str:
    """The speed of one engine on one, two and four GPUs, of the same work per GPU."""
    speeds = {row["name"]: row["tokens_per_s"] for row in _rows() if "tokens_per_s" in row}
    alone = speeds[f"{SCALED}, one card"]
    lines = []
    for engine in ("DDP", "FSDP2"):
        here = {2: speeds[f"{SCALED}, {engine}"], 4: speeds[f"{SCALED}, four, {engine}"]}
        cells = (f"{speed:,.0f} ({speed / alone:.2f} x)" for speed in here.values())
        lines.append((engine, f"{alone:,.0f}", *cells))
    return markdown_table(("tokens/s", "1 GPU", "2 GPUs", "4 GPUs"), lines)


def _beside(planned: float | None, measured: float, unit: float) -> str:
    if planned is None:
        return "-"
    digits = 0 if unit == 1 else 2
    return f"{planned / unit:,.{digits}f} ({100 * (planned / measured - 1):+.1f} %)"


PARTS: Mapping[str, Callable[[], str]] = {"losses": losses, "times": times, "scaling": scaling}


def written(text: str) -> str:
    """The page with its tables written again."""
    return regions.written(text, "several cards", PARTS, DOCUMENT)


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
