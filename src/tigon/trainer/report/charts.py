"""Draws the report's charts as SVG text. Charts contain no text of the user's, so they cannot contain its markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tigon.profiler.render.figure import GRID, INK, MUTED, new_figure, svg

ACCENT, SECOND, BASELINE = "#c2410c", "#0f766e", MUTED


def draw(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, str]:
    """Draw every chart that this run has data for.

    Args:
        records: The records of metrics.jsonl.
        summary: A mapping with `unigram_entropy` in nats and the rows of `comparison`.

    Returns:
        The SVG text of each chart by its name.
    """
    train = [record for record in records if record["event"] == "train"]
    eval_records = [record for record in records if record["event"] == "eval"]
    charts = {}
    if train and "head1_loss" in train[0]:  # the loss would be the sum over the heads
        charts["heads"] = _heads(train, eval_records, summary["unigram_entropy"])
    elif train:
        charts["loss"] = _loss(train, eval_records, summary["unigram_entropy"])
    if train:
        charts["throughput"] = _throughput(train)
    measured = [row for row in summary["comparison"] if not row["error"]]
    if measured:
        charts["comparison"] = _comparison(measured)
    return charts


def _loss(train: Sequence[Any], eval_records: Sequence[Any], entropy: float) -> str:
    figure, (axes,) = new_figure(1, columns=1)
    axes.plot([r["step"] for r in train], [r["loss"] for r in train], color=ACCENT, label="training")
    if eval_records:
        axes.plot([r["step"] for r in eval_records], [r["eval_loss"] for r in eval_records], "o-", color=SECOND, ms=4,
                  label="eval")  # fmt: skip
    axes.axhline(entropy, color=BASELINE, ls="--", lw=1, label=f"unigram entropy of the eval text, {entropy:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    return svg(figure, "loss")


def _heads(train: Sequence[Any], eval_records: Sequence[Any], entropy: float) -> str:
    """Loss and accuracy of each head, and of the model if it is trained too."""
    figure, (loss, top) = new_figure(2, columns=2)
    names = [name.removesuffix("_loss") for name in train[0] if name.endswith("_loss")]
    colours = (BASELINE, ACCENT, SECOND, "#4338ca", "#a16207", "#be185d")
    for number, name in enumerate(names, start=0 if names[0] == "model" else 1):
        colour, label = colours[number % len(colours)], "model" if name == "model" else f"head {name[4:]}"
        for axes, key, scale in ((loss, f"{name}_loss", 1), (top, f"{name}_top1", 100)):
            points = [(r["step"], scale * r[key]) for r in train if key in r]
            axes.plot(*zip(*points, strict=True), color=colour, label=label)
            eval_points = [(r["step"], scale * r[key]) for r in eval_records if key in r]
            if eval_points:
                axes.plot(*zip(*eval_points, strict=True), "o", color=colour, ms=4)
    if any(f"{name}_loss" in r for r in eval_records for name in names):
        loss.plot([], [], "o", color=INK, ms=4, label="eval")
    loss.axhline(entropy, color=BASELINE, ls="--", lw=1, label="unigram entropy")
    loss.set(xlabel="step", ylabel="loss (nats per token)")
    top.set(xlabel="step", ylabel="first guess correct (%)", ylim=(0, None))
    handles, labels = loss.get_legend_handles_labels()  # one legend above both charts, which covers no line
    figure.legend(handles, labels, frameon=False, loc="outside upper center", ncols=min(len(labels), 6))
    return svg(figure, "heads")


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
    # Break long labels into two lines, so that three of them fit under the bars.
    labels = [row["label"].replace("all but linear", "all but\nlinear").replace("all of", "all of\n") for row in rows]
    at_rest = [row["at_rest_bytes"] / 2**20 for row in rows]
    step = [(row["peak_bytes"] - row["at_rest_bytes"]) / 2**20 for row in rows]
    memory.bar(labels, at_rest, color=GRID, label="weights and optimizer")
    bars = memory.bar(labels, step, bottom=at_rest, color=ACCENT, label="step")
    memory.bar_label(bars, labels=[f"{row['peak_bytes'] / 2**20:,.0f}" for row in rows], padding=2, color=INK)
    memory.set(ylabel="peak memory of a step (MiB)", ylim=(0, max(r["peak_bytes"] for r in rows) / 2**20 * 1.3))
    memory.legend(frameon=False, loc="upper right")
    bars = speed.bar(labels, [row["tokens_per_s"] for row in rows], color=SECOND)
    speed.bar_label(bars, fmt="{:,.0f}", padding=2, color=INK)
    speed.set(ylabel="tokens/s", ylim=(0, max(row["tokens_per_s"] for row in rows) * 1.15))
    return svg(figure, "comparison")
