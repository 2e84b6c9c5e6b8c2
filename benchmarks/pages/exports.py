"""What each export format changes: the tables of docs/ollama.md.

    python -m benchmarks.pages.exports

The record is one of `python -m benchmarks exports`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from tigon.report.table import markdown_table
from tigon.units import in_bytes

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "ollama.md"
RECORD = ROOT / "benchmarks" / "results" / "cpu" / "exports" / "formats.json"


def _compared(line: Mapping[str, Any]) -> list[str]:
    if "refused" in line:
        return ["refused", "–"]
    return [f"{line['same']} of {line['tokens']}", f"{line['logits_percent']:.2f}%"]


def real(record: Mapping[str, Any]) -> str:
    """The table of the real model, and with what it was measured."""
    return f"{answers(record)}\n\n{where(record)}"


def answers(record: Mapping[str, Any]) -> str:
    """The table of the real model: a row per format, with the answer."""
    rows = [
        [
            line["format"],
            in_bytes(line["bytes"]),
            *_compared(line),
            line["answer"].replace("\n", " ").replace("|", "\\|"),
        ]
        for line in record["real"]
    ]
    titles = ("format", "size", "same next token", "logits differ by", "answer")
    return markdown_table(titles, rows, texts=(0, 4))


def small(record: Mapping[str, Any]) -> str:
    """The table of small models: a row per format, a column per family."""
    lines = record["small"]
    families, formats = (list(dict.fromkeys(line[key] for line in lines)) for key in ("family", "format"))
    cells = {(line["family"], line["format"]): ", ".join(_compared(line)) for line in lines}
    rows = [[name, *(cells[family, name] for family in families)] for name in formats]
    return markdown_table(("format", *families), rows, texts=(0,))


def where(record: Mapping[str, Any], packages: Sequence[str] = ("torch", "transformers", "peft", "gguf")) -> str:
    """The sentence that says with what the record was measured."""
    environment = record["environment"]
    versions = ", ".join(f"{name} {environment['versions'][name]}" for name in packages)
    return f"*On a CPU: {versions}, commit {environment['tigon_commit'][:7]}, {environment['date']}.*"


def written(text: str) -> str:
    """`text` with the tables of the record between their markers."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    parts = {"real model": lambda: real(record), "small models": lambda: small(record)}
    return regions.written(text, "exports", parts, DOCUMENT)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
