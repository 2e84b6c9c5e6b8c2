"""Steps with frozen layers on the host: the table of docs/techniques/lora.md.

    python -m benchmarks.pages.base_offload

The record is one of `python -m benchmarks base-offload`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from benchmarks.pages.small_data import where
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "techniques" / "lora.md"
RESULTS = ROOT / "benchmarks" / "results"
RECORD = RESULTS / "nvidia-h200" / "lora" / "base-offload.json"
EQUALITY = RESULTS / "nvidia-h100" / "lora" / "base-offload.json"
"""The record that compares losses and gradients."""
GIB = 1 << 30
_TITLES = (
    "model, `train.checkpointing`",
    "tokens, rank",
    "limit, GiB",
    "peak GiB: measured, planned",
    "ms per step: measured, planned",
    "without the key: peak GiB, ms",
    "share of its speed",
    "host GiB: layers, planned",
)


def load(path: Path = RECORD) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def plan_of(measured: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plan of a measurement. Rows that were planned again have the newer plan."""
    plan: Mapping[str, Any] = measured.get("replanned", measured["predicted"])
    return plan


def table(record: Mapping[str, Any]) -> str:
    """A row per line of the record. The share is that of the speed without the key."""
    return markdown_table(_TITLES, map(_row, record["steps"]), texts=(0,))


def _row(line: Mapping[str, Any]) -> list[str]:
    ours, resident = line["on_host"], line.get("resident")
    plan = plan_of(ours)
    model = f"{line['model']}, `{line['checkpointing']}`" + (", tiles" if line["tiled"] else "")
    peaks, times = _peaks(ours), f"{ours['ms']:,.0f}, {plan['ms']:,.0f}"
    without = f"{resident['peak_bytes'] / GIB:.2f}, {resident['ms']:,.0f}" if resident else "not measured"
    speed = f"{line['speed']:.2f}" if resident else "–"
    host = f"{line['layers_bytes'] / GIB:.2f}, {plan['host_bytes'] / GIB:.1f}"
    size = f"{line['seq']:,}, {line['rank']}"
    return [model, size, f"{line['limit_bytes'] / GIB:.1f}", peaks, times, without, speed, host]


def _peaks(measured: Mapping[str, Any]) -> str:
    return ", ".join(f"{one['peak_bytes'] / GIB:.2f}" for one in (measured, plan_of(measured)))


def written(text: str) -> str:
    """`text` with the table of the record between its markers."""
    record = load()
    machine = where(record, ("torch", "transformers", "peft", "bitsandbytes"))
    return regions.written(text, "base-offload", {"steps": lambda: f"{table(record)}\n\n{machine}"}, DOCUMENT)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
