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
RECORDS = tuple(
    ROOT / "benchmarks" / "results" / "nvidia-h100" / "several-gpus" / f"several-cards{call}.json"
    for call in ("", "-four", "-two", "-two-b")
)
"""The records of the calls, oldest first. A row shows what its newest call measured."""
PLANS = ROOT / "benchmarks" / "results" / "planned" / "several-cards.json"

_HALF, _LORA, _WHOLE = "8B, 16 layers", "8B, LoRA", "8B"
SCALED = (
    ("16 layers of the 8B, DDP", f"{_HALF}, one card", f"{_HALF}, DDP", f"{_HALF}, four, DDP"),
    ("16 layers of the 8B, FSDP2", f"{_HALF}, one card", f"{_HALF}, FSDP2", f"{_HALF}, four, FSDP2"),
    ("8B, FSDP2", "", f"{_WHOLE}, FSDP2", f"{_WHOLE}, four, FSDP2"),
    ("8B, LoRA, DDP", f"{_LORA}, one card", f"{_LORA}, DDP", f"{_LORA}, four, DDP"),
    ("8B, LoRA, FSDP2", f"{_LORA}, one card", f"{_LORA}, FSDP2", f"{_LORA}, four, FSDP2"),
)
"""What ran on one, two and four GPUs: a title, and the name of each row, or none."""


def rows() -> list[dict[str, Any]]:
    """The rows of all calls. A row that did not end well keeps what an earlier call measured."""
    found: dict[str, dict[str, Any]] = {}
    for record in RECORDS:
        for row in json.loads(record.read_text(encoding="utf-8"))["rows"]:
            if row["status"] == "ok" or found.get(row["name"], {}).get("status") != "ok":
                found[row["name"]] = row
    order = {row.name: place for place, row in enumerate(every())}
    return sorted(found.values(), key=lambda row: (order[row["name"]], row["name"]))


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
    for row in (one for one in rows() if not one["name"].startswith("losses")):
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
    speeds = {row["name"]: row["tokens_per_s"] for row in rows() if "tokens_per_s" in row}
    lines = []
    for title, *names in SCALED:
        found = [speeds.get(name) for name in names]
        least = next((speed for speed in found if speed is not None), None)
        cells = [
            "-" if speed is None else f"{speed:,.0f}" + (f" ({speed / least:.2f} x)" if speed != least else "")
            for speed in found
        ]
        if least is not None:
            lines.append((title, *cells))
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
