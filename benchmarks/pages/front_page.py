"""The picture and the tables of README.md, from the committed records: `python -m benchmarks.pages.front_page`.

Between its markers README.md gets the table of what was measured and the table of what the planner predicts to fit.
The picture has colours for light and for dark pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.pages import published, regions, what_fits

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "benchmarks" / "results" / "nvidia-h200" / "study"
DOCUMENT, PICTURE = ROOT / "README.md", ROOT / "docs" / "img" / "front-page.svg"
GIB = 1 << 30
BATCH, SEQUENCE, MODEL = "train.batch_size", "data.sequence_length", "model.name"
HUGGING_FACE, LIGER, TIGON = "unpatched", "Liger", "tigon"
NAMES = {HUGGING_FACE: "Hugging Face", LIGER: "Liger", TIGON: "tigon"}
TILED = "tiled MLPs too"
PAPER_MODELS = {
    "llama-3-8b": "Llama 3 8B", "qwen2-7b": "Qwen2 7B", "gemma-7b": "Gemma 7B", "mistral-7b": "Mistral 7B"
}  # fmt: skip

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
  .liger { fill: #3b82f6; } .tigon { fill: #c2410c; } .more { fill: #ea580c; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e5e7eb; } .note { fill: #9ca3af; } .other { fill: #6b7280; } .liger { fill: #60a5fa; }
    .tigon { fill: #ea580c; } .more { fill: #fb923c; }
  }
"""
WIDTH, BAR, GAP, LEFT, LONGEST = 860, 22, 10, 230, 500

Bar = tuple[str, str, int]
"""Label, class, value."""


def picture() -> str:
    """Two groups of bars: the largest batch in 24 GiB, and the speed of an 8B model at one batch size."""
    batch: list[Bar] = [
        (NAMES[HUGGING_FACE], "other", largest("batch", HUGGING_FACE, BATCH)),
        (NAMES[LIGER], "liger", largest("batch", LIGER, BATCH)),
        (NAMES[TIGON], "tigon", largest("batch", TIGON, BATCH)),
        ("tigon, more techniques *", "more", largest("largest-batch", TILED, BATCH)),
    ]
    speed: list[Bar] = [
        (NAMES[variant], shade, round(_paper("llama-3-8b", variant)["tokens_per_s"]))
        for variant, shade in ((HUGGING_FACE, "other"), (LIGER, "liger"), (TIGON, "tigon"))
    ]
    parts: list[str] = []
    y = _group(parts, 24, "Largest batch in 24 GiB: sequences of 1,024 tokens, Llama 3.2 1B, full fine-tuning", batch)
    y = _group(parts, y + 22, "Tokens per second: Llama 3 8B, 64 sequences of 512 tokens, full fine-tuning", speed)
    note = "One NVIDIA H200. * Inputs of the layers on the host, tiled MLPs; Liger was not measured with these."
    parts.append(f'<text class="note" x="10" y="{y + 14}">{escape(note)}</text>')
    height = y + 28
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>The largest batch and the speed of Hugging Face, Liger and tigon on one H200</title>'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _group(parts: list[str], y: int, title: str, bars: Sequence[Bar]) -> int:
    """Append a title and its bars to `parts`; returns the y below them."""
    parts.append(f'<text class="title" x="10" y="{y}">{escape(title)}</text>')
    most = max(value for _, _, value in bars)
    y += 14
    for label, shade, value in bars:
        length = max(2, round(LONGEST * value / most))
        parts.append(f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<rect class="{shade}" x="{LEFT}" y="{y}" width="{length}" height="{BAR}" rx="3"/>')
        parts.append(f'<text x="{LEFT + length + 8}" y="{y + 16}">{value:,}</text>')
        y += BAR + GAP
    return y


# --- the tables ------------------------------------------------------------------------------------------------------


def measured() -> str:
    """The table of the three, one row per experiment of the records."""
    rows = [
        "| full fine-tuning on one H200, if not named | Hugging Face | Liger 0.8.5 | tigon | Unsloth publishes |",
        "|---|---:|---:|---:|---:|",
    ]
    for model, name in PAPER_MODELS.items():
        cells = (_peak_and_speed(_paper(model, variant)) for variant in NAMES)
        rows.append(f"| {name}, 64 x 512 tokens: peak, tokens/s | {' | '.join(cells)} | |")
    batch = [f"{largest('batch', variant, BATCH):,}" for variant in NAMES]
    batch[-1] += f" ({largest('largest-batch', TILED, BATCH):,} with more techniques)"
    rows.append(f"| 1B, largest batch of 1,024 tokens in 24 GiB | {' | '.join(batch)} | |")
    sequence = [f"{largest('sequence', variant, SEQUENCE):,}" for variant in NAMES]
    rows.append(f"| 1B, longest of 4 sequences in 24 GiB | {' | '.join(sequence)} | |")
    longest = largest("longest-sequence", "layers in pieces", SEQUENCE)
    rows.append(f"| 1B, longest single sequence in 24 GiB, with more techniques | | | {longest:,} | |")
    return "\n".join([*rows, *_published()])


def _published() -> Iterator[str]:
    """The rows of Unsloth's page. tigon was not measured in these tests; the last row is the planner's."""
    card = "24 GB"
    planned = json.loads(what_fits.RECORD.read_text(encoding="utf-8"))["tokens"]["8B, QLoRA"][card]
    theirs, unpatched = published.UNSLOTH_QLORA_8B[card], published.UNSLOTH_HUGGING_FACE_8B
    yield f"| *Unsloth's test*: speed of 8B, QLoRA, 80 GB | 1x | | not measured | {published.UNSLOTH_SPEED_8B} |"
    yield f"| *Unsloth's test*: 8B, QLoRA, longest in {card} | {unpatched:,} | | {planned:,} (planned) | {theirs:,} |"


def _peak_and_speed(point: Point) -> str:
    if not _ran(point):
        return "out of memory"
    return f"{point['peak_allocated_bytes'] / GIB:.1f} GiB, {point['tokens_per_s']:,.0f}"


def fits() -> str:
    """The planner's table, with the figures that Unsloth publishes for the same rank and batch size."""
    record = json.loads(what_fits.RECORD.read_text(encoding="utf-8"))
    cells = (f"{tokens:,}" for tokens in published.UNSLOTH_QLORA_8B.values())
    theirs = f"| [Unsloth publishes]({published.UNSLOTH_PAGE}): 8B, QLoRA | {' | '.join(cells)} | |"
    return f"{what_fits.table(record)}\n{theirs}"


PARTS: Mapping[str, Callable[[], str]] = {"measured": measured, "fits": fits}


def written(text: str) -> str:
    """README.md with the parts between their markers written again."""
    return regions.written(text, "front", PARTS, DOCUMENT)


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
