"""Writes records of `tigon bench` into docs/benchmarks.md and docs/training-benchmarks.md, with their charts.

    python -m benchmarks.pages.bench RECORD.json --into docs/benchmarks.md

A page has the markers `<!-- record GPU/NAME -->` or `<!-- training GPU/NAME -->` and `<!-- end -->` for each record.
Charts go to docs/img/benchmarks/GPU/NAME.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.pages import regions
from tigon.bench import charts, record, table
from tigon.bench.record import RunRecord
from tigon.bench.report import draw, load, write_files
from tigon.bench.training import charts as train_charts
from tigon.bench.training import table as train_table
from tigon.bench.training.record import TrainRecord
from tigon.report.table import markdown_table

NO_SLOWER = 1.01
"""tigon counts as no slower than its best peer up to this ratio of their times."""
MEANINGS: Mapping[str, str] = {
    "tigon": "tigon's op with default options. Its cross entropy writes the gradient into the logits",
    "tigon new gradient": "cross entropy that allocates a new tensor for the gradient",
    "tigon one chunk": "linear cross entropy with all logits at once",
    "tigon 16-bit sums": "linear cross entropy in chunks of 1 GiB of logits; chunks' weight gradients are summed in 16 "
    "bits if there are few chunks",
    "tigon small chunks": "as tigon 16-bit sums, in chunks of 5/16 GiB",
    "tigon half ignored": "every second label is ignored: less work than the row's problem",
    "tigon frozen head": "no gradient of the head's weight: less work than the row's problem",
    "tigon eval": "the loss without gradients: less work than the row's problem",
    "tigon kept logits": "linear_logprobs that keeps up to 4 GiB of logits for backward, which saves a product",
    "tigon recomputed logits": "linear_logprobs in blocks of 512 MiB of logits, which the backward computes again",
    "tigon with entropy": "log-probabilities and entropies, both with a gradient: more work than the row's problem",
    "tigon half masked": "every second token is masked: less work than the row's problem",
    "tigon frozen weight": "no gradient of the layer's weight: less work than the row's problem",
    "eager frozen weight": "the unfused formula without the weight's gradient",
    "eager": "the unfused formula in PyTorch, as transformers writes it; the baseline of errors",
    "compile": "the unfused formula under `torch.compile`",
    "torch": "PyTorch's own op in `torch.nn.functional`",
    "liger": "liger-kernel's Triton kernels",
    "liger fp32": "liger-kernel's fused linear cross entropy with `accum_dtype=torch.float32`",
    "liger cute": "liger-kernel's CuTe kernels, which need nvidia-cutlass-dsl and a Hopper GPU or newer",
    "liger scaled": "liger-kernel's fused linear scaled cross entropy, whose loss per token is a log-probability",
    "liger portable": "the same function on other GPUs: PyTorch's own kernels, 512 tokens at a time",
    "liger jsd": "liger-kernel's fused linear Jensen-Shannon divergence: the mean over the tokens, frozen teacher",
    "quack": "quack-kernels",
    "quack base": "quack-kernels' chunked linear cross entropy with `use_scaled_exp=False`",
    "cce": "cut-cross-entropy, which skips small probabilities in the gradient",
    "cce exact": "cut-cross-entropy with `filter_eps=None`, which skips nothing",
    "trl": "TRL's chunked log-probability and divergence functions, which its trainers call",
    "products": "the three matrix products of an lm_head alone (logits and both gradients), by `torch.mm`; the "
    "bound of the rows of linear_cross_entropy and linear_logprobs",
    "two products": "a linear layer's output and the gradient of its input by `torch.mm`; the bound of the rows of "
    "lora_linear",
    "four products": "the same with the logits computed twice, for implementations that do not keep them",
    "six products": "logits of student and teacher, each computed twice, and the student's two gradients",
    "eight products": "the six products and the teacher's two gradients",
    "products once": "logits of student and teacher, each computed once, and the student's two gradients: enough for a "
    "loss that computes its gradient in the forward",
    "16-bit products": "a linear layer's output and both gradients by `torch.mm`, which fp8_linear is to beat",
}
"""What each implementation is, for the docs."""


def record_name(path: Path) -> str:
    """A record's name in the docs: the GPU's folder and the file name without its suffix."""
    return f"{path.parent.name}/{path.stem}"


def chart_folder(name: str) -> str:
    """The folder of the charts of a record's section, seen from the page."""
    return f"img/benchmarks/{name}"


