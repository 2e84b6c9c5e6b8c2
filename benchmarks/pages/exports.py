"""What each export format changes, and what quantisation-aware training recovers: the tables of docs/trained-models.md.

    python -m benchmarks.pages.exports

The records are those of `python -m benchmarks exports`, with and without `--model RUN`, and `python -m benchmarks qat`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from tigon.report.table import markdown_table
from tigon.units import in_bytes

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "trained-models.md"
FOLDER = ROOT / "benchmarks" / "results" / "cpu" / "exports"
_PACKAGES = ("torch", "transformers", "peft", "gguf", "compressed-tensors", "ik-llama-cpp-python")


def _compared(line: Mapping[str, Any]) -> list[str]:
    if "refused" in line:
        return ["refused", "–"]
    return [f"{line['same']} of {line['tokens']}", f"{line['logits_percent']:.2f}%"]


def _answer(line: Mapping[str, Any]) -> str:
    """The answer of an export, and that of llama.cpp's fork if it is another one."""
    answers = [line["answer"]]
    if (other := line.get("answer_of_llama_cpp")) is not None:
        answers.append("ik_llama.cpp: " + ("the same" if other.strip() == answers[0].strip() else other))
    return "; ".join(answers).replace("\n", " ").replace("|", "\\|")


def real(record: Mapping[str, Any]) -> str:
    """A row per format, with the answer of the exported model."""
    rows = [
        [line["format"], "–", "–", "–", "–", line["answer"]]
        if "bytes" not in line
        else [line["format"], line["reader"], in_bytes(line["bytes"]), *_compared(line), _answer(line)]
        for line in record["real"]
    ]
    titles = ("format", "read by", "size", "same next token", "logits differ by", "answer")
    return markdown_table(titles, rows, texts=(0, 1, 5))


def small(record: Mapping[str, Any]) -> str:
    """A row per format, a column per family."""
    lines = record["small"]
    families, formats = (list(dict.fromkeys(line[key] for line in lines)) for key in ("family", "format"))
    cells = {(line["family"], line["format"]): _compared(line) for line in lines}
    readers = {line["format"]: line["reader"] for line in lines if "reader" in line}
    rows = [
        [name, readers[name], *(", ".join(cells[family, name]).removesuffix(", –") for family in families)]
        for name in formats
    ]
    return markdown_table(("format", "read by", *families), rows, texts=(0, 1))


def recovered(record: Mapping[str, Any]) -> str:
    """A row per training and format, with the losses beside those of the plain run in bf16."""
    first, *others = record["lines"]
    rows = [["without", first["format"], in_bytes(first["bytes"]), f"{first['loss']:.3f}", "–", "–"]]
    cost: dict[str, float] = {}
    for line in others:
        by_sequence = [a - b for a, b in zip(line["losses"], first["losses"], strict=True)]
        size, error = statistics.mean(by_sequence), statistics.stdev(by_sequence) / len(by_sequence) ** 0.5
        is_plain, name = line["training"] == "none", line["format"]
        cost.setdefault(name, size)  # the plain export comes first
        share = "–" if is_plain else f"{(cost[name] - size) / cost[name]:.0%}"
        rows.append(
            ["without" if is_plain else f"`{name}`", name, in_bytes(line["bytes"]), f"{line['loss']:.3f}",
             f"{size:+.3f} ± {error:.3f}", share]
        )  # fmt: skip
    return markdown_table(("train.qat", "export", "size", "loss", "against bf16", "won back"), rows, texts=(0, 1))


def where(record: Mapping[str, Any]) -> str:
    """The sentence that says with what the record was measured."""
    environment = record["environment"]
    versions = ((name, environment["versions"].get(name)) for name in _PACKAGES)
    named = ", ".join(f"{name} {version}" for name, version in versions if version)
    return f"*On a CPU: {named}, commit {environment['tigon_commit'][:7]}, {environment['date']}.*"


def written(text: str) -> str:
    """`text` with the tables of the records between their markers."""

    def part(name: str, table: Callable[[Mapping[str, Any]], str]) -> Callable[[], str]:
        record = json.loads((FOLDER / name).read_text(encoding="utf-8"))
        return lambda: f"{table(record)}\n\n{where(record)}"

    parts = {"real model": part("formats.json", real), "small models": part("families.json", small),
             "recovery": part("qat.json", recovered)}  # fmt: skip
    return regions.written(text, "exports", parts, DOCUMENT)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
