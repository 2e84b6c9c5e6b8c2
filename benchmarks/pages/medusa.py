"""The measured part of docs/medusa.md, from the records: `python -m benchmarks.pages.medusa`.

A record is the results.json of `tigon sweep recipes/medusa/context.sweep.yaml` (or two-gpus.sweep.yaml), kept as
benchmarks/results/GPU/medusa/NAME.json. Between its markers the page gets the record's machine, a chart and a table.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from benchmarks.pages.study import load
from tigon.report.chart import new_figure, svg
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
DOCUMENT, RECORDS, IMAGES = ROOT / "docs" / "medusa.md", ROOT / "benchmarks" / "results", Path("img/medusa")
NAMES = ("medusa", "medusa-two-gpus")
AXIS = "data.sequence_length"
GIB = 1 << 30
COLOURS = {"eager": "#6b7280", "fused": "#c2410c"}

Record = Mapping[str, Any]


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def points(record: Record) -> dict[tuple[str, int], Record]:
    """(variant, tokens per sequence) -> point"""
    return {(point["variant"], int(point["axes"][AXIS])): point for point in record["points"]}


def groups(record: Record) -> dict[str, list[str]]:
    """`stage 1, 3 heads` -> its variants, eager before fused."""
    grouped: dict[str, list[str]] = {}
    for variant in record["variants"]:
        group, _, _ = variant.rpartition(", ")
        grouped.setdefault(group, []).append(variant)
    return grouped


def cell(point: Record | None) -> tuple[str, str]:
    """(peak, tokens/s) of a point, or its status if it did not run."""
    if point is None:
        return "", ""
    if point["status"] != "ok":
        return point["status"], ""
    return f"{point['peak_allocated_bytes'] / GIB:.1f}", f"{point['tokens_per_s']:,.0f}"


def table(record: Record) -> str:
    """One row per group and length: peaks in GiB, with the planner's prediction for the fused variant."""
    by_point, lengths = points(record), sorted({int(point["axes"][AXIS]) for point in record["points"]})
    titles = ("", "tokens per sequence", "eager, GiB", "fused, GiB", "predicted", "eager, tokens/s", "fused, tokens/s")
    rows = []
    for group in groups(record):
        for length in lengths:
            eager, fused = (by_point.get((f"{group}, {kind}", length)) for kind in ("eager", "fused"))
            (eager_peak, eager_speed), (fused_peak, fused_speed) = cell(eager), cell(fused)
            predicted_bytes = (fused or {}).get("predicted_allocated_bytes")
            predicted = "" if predicted_bytes is None else f"{predicted_bytes / GIB:.1f}"
            rows.append([group, f"{length:,}", eager_peak, fused_peak, predicted, eager_speed, fused_speed])
    return markdown_table(titles, rows, texts=(0,))


def longest(record: Record) -> str:
    """The longest sequence that each variant ran, and whether a longer one was tried."""
    by_point = points(record)
    lines = []
    for group, variants in groups(record).items():
        sentences = []
        for variant in variants:
            ran = [length for (name, length), point in by_point.items() if name == variant and point["status"] == "ok"]
            most = f"{max(ran):,} tokens" if ran else "none"
            beyond = any(
                name == variant and point["status"] == "out of memory" for (name, _), point in by_point.items()
            )
            tail = "" if beyond else " (nothing longer was tried)"
            sentences.append(f"{variant.rpartition(', ')[2]} {most}{tail}")
        lines.append(f"- {group}: {'; '.join(sentences)}")
    return "\n".join(["The longest sequence that ran:", "", *lines])


DRAWN = (
    ("peak_allocated_bytes", GIB, "peak memory (GiB)"),
    ("tokens_per_s", 1, "tokens/s"),
)


