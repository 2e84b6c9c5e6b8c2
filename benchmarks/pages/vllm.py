"""What exports in 8 and 4 bits change, and what quantisation-aware training recovers: the tables of docs/vllm.md.

    python -m benchmarks.pages.vllm

The records are those of `python -m benchmarks exports --only ...` and `python -m benchmarks qat`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.pages import exports, regions
from tigon.report.table import markdown_table
from tigon.units import in_bytes

DOCUMENT = exports.ROOT / "docs" / "vllm.md"
FOLDER = exports.RECORD.parent


def recovered(record: Mapping[str, Any]) -> str:
    """The table of training with and without rounded weights."""
    lines = record["lines"]
    rows = [
        [one["training"], one["format"], in_bytes(one["bytes"]), f"{one['loss']:.3f}",
         f"{one['loss'] - lines[0]['loss']:+.3f}"]
        for one in lines
    ]  # fmt: skip
    return markdown_table(("training", "export", "size", "loss", "difference"), rows, texts=(0, 1))


def written(text: str) -> str:
    """`text` with the tables of the records between their markers."""
    packages = ("torch", "transformers", "peft", "compressed-tensors")

    def part(name: str, table: Callable[[Mapping[str, Any]], str]) -> Callable[[], str]:
        record = json.loads((FOLDER / name).read_text(encoding="utf-8"))
        return lambda: f"{table(record)}\n\n{exports.where(record, packages)}"

    parts = {"formats": part("compressed.json", exports.answers), "recovery": part("qat.json", recovered)}
    return regions.written(text, "vllm", parts, DOCUMENT)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
