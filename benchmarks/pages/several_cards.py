"""The tables of docs/several-gpus.md that show the record of `python -m benchmarks several-cards`.

python -m benchmarks.pages.several_cards
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from benchmarks.several_cards.rows import every
from tigon.planner.gpus import GIB
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "several-gpus.md"
RECORD = ROOT / "benchmarks" / "results" / "nvidia-h100" / "several-gpus" / "several-cards.json"
PLANS = ROOT / "benchmarks" / "results" / "planned" / "several-cards.json"

_HALF, _LORA = "8B, 16 layers", "8B, LoRA"
SCALED = (
    ("DDP", f"{_HALF}, one card", f"{_HALF}, DDP", f"{_HALF}, four, DDP"),
    ("FSDP2", f"{_HALF}, one card", f"{_HALF}, FSDP2", f"{_HALF}, four, FSDP2"),
    ("8B, LoRA, DDP", f"{_LORA}, one card", f"{_LORA}, DDP", f"{_LORA}, four, DDP"),
    ("8B, LoRA, FSDP2", f"{_LORA}, one card", f"{_LORA}, FSDP2", f"{_LORA}, four, FSDP2"),
)
"""What runs on one, two and four GPUs: a title, and the names of the rows. Rows that no card has run are left out."""
_IN_FP32 = "8B, 8 layers, LoRA, FSDP2"
"""The row was measured when FSDP2 held frozen weights in fp32, which `lora.base: fp32` asks for today."""


def rows() -> list[dict[str, Any]]:
    """The rows of the record, with the names and the recipes that they have today."""
    found: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    for row in found:
        if row["name"] == _IN_FP32:
            row["name"] += ", lora.base: fp32"
            row["recipe"]["lora"]["base"] = "fp32"
    return found


def losses() -> str:
    """Rows that repeat the losses of one process."""
    lines = []
    for row in (one for one in rows() if "difference" in one):
        first, every = (f"{row[name]:.1e}" for name in ("difference", "difference_of_all"))
        right = "equal" if row["equal"] else "not equal"
        lines.append((row["name"].removeprefix("losses, "), str(len(row["cards"])), right, first, every))
    return markdown_table(("", "GPUs", "", "first loss", "all losses"), lines)


def times() -> str:
    """Rows with the widths of a real model, beside the plans of today."""
    plans: Mapping[str, Any] = json.loads(PLANS.read_text(encoding="utf-8"))["rows"]
    lines = []
    for row in (one for one in rows() if not one["name"].startswith("losses") and one["status"] == "ok"):
        plan = plans.get(row["name"]) or {}
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


def planned() -> str:
    """The plans of timed rows that no card has run, or that were refused when they ran."""
    ran = {row["name"] for row in rows() if row["status"] == "ok"}
    plans: Mapping[str, Any] = json.loads(PLANS.read_text(encoding="utf-8"))["rows"]
    lines = [
        (name, str(row.cards), f"{plan['ms']:,.0f}", f"{plan['peak_bytes'] / GIB:.2f}")
        for name, row in ((row.name, row) for row in every())
        if name not in ran and "ms" in (plan := plans.get(name) or {})
    ]
    return markdown_table(("not run", "GPUs", "ms per step, predicted", "GiB per GPU, predicted"), lines)


def scaling() -> str:
    """The speed of one engine on one, two and four GPUs, of the same work per GPU."""
    speeds = {row["name"]: row["tokens_per_s"] for row in rows() if "tokens_per_s" in row}
    lines = []
    for title, *names in SCALED:
        found = [speeds[name] for name in names if name in speeds]
        if len(found) == len(names):
            rest = (f"{speed:,.0f} ({speed / found[0]:.2f} x)" for speed in found[1:])
            lines.append((title, f"{found[0]:,.0f}", *rest))
    return markdown_table(("tokens/s", "1 GPU", "2 GPUs", "4 GPUs"), lines)


def _beside(planned: float | None, measured: float, unit: float) -> str:
    if planned is None:
        return "-"
    digits = 0 if unit == 1 else 2
    return f"{planned / unit:,.{digits}f} ({100 * (planned / measured - 1):+.1f} %)"


PARTS: Mapping[str, Callable[[], str]] = {"losses": losses, "times": times, "planned": planned, "scaling": scaling}


def written(text: str) -> str:
    """The page with its tables written again."""
    return regions.written(text, "several cards", PARTS, DOCUMENT)


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