def chart(record: Record, name: str) -> str:
    """Peak memory and throughput over the sequence length, a column for each stage."""
    by_point, stages = points(record), sorted({variant.split(",")[0] for variant in record["variants"]})
    figure, panels = new_figure(len(DRAWN) * len(stages), columns=len(stages))
    figure.set_size_inches(10, 6.4)
    lengths = sorted({length for _, length in by_point})
    ticks = [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths]
    combined = [(what, stage) for what in DRAWN for stage in stages]
    for ((key, unit, words), stage), axes in zip(combined, panels, strict=True):
        for variant in (v for v in record["variants"] if v.startswith(stage)):
            _, heads, kind = variant.split(", ")
            line = sorted(
                (length, point[key] / unit)
                for (other, length), point in by_point.items()
                if other == variant and point["status"] == "ok"
            )
            if line:
                style = {"marker": "o", "ls": "--"} if heads.startswith("5") else {"marker": "s", "ls": "-"}
                axes.plot(*zip(*line, strict=True), color=COLOURS[kind], ms=4, label=f"{heads}, {kind}", **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, labels=ticks)
        axes.set(xlabel="tokens per sequence", ylabel=words, title=stage, ylim=(0, None))
    known = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known.keys(), frameon=False, loc="outside upper center", ncols=len(known))
    return svg(figure, name)


def machine(record: Record) -> str:
    environment = record["environment"]
    known = {name: environment["versions"].get(name) for name in ("torch", "triton", "transformers")}
    versions = ", ".join(f"{name} {version}" for name, version in known.items() if version)
    where = f"{environment['device']} (driver {environment['driver']}), {versions}"
    return f"{where}; tigon at commit {', '.join(environment['tigon_commits'])}; {', '.join(environment['dates'])}."


def block(name: str, records: Mapping[str, Mapping[str, Record]], drawn: dict[Path, str]) -> str:
    """The text between the markers of `name`. Adds the charts to `drawn`."""
    parts = []
    for gpu, own in records.items():
        if name not in own:
            continue
        image = IMAGES / gpu / f"{name}.svg"
        drawn[image] = chart(own[name], name) + "\n"
        shown = f"![peak memory and tokens/s over the sequence length]({image.as_posix()})"
        parts += [machine(own[name]), shown, longest(own[name]), table(own[name])]
    return "\n\n".join(parts)


def page(text: str, records: Mapping[str, Mapping[str, Record]]) -> tuple[str, dict[Path, str]]:
    """(the document with its blocks written again, charts by their path beside the document)"""
    drawn: dict[Path, str] = {}
    for name in NAMES:
        text = regions.put(text, *markers(name), block(name, records, drawn))
    return text, drawn


def counted() -> str:
    """Table of the peaks of a step of a small model, from the allocations of PyTorch's CPU allocator."""
    rows = [
        [str(count), *(f"{step_bytes(count, fused) / 2**20:,.0f}" for fused in (False, True))] for count in (1, 3, 5)
    ]
    return markdown_table(("heads", "PyTorch's own ops, MiB", "fused, MiB"), rows, texts=())


def step_bytes(count: int, fused: bool) -> int:
    """Peak memory of a training step with `count` heads, in bytes above the weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tigon.medusa import HeadsSpec, Objective, attach
    from tigon.models import patch
    from tigon.profiler.recording.peak import PeakMeter

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
        )
    )
    if fused:
        patch(model)
    attach(model, HeadsSpec(count=count, shared=True), Objective(stage=2))
    ids = torch.randint(0, 8192, (1, 4096))
    meter = PeakMeter(torch.device("cpu"))
    meter.start(list(model.parameters()))
    model.train()(input_ids=ids, labels=ids).loss.backward()
    return meter.stop().step_bytes


def main(arguments: Sequence[str]) -> None:
    if arguments:
        raise SystemExit("benchmarks.pages.medusa takes no arguments")
    text, drawn = page(DOCUMENT.read_text(encoding="utf-8"), load(RECORDS, "medusa"))
    text = regions.put(text, *markers("counted"), counted())
    for path, chart_svg in drawn.items():
        target = DOCUMENT.parent / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(chart_svg, encoding="utf-8")
    DOCUMENT.write_text(text, encoding="utf-8")
    print(f"wrote {DOCUMENT} and {len(drawn)} charts")


if __name__ == "__main__":
    main(sys.argv[1:])
