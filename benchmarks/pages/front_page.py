"""The picture and the tables of README.md, from the committed records: `python -m benchmarks.pages.front_page`.

Between its markers README.md gets the table of what was measured and the table of what the planner predicts to fit.
The picture has colours for light and for dark pages.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.pages import base_offload, duel, published, regions, what_fits
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
H100, H200 = (ROOT / "benchmarks" / "results" / f"nvidia-{card}" for card in ("h100", "h200"))
STUDY = H200 / "study"
LONG_ROWS = H100 / "planner" / "long-rows-half-million.json"
DOCUMENT, PICTURE = ROOT / "README.md", ROOT / "docs" / "img" / "front-page.svg"
GIB = 1 << 30
BATCH, SEQUENCE, MODEL = "train.batch_size", "data.sequence_length", "model.name"
HUGGING_FACE, LIGER, TIGON = "unpatched", "Liger", "tigon"
NAMES = {HUGGING_FACE: "Hugging Face", LIGER: "Liger", TIGON: "tigon"}
TILED = "tiled MLPs too"
PAPER_MODELS = {"llama-3-8b": "Llama 3 8B", "qwen2-7b": "Qwen2 7B", "gemma-7b": "Gemma 7B", "mistral-7b": "Mistral 7B"}

Point = Mapping[str, Any]


def points(name: str) -> list[Point]:
    record = json.loads((STUDY / f"{name}.json").read_text(encoding="utf-8"))
    return list(record["points"])


def largest(name: str, variant: str, axis: str) -> int:
    """The largest value on the axis at which the variant ran."""
    return max(int(point["axes"][axis]) for point in points(name) if _ran(point) and point["variant"] == variant)


def _ran(point: Point) -> bool:
    return bool(point["status"] == "ok")


def _paper(model: str, variant: str) -> Point:
    """The point of recipes/study/paper.yaml with 64 sequences."""
    (point,) = (
        one for one in points("paper") if one["variant"] == variant and one["axes"] == {BATCH: 64, MODEL: model}
    )
    return point


# --- the picture -----------------------------------------------------------------------------------------------------

STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2937; }
  .title { font-weight: 600; } .note { fill: #6b7280; font-size: 12px; } .other { fill: #9ca3af; }
  .liger { fill: #3b82f6; } .unsloth { fill: #15803d; } .tigon { fill: #c2410c; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e5e7eb; } .note { fill: #9ca3af; } .other { fill: #6b7280; } .liger { fill: #60a5fa; }
    .unsloth { fill: #4ade80; } .tigon { fill: #ea580c; }
  }
"""
WIDTH, BAR, GAP, LEFT, LONGEST = 860, 22, 10, 230, 500

Bar = tuple[str, str, float]
"""Label, class, value."""


