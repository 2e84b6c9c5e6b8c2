"""Writes two tables of docs/post-training-recipes.md: how fast completions are written, and what shared prefixes save.

    python -m benchmarks.pages.post_training_recipes

The records are those of `python -m benchmarks generation` and `python -m benchmarks shared-prefix`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from benchmarks.pages.sums import where
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "post-training-recipes.md"
RECORDS = ROOT / "benchmarks" / "results" / "nvidia-h100" / "post-training"


def _record(name: str) -> Any:
    return json.loads((RECORDS / name).read_text(encoding="utf-8"))


def _writers(call: Mapping[str, Any]) -> str:
    rows = [
        [line["writes"], f"{line['tokens_per_s']:,.0f}", f"{line['seconds']:.1f} s", f"{line['peak_gib']:.2f}"]
        for line in call["measurements"]
    ]
    return markdown_table(("writes the completions", "tokens/s", "time", "GiB beside the model"), rows, texts=(0,))


def generation() -> str:
    """The tables of both calls, because transformers' row and the generator's last rows were measured in two."""
    record = _record("generation.json")
    first = record["first_call"]
    (errors,) = record["differences"]
    prompts, completions, prompt, new = record["sizes"]
    parts = [
        f"{prompts} prompts of {prompt:,} tokens got {completions} completions of {new} tokens each, from a model of "
        "the shape of Qwen3-4B with LoRA of rank 16. One call measured both ways:",
        _writers(first),
        f"*{first['note']}*",
        "A later call measured the generator alone. Its rows stand apart, because the adapters and the code differ:",
        _writers(record),
        f"The log-probabilities with which its tokens were drawn differ from those of one forward pass by "
        f"{errors['mean_nats']:.3f} nats per token on average, and by {errors['largest_nats']:.2f} at most.",
        where(record),
    ]
    return "\n\n".join(parts)


def shared_prefix() -> str:
    """Tokens, times and peaks of each step, padded and with a shared prefix."""
    record = _record("shared-prefix.json")
    rows = []
    for line in record["measurements"]:
        padded, shared = line["padded"], line["shared"]
        sizes = " to ".join(str(size) for size in sorted({*line["completion_tokens"]}))
        rows.append(
            [
                f"{line['step']}, {line['prompts']} x {line['completions']}, {line['prompt_tokens']:,} + {sizes}",
                " → ".join(f"{number:,}" for number in line["tokens"]),
                f"{padded['seconds']:.2f} s → {shared['seconds']:.2f} s",
                f"{padded['seconds'] / shared['seconds']:.2f} x",
                f"{padded['peak_gib']:.1f} → {shared['peak_gib']:.1f}",
            ]
        )
    titles = ("prompts x completions, their tokens", "tokens of the sequences → computed", "step", "faster", "peak GiB")
    return f"{markdown_table(titles, rows, texts=(0,))}\n\n{where(record)}"


def written(text: str) -> str:
    """`text` with the tables of the records between their markers."""
    parts = {"generation": generation, "shared prefix": shared_prefix}
    return regions.written(text, "post-training", parts, DOCUMENT)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
