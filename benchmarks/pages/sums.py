"""Writes tables and charts of docs/own-reward.md: what a small chat model learns from rewards and pairs.

    python -m benchmarks.pages.sums

The records are those of `python -m benchmarks sums`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from tigon.report.chart import new_figure, shared_legend, svg
from tigon.report.table import markdown_table
from tigon.trainer.report.charts import ACCENT, SECOND

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "own-reward.md"
RECORDS = ROOT / "benchmarks" / "results"
SHOWN: Mapping[str, tuple[tuple[str, str, bool], ...]] = {
    "grpo": (("reward", "reward", False), ("rewards/exact_answer/mean", "right answers", True)),
    "dpo": (("rewards/margins", "reward margin", False), ("rewards/accuracies", "pairs with a positive margin", True)),
    "kto": (("rewards/margins", "reward margin", False),),
}
"""Objective -> its metrics in the table, as (name, title, whether it is a share). The chart draws the first."""


def found() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The records, as (name of its chart, record)."""
    for path in sorted(RECORDS.glob("*/post-training/sums*.json")):
        yield path.stem.replace("sums", f"sums-{path.parts[-3]}"), json.loads(path.read_text(encoding="utf-8"))


def label(run: Mapping[str, Any]) -> str:
    """The objective, the largest number of the questions, and the keys of the recipe that the run replaced."""
    pairs = (change.split("=", 1) for change in run["overrides"])
    changes = [f"{key.rpartition('.')[2]} {value}" for key, value in pairs]
    return ", ".join([f"{run['objective']}, numbers to {run['largest']}", *changes])


def table(record: Mapping[str, Any]) -> str:
    rows = []
    for run in record["runs"]:
        evals = run["eval"]
        for name, title, is_share in SHOWN[run["objective"]]:
            name, last = f"eval_{name}", evals[-1]
            best = max(evals, key=lambda each: each[name])
            values = [f"{each[name]:{'.0%' if is_share else '.2f'}}" for each in (evals[0], best, last)]
            values[1] += f" (step {best['step']})"
            rows.append([label(run), title, *values, str(last["step"]), f"{run['run_s']:,.0f} s"])
    return markdown_table(("run", "on eval rows", "before", "best", "after", "steps", "time"), rows, texts=(0, 1))


def chart(record: Mapping[str, Any], name: str) -> str:
    """The first metric of each objective over steps: a line of the training rows, dots of the eval rows."""
    runs = record["runs"]
    figure, panels = new_figure(len(runs), columns=max(2, len(runs)))
    for run, axes in zip(runs, panels, strict=True):
        metric, title, _ = SHOWN[run["objective"]][0]
        train = [(line["step"], line[metric]) for line in run["train"] if metric in line]
        evals = [(line["step"], line[f"eval_{metric}"]) for line in run["eval"]]
        axes.plot(*zip(*train, strict=True), color=ACCENT, lw=1, label="training rows")
        axes.plot(*zip(*evals, strict=True), "o-", color=SECOND, ms=4, label="eval rows")
        axes.set(xlabel="step", ylabel=title)
        axes.set_title(label(run).replace(", ", "\n", 2), fontsize="small")
    shared_legend(figure, panels, loc="outside upper center", ncols=2)
    return svg(figure, name)


def where(record: Mapping[str, Any]) -> str:
    """The sentence that says where and with what the record was measured."""
    environment = record["environment"]
    versions = {name: environment["versions"].get(name) for name in ("torch", "transformers", "trl", "peft")}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    commit = f"commit {environment['tigon_commit'][:7]}, " if environment["tigon_commit"] else ""
    note = [record["note"]] if "note" in record else []
    return " ".join([f"*{environment['device']}: {packages}, {commit}{environment['date']}.", *note]) + "*"


def measured() -> str:
    parts = []
    for name, record in found():
        parts += [f"![rewards and margins over steps](img/{name}.svg)", table(record)]
        parts.append(where(record))
    return "\n\n".join(parts)


def written(text: str) -> str:
    """`text` with the figures of the records between its markers."""
    return regions.written(text, "sums", {"measured": measured}, DOCUMENT)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    for name_, record_ in found():
        image = DOCUMENT.parent / "img" / f"{name_}.svg"
        image.write_text(chart(record_, name_) + "\n", encoding="utf-8")
