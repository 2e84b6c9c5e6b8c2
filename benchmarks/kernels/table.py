"""A record of kernels as Markdown, with its targets, and the tables over all records."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.kernels.suites import targets_of
from tigon.bench import record
from tigon.bench.record import RunRecord
from tigon.bench.table import SUMMARY, best_of, details, median_ms, summary_cells
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
_TARGET = 5
"""The place of the targets among the columns of the summary."""


def summary(run: RunRecord) -> str:
    """A line per row of the record."""
    rows = []
    for row in run.rows:
        results = [target.result(row)[0] for target in targets_of(run.suite, row.id)]
        cells = summary_cells(row)
        rows.append([*cells[:_TARGET], "<br>".join(results) or "-", *cells[_TARGET:]])
    return markdown_table((*SUMMARY[:_TARGET], "target: measured", *SUMMARY[_TARGET:]), rows)


def provenance(run: RunRecord) -> str:
    """One paragraph: card, versions, commit, date, ceilings, and what is missing."""
    left_out = f" Not measured: {', '.join(run.not_run)}." if run.not_run else ""
    return record.provenance(run, [(row.tigon_commit, row.date) for row in run.rows]) + left_out


def section(run: RunRecord) -> str:
    """The text between the markers of a record in the docs, without its charts."""
    every = "\n\n".join(map(details, run.rows))
    return "\n".join((provenance(run), "", summary(run), "", folded("Every implementation", every)))


def folded(title: str, text: str) -> str:
    """Markdown that is folded until it is clicked."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def overview(runs: Mapping[str, RunRecord]) -> str:
    """The table at the top of the docs: how tigon compares with its best peers in each record, by the record's name."""
    names = ("record", "rows", "no slower than the best peer", "slowest against the best peer", "targets reached")
    return markdown_table(names, [_compared(name, run) for name, run in runs.items()])


def _compared(name: str, run: RunRecord) -> list[str]:
    ratios = {}
    for row in run.rows:
        own = next((m for m in row.measurements if m.impl == "tigon"), None)
        peer = best_of(row, ("peer", "baseline"))
        if own and own.judged_ms(row.graph) and peer:
            ratios[row.id] = (median_ms(own, row) / median_ms(peer, row), peer.impl)
    verdicts = [target.result(row)[1] for row in run.rows for target in targets_of(run.suite, row.id)]
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