def section(run: RunRecord | TrainRecord, name: str) -> str:
    """The record's section in the docs: a table and charts. Charts of sweeps are shown, bar charts folded."""
    if isinstance(run, TrainRecord):
        images = [f"![{chart}]({chart_folder(name)}/{chart}.svg)" for chart in train_charts.chart_names(run)]
        return "\n\n".join([train_table.section(run), *images])
    shown = {chart: f"![{chart}]({chart_folder(name)}/{chart}.svg)" for chart in charts.chart_names(run)}
    sweeps = [image for chart, image in shown.items() if charts.is_sweep(run, chart)]
    bars = [image for chart, image in shown.items() if not charts.is_sweep(run, chart)]
    command = f"`tigon bench report benchmarks/results/{name}.json` prints every implementation."
    parts = [
        table.provenance(run),
        table.summary(run),
        command,
        *([table.folded("Charts", "\n".join(bars))] if bars else []),
        *sweeps,
    ]
    return "\n\n".join(parts)


def overview(runs: Mapping[str, RunRecord]) -> str:
    """The table at the top of the docs: how tigon compares with its best peers in each record, by the record's name."""
    names = ("record", "rows", "no slower than the best peer", "slowest against the best peer", "targets reached")
    return markdown_table(names, [_compared(name, run) for name, run in runs.items()])


def _compared(name: str, run: RunRecord) -> list[str]:
    ratios = {}
    for row in run.rows:
        own = next((m for m in row.measurements if m.impl == "tigon"), None)
        peer = table.best_of(row, ("peer", "baseline"))
        if own and own.judged_ms(row.graph) and peer:
            ratios[row.id] = (table.median_ms(own, row) / table.median_ms(peer, row), peer.impl)
    verdicts = [table.target_result(row, target)[1] for row in run.rows for target in row.reach]
    slowest = max(ratios, key=lambda id_: ratios[id_][0], default=None)
    return [
        name,
        str(len(run.rows)),
        f"{sum(ratio <= NO_SLOWER for ratio, _ in ratios.values())} of {len(ratios)}",
        f"{slowest}: {ratios[slowest][0]:.2f} x {ratios[slowest][1]}" if slowest else "-",
        f"{sum(ok is True for ok in verdicts)} of {len(verdicts)}" if verdicts else "no targets",
    ]


def implementations(runs: Mapping[str, RunRecord]) -> str:
    """The table of the implementations that the records measure, with their meaning."""
    measured = {m.impl for run in runs.values() for row in run.rows for m in row.measurements}
    rows = [(f"**{name}**", text) for name, text in MEANINGS.items() if name in measured]
    return markdown_table(("implementation", "meaning"), rows)


def records_in(document: str) -> list[str]:
    """The names of the records that the document has markers for, in its order."""
    return re.findall(r"^<!-- record (\S+) -->$", document, re.MULTILINE)


def records_of(document: str, results: Path) -> dict[str, RunRecord]:
    """The records of kernels that the document has markers for and `results` has files for, by name."""
    paths = {name: results / f"{name}.json" for name in records_in(document)}
    return {name: record.load(path, RunRecord) for name, path in paths.items() if path.exists()}


def page(text: str, run: RunRecord | TrainRecord, path: Path) -> str:
    """The page with the section of the record at `path`, and the tables over all records or of all codes."""
    name = record_name(path)
    kind = "training" if isinstance(run, TrainRecord) else "record"
    parts = {f"{kind} {name}": section(run, name), "codes": train_table.codes()}
    if isinstance(run, RunRecord):
        runs = records_of(text, path.resolve().parent.parent)
        parts |= {"overview": overview(runs), "implementations": implementations(runs)}
    for marker, inside in parts.items():
        begin = f"<!-- {marker} -->"
        if begin in text or marker.endswith(name):
            text = regions.put(text, begin, "<!-- end -->", inside)
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("record", type=Path, metavar="RECORD.json")
    parser.add_argument("--into", type=Path, required=True, metavar="PAGE.md")
    given = parser.parse_args(arguments)
    run, document = load(given.record), given.into
    new = page(document.read_text(encoding="utf-8"), run, given.record)
    beside = document.parent / chart_folder(record_name(given.record))
    drawn = {beside / f"{chart}.svg": svg for chart, svg in draw(run).items()}
    write_files({**drawn, document: new})
    print(f"wrote the section {record_name(given.record)} of {document} and {len(drawn)} charts")


if __name__ == "__main__":
    main()
