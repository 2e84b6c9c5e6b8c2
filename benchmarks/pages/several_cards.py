"""The tables of docs/several-gpus.md that show the records of `python -m benchmarks several-cards`.

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
_RESULTS = ROOT / "benchmarks" / "results"
RECORDS: Mapping[str, Path] = {
    card: _RESULTS / f"nvidia-{card}" / "several-gpus" / "several-cards.json" for card in ("h200", "h100")
}
PLANS: Mapping[str, Path] = {
    "h200": _RESULTS / "planned" / "several-cards-h200.json",
    "h100": _RESULTS / "planned" / "several-cards.json",
}
"""The plans of the rows on each card, those of today."""

_HALF, _LORA = "8B, 16 layers", "8B, LoRA"
SCALED = (
    ("8B, 16 layers, DDP", f"{_HALF}, one card", f"{_HALF}, DDP", f"{_HALF}, four, DDP"),
    ("8B, 16 layers, FSDP2", f"{_HALF}, one card", f"{_HALF}, FSDP2", f"{_HALF}, four, FSDP2"),
    ("8B, LoRA, DDP", f"{_LORA}, one card", f"{_LORA}, DDP", f"{_LORA}, four, DDP"),
    ("8B, LoRA, FSDP2", f"{_LORA}, one card", f"{_LORA}, FSDP2", f"{_LORA}, four, FSDP2"),
)
"""What runs on one, two and four GPUs: a title, and the names of the rows. Cells that no card has run are empty."""
_IN_FP32 = "8B, 8 layers, LoRA, FSDP2"
"""The row was measured when FSDP2 held frozen weights in fp32, which `lora.base: fp32` asks for today."""


def rows(card: str) -> list[dict[str, Any]]:
    """The rows of a card's record, with the names and the recipes that they have today."""
    found: list[dict[str, Any]] = json.loads(RECORDS[card].read_text(encoding="utf-8"))["rows"]
    for row in found:
        if card == "h100" and row["name"] == _IN_FP32:
            row["name"] += ", lora.base: fp32"
            row["recipe"]["lora"]["base"] = "fp32"
    return found


def plans(card: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(PLANS[card].read_text(encoding="utf-8"))["rows"]
    return found


def losses() -> str:
    """Rows that repeat the losses of one process."""
    lines = []
    for card in RECORDS:
        for row in (one for one in rows(card) if "difference" in one):
            norms = row.get("difference_of_norms")
            figures = (row["difference"], row["difference_of_all"], norms)
            shown = ("" if figure is None else f"{figure:.1e}" for figure in figures)
            right = "equal" if row["equal"] else "not equal"
            lines.append((row["name"].removeprefix("losses, "), _cards(row, card), right, *shown))
    return markdown_table(("", "GPUs", "", "first loss", "all losses", "gradient norms"), lines)


def times() -> str:
    """Rows with the widths of a real model, beside the plans of today."""
    lines = []
    for card in RECORDS:
        planned = plans(card)
        for row in (one for one in rows(card) if not one["name"].startswith("losses") and one["status"] == "ok"):
            plan = planned.get(row["name"]) or {}
            peak = row["peak_bytes"] / GIB
            lines.append(
                (
                    row["name"] + _mark(row),
                    _cards(row, card),
                    f"{row['ms']:,.0f}",
                    _beside(plan.get("ms"), row["ms"], 1),
                    f"{peak:.2f}",
                    _beside(plan.get("peak_bytes"), row["peak_bytes"], GIB),
                )
            )
    return markdown_table(("", "GPUs", "ms per step", "predicted", "GiB per GPU", "predicted"), lines)


def planned() -> str:
    """The plans of timed rows that no card has run, or that were refused when they ran."""
    ran = {row["name"] for card in RECORDS for row in rows(card) if row["status"] == "ok"}
    on_h100 = plans("h100")
    lines = [
        (name, str(row.cards), f"{plan['ms']:,.0f}", f"{plan['peak_bytes'] / GIB:.2f}")
        for name, row in ((row.name, row) for row in every())
        if name not in ran and "ms" in (plan := on_h100.get(name) or {})
    ]
    return markdown_table(("not run", "H100s", "ms per step, predicted", "GiB per GPU, predicted"), lines)


def scaling() -> str:
    """The speed of one engine on one, two and four GPUs of one kind, of the same work per GPU."""
    lines = []
    for card in RECORDS:
        measured = {row["name"]: row for row in rows(card) if "tokens_per_s" in row}
        for title, *names in SCALED:
            found = [measured.get(name) for name in names]
            if found[0] is not None and any(found[1:]):
                one = found[0]["tokens_per_s"]
                rest = (
                    "" if row is None else f"{_speed(row)} ({row['tokens_per_s'] / one:.2f} x)" for row in found[1:]
                )
                lines.append((f"{title}, {card.upper()}", _speed(found[0]), *rest))
    return markdown_table(("tokens/s", "1 GPU", "2 GPUs", "4 GPUs"), lines)


def _speed(row: Mapping[str, Any]) -> str:
    return f"{row['tokens_per_s']:,.0f}{_mark(row)}"


def _mark(row: Mapping[str, Any]) -> str:
    """Of a row beside which other processes imported packages."""
    return " (1)" if "beside" in row else ""


def _cards(row: Mapping[str, Any], card: str) -> str:
    return f"{len(row['cards'])}x{card.upper()}"


def _beside(planned: float | None, measured: float, unit: float) -> str:
    if planned is None:
        return "-"
    digits = 0 if unit == 1 else 2
    return f"{planned / unit:,.{digits}f} ({100 * (planned / measured - 1):+.1f}%)"


PARTS: Mapping[str, Callable[[], str]] = {"losses": losses, "times": times, "planned": planned, "scaling": scaling}


def written(text: str) -> str:
    """The page with its tables written again."""
    return regions.written(text, "several cards", PARTS, DOCUMENT)


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