def picture(record: duel.Record) -> str:
    """Groups of bars: speed and memory of QLoRA beside Unsloth, and the speed of full fine-tuning.

    record: the one of `benchmarks.duel`.
    """
    short = f"QLoRA of Llama 3.1 8B, {duel.words_of(duel.SIZES[0])}, one H100"
    beside = duel.bars(record)
    speed: list[Bar] = [
        (NAMES[variant], shade, round(_paper("llama-3-8b", variant)["tokens_per_s"]))
        for variant, shade in ((HUGGING_FACE, "other"), (LIGER, "liger"), (TIGON, "tigon"))
    ]
    groups: list[tuple[str, list[Bar], str]] = [
        (f"Tokens per second: {short}", [(label, shade, line["tokens_per_s"]) for label, shade, line in beside], ","),
        (f"Peak memory, GiB: {short}", [(label, shade, line["peak_gib"]) for label, shade, line in beside], ".1f"),
        ("Tokens per second: full fine-tuning of Llama 3 8B, 64 x 512 tokens, one H200", speed, ","),
    ]
    parts: list[str] = []
    y = 2
    for title, bars, form in groups:
        y = _group(parts, y + 22, title, bars, form)
    if duel.most_kept(duel.lines(record, "qlora", duel.SIZES[0])) is not None:
        note = "* Keeps most activations that 80 GB hold, as tigon in 24 GiB does there. Others recompute all layers."
        parts.append(f'<text class="note" x="10" y="{y + 14}">{escape(note)}</text>')
        y += 14
    height = y + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>Speed and memory of Hugging Face, Liger, Unsloth and tigon on one GPU</title>'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _group(parts: list[str], y: int, title: str, bars: Sequence[Bar], form: str) -> int:
    """Append a title and its bars to `parts`; returns the y below them. form: the format of the values."""
    parts.append(f'<text class="title" x="10" y="{y}">{escape(title)}</text>')
    most = max(value for _, _, value in bars)
    y += 14
    for label, shade, value in bars:
        length = max(2, round(LONGEST * value / most))
        parts.append(f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<rect class="{shade}" x="{LEFT}" y="{y}" width="{length}" height="{BAR}" rx="3"/>')
        parts.append(f'<text x="{LEFT + length + 8}" y="{y + 16}">{value:{form}}</text>')
        y += BAR + GAP
    return y


# --- the tables ------------------------------------------------------------------------------------------------------


def measured(record: duel.Record) -> str:
    """The table of the four, one row per experiment of the records. record: the one of `benchmarks.duel`."""
    unsloth = f"Unsloth {record['environment']['versions']['unsloth']}"
    rows = list(duel.front_rows(record))
    for model, name in PAPER_MODELS.items():
        unpatched, liger, tigon = (_peak_and_speed(_paper(model, variant)) for variant in NAMES)
        rows.append([f"{name}, all weights, 64 x 512 tokens, H200", unpatched, liger, "", tigon])
    unpatched, liger, tigon = (f"{largest('batch', variant, BATCH):,}" for variant in NAMES)
    most = f"{tigon} ({largest('largest-batch', TILED, BATCH):,} with more techniques)"
    rows.append(["1B, all weights, largest batch of 1,024 tokens in 24 GiB", unpatched, liger, "", most])
    unpatched, liger, tigon = (f"{largest('sequence', variant, SEQUENCE):,}" for variant in NAMES)
    tried = f"longest of 4 sequences in 24 GiB, tried up to {tigon}"
    rows.append([f"1B, all weights, {tried}", unpatched, liger, "", tigon])
    longest = "1B, all weights, longest single sequence in 24 GiB, with more techniques"
    rows += [[longest, "", "", "", f"{longest_row():,}"], _published()]
    return markdown_table(("", "Hugging Face", "Liger 0.8.5", unsloth, "tigon"), rows, texts=(0,))


def longest_row() -> int:
    """Tokens of the longest sequence that a process within 24 GiB trained.

    Raises:
        SystemExit: the record's process took more.
    """
    (row,) = json.loads(LONG_ROWS.read_text(encoding="utf-8"))["rows"]
    taken_bytes = row["measured"]["peak_reserved_bytes"] + row["measured"]["non_allocator_bytes"]
    if taken_bytes > 24 * GIB:
        raise SystemExit(f"{LONG_ROWS}: the process took {taken_bytes / GIB:.2f} GiB")
    return int(row["tokens"])


def _published() -> list[str]:
    """The longest sequence that Unsloth publishes, and a shorter one than the longest that tigon plans, which ran."""
    card = "24 GB"
    planned = json.loads(what_fits.RECORD.read_text(encoding="utf-8"))["tokens"]["8B, QLoRA, layers on the host"][card]
    (ran,) = (line["seq"] for line in base_offload.load()["steps"] if line["row"] == "24gb")
    theirs, unpatched = published.UNSLOTH_QLORA["8B"][card], published.UNSLOTH_HUGGING_FACE_8B
    figures = (
        f"{unpatched:,} (published)",
        "",
        f"{theirs:,} (published)",
        f"{ran:,} (ran with that memory), {planned:,} (planned)",
    )
    return [f"*Unsloth's test*: 8B, QLoRA, longest in {card}; tigon's with layers on the host", *figures]


def _peak_and_speed(point: Point) -> str:
    if not _ran(point):
        return "out of memory"
    return f"{point['tokens_per_s']:,.0f} ({point['peak_allocated_bytes'] / GIB:.1f} GiB)"


def fits() -> str:
    """The planner's table, with the figures that Unsloth publishes for the same rank and batch size."""
    record = json.loads(what_fits.RECORD.read_text(encoding="utf-8"))
    theirs = []
    for model, tokens in published.UNSLOTH_QLORA.items():
        cells = (f"{tokens[card]:,}" if card in tokens else "" for card in what_fits.CARDS)
        theirs.append([f"[Unsloth publishes]({published.UNSLOTH_PAGE}): {model}, QLoRA", *cells, ""])
    return what_fits.table(record, theirs)


def gains() -> str:
    """How much faster steps in TRL and LoRA layers are, from the records of both."""
    full = _gains_in_trl(H100 / "post-training" / "trl-steps.json")
    adapters = _gains_in_trl(H200 / "post-training" / "trl-steps-autocast.json")
    lora = _gains_of_lora(H200 / "lora" / "steps.json") | _gains_of_lora(H100 / "lora" / "steps-4-bit.json")
    bf16, four_bit = "llama-3.1-8b", "llama-3.1-8b-4-bit"
    sentences = (
        f"`fuse` and `patch` make a DPO step of a 1B {full['dpo', 'full']:.2f} times as fast as in TRL, and a GRPO "
        f"step {full['grpo', 'full']:.2f} times (all weights, H100, before the head's logits were fp32).",
        f"With LoRA on an H200 it is {adapters['dpo', 'lora']:.2f} and {adapters['grpo', 'lora']:.2f} times "
        "([post-training](docs/post-training-ops.md#measured)).",
        f"tigon's LoRA layers train an 8B in bf16 {lora[bf16, 'none']:.2f} times as fast as PEFT's on an H200, and "
        f"{lora[bf16, 'full']:.2f} times if layers are recomputed.",
        f"With 4-bit weights it is {lora[four_bit, 'none']:.2f} and {lora[four_bit, 'full']:.2f} times, on an H100 "
        "([LoRA](docs/techniques/lora.md#speed)).",
    )
    return textwrap.fill(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False)


def _gains_in_trl(path: Path) -> dict[tuple[str, str], float]:
    """(trainer, weights) -> tokens/s of tigon as a multiple of TRL's."""
    lines = json.loads(path.read_text(encoding="utf-8"))["measurements"]
    speeds = {(one["trainer"], one["weights"], one["head"]): one.get("tokens_per_s") for one in lines}
    return {(a, b): speed / speeds[a, b, "trl"] for (a, b, head), speed in speeds.items() if head == "tigon"}


def _gains_of_lora(path: Path) -> dict[tuple[str, str], float]:
    """(run, checkpointing) -> tokens/s of tigon's layers as a multiple of those of PEFT's."""
    lines = json.loads(path.read_text(encoding="utf-8"))["steps"]
    speeds = {(one["run"], one["checkpointing"]): one["versions"] for one in lines}
    return {case: of["tigon"]["tokens_per_s"] / of["peft"]["tokens_per_s"] for case, of in speeds.items()}


def written(text: str, record: duel.Record) -> str:
    """README.md with the parts between their markers written again."""
    parts: Mapping[str, Callable[[], str]] = {"measured": lambda: measured(record), "gains": gains, "fits": fits}
    return regions.written(text, "front", parts, DOCUMENT)


def main() -> None:
    record = duel.load()
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8"), record), encoding="utf-8")
    PICTURE.write_text(picture(record), encoding="utf-8")


if __name__ == "__main__":
    main()
