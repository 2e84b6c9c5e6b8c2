"""The report's charts as SVG text. No string of the user's reaches a chart, so none can be read as markup there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tigon.profile.figure import GRID, INK, MUTED, new_figure, svg

ACCENT, SECOND, BASELINE = "#c2410c", "#0f766e", MUTED


def draw(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, str]:
    """Name -> SVG of every chart that this run has data for.

    records: metrics.jsonl. summary: `unigram_entropy` in nats and the `comparison` rows.
    """
    train = [record for record in records if record["event"] == "train"]
    held_out = [record for record in records if record["event"] == "eval"]
    charts = {}
    if train:
        charts["loss"] = _loss(train, held_out, summary["unigram_entropy"])
        charts["throughput"] = _throughput(train)
    measured = [row for row in summary["comparison"] if not row["error"]]
    if measured:
        charts["comparison"] = _comparison(measured)
    return charts


def _loss(train: Sequence[Any], held_out: Sequence[Any], entropy: float) -> str:
    figure, (axes,) = new_figure(1, columns=1)
    axes.plot([r["step"] for r in train], [r["loss"] for r in train], color=ACCENT, label="training")
    if held_out:
        axes.plot([r["step"] for r in held_out], [r["eval_loss"] for r in held_out], "o-", color=SECOND, ms=4,
                  label="held out")  # fmt: skip
    axes.axhline(entropy, color=BASELINE, ls="--", lw=1, label=f"unigram entropy of the held-out text, {entropy:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.legend(frameon=False)
    return svg(figure, "loss")


def _throughput(train: Sequence[Any]) -> str:
    figure, (speed, memory) = new_figure(2, columns=2)
    steps = [r["step"] for r in train]
    speed.plot(steps, [r["tokens_per_s"] for r in train], color=ACCENT)
    speed.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    memory.plot(steps, [r["memory_bytes"] / 2**30 for r in train], color=ACCENT, label="now")
    memory.plot(steps, [r["memory_peak_bytes"] / 2**30 for r in train], color=SECOND, ls="--", label="peak so far")
    memory.set(xlabel="step", ylabel="memory (GiB)", ylim=(0, None))
    memory.legend(frameon=False)
    return svg(figure, "throughput")


def _comparison(rows: Sequence[Any]) -> str:
    figure, (memory, speed) = new_figure(2, columns=2)
    # one label a line pair, so that three fit under a bar
    labels = [row["label"].replace("all but linear", "all but\nlinear").replace("all of", "all of\n") for row in rows]
    at_rest = [row["at_rest_bytes"] / 2**20 for row in rows]
    step = [(row["peak_bytes"] - row["at_rest_bytes"]) / 2**20 for row in rows]
    memory.bar(labels, at_rest, color=GRID, label="weights and optimizer")
    bars = memory.bar(labels, step, bottom=at_rest, color=ACCENT, label="the step itself")
    memory.bar_label(bars, labels=[f"{row['peak_bytes'] / 2**20:,.0f}" for row in rows], padding=2, color=INK)
    memory.set(ylabel="peak memory of a step (MiB)", ylim=(0, max(r["peak_bytes"] for r in rows) / 2**20 * 1.3))
    memory.legend(frameon=False, loc="upper right")
    bars = speed.bar(labels, [row["tokens_per_s"] for row in rows], color=SECOND)
    speed.bar_label(bars, fmt="{:,.0f}", padding=2, color=INK)
    speed.set(ylabel="tokens/s", ylim=(0, max(row["tokens_per_s"] for row in rows) * 1.15))
    return svg(figure, "comparison")
