"""Writes tables of docs/post-training-recipes.md: how fast completions are written, and what shared prefixes save.

    python -m benchmarks.pages.post_training_recipes

The records are those of `python -m benchmarks generation`, `shared-prefix` and `grpo-step`.
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
RECORDS = ROOT / "benchmarks" / "results"


def _record(name: str, gpu: str = "nvidia-h200") -> Any:
    return json.loads((RECORDS / gpu / "post-training" / name).read_text(encoding="utf-8"))


def _writers(call: Mapping[str, Any]) -> str:
    rows = [
        [line["writes"], f"{line['tokens_per_s']:,.0f}", f"{line['seconds']:.1f} s", f"{line['peak_gib']:.2f}"]
        for line in call["measurements"]
    ]
    return markdown_table(("writes the completions", "tokens/s", "time", "GiB beside the model"), rows, texts=(0,))


def generation() -> str:
    record = _record("generation.json")
    (errors,) = record["differences"]
    prompts, completions, prompt, new = record["sizes"]
    parts = [
        f"{prompts} prompts of {prompt:,} tokens got {completions} completions of {new} tokens each, from a model of "
        "the shape of Qwen3-4B with LoRA of rank 16. The 512 completions have prompts of 128 tokens and end after 64 "
        "tokens on average:",
        _writers(record),
        f"The log-probabilities with which the generator's tokens were drawn differ from those of one forward pass by "
        f"{errors['mean_nats']:.3f} nats per token on average, and by {errors['largest_nats']:.2f} at most.",
        where(record),
    ]
    return "\n\n".join(parts)


def _sizes(line: Mapping[str, Any]) -> str:
    sizes = " to ".join(str(size) for size in sorted({*line["completion_tokens"]}))
    return f"{line['step']}, {line['prompts']} x {line['completions']}, {line['prompt_tokens']:,} + {sizes}"


def _saved(record: Mapping[str, Any]) -> str:
    """Tokens, times and peaks of each step, padded and with a shared prefix."""
    rows = []
    for line in record["measurements"]:
        padded, shared = line["padded"], line["shared"]
        rows.append(
            [
                _sizes(line),
                " → ".join(f"{number:,}" for number in line["tokens"]),
                f"{padded['seconds']:.2f} s → {shared['seconds']:.2f} s",
                f"{padded['seconds'] / shared['seconds']:.2f} x",
                f"{padded['peak_gib']:.1f} → {shared['peak_gib']:.1f}",
            ]
        )
    titles = ("prompts x completions, their tokens", "tokens of the sequences → computed", "step", "faster", "peak GiB")
    return f"{markdown_table(titles, rows, texts=(0,))}\n\n{where(record)}"


def shared_prefix() -> str:
    """The table of each GPU, the newer first."""
    return "\n\n".join(_saved(_record("shared-prefix.json", gpu)) for gpu in ("nvidia-h200", "nvidia-h100"))


def gpu_time() -> str:
    """For each row: how long the GPU computes in a step, and how long it waits for the CPU."""
    rows = []
    for line in _record("shared-prefix.json")["measurements"]:
        padded, shared, operators = line["padded"], line["shared"], line["operators"]
        rows.append(
            [
                _sizes(line),
                f"{padded['kernels_s']:.2f} → {shared['kernels_s']:.2f}",
                f"{padded['kernels_s'] / shared['kernels_s']:.2f} x",
                " → ".join(f"{max(0.0, part['seconds'] - part['kernels_s']):.2f}" for part in (padded, shared)),
                f"{operators['seconds']:.2f}",
            ]
        )
    titles = (
        "prompts x completions, their tokens",
        "kernels, s",
        "faster",
        "rest of the step, s",
        "step without the join kernel, s",
    )
    return markdown_table(titles, rows, texts=(0,))


def whole_step() -> str:
    """Times and peaks of whole GRPO steps, with and without tigon's generator and shared prefixes."""
    record = _record("grpo-step.json")
    lines = [(line["row"], step) for line in record["measurements"] for step in line["steps"]]
    rows = [
        [
            name,
            *(f"{step[part]:.2f} s" for part in ("completions_s", "update_s", "seconds")),
            *(f"{step[part]:.1f}" for part in ("completions_peak_gib", "update_peak_gib")),
        ]
        for name, step in lines
    ]
    ours, theirs = (line["steps"] for line in record["measurements"])
    prompts, completions, prompt, new = record["sizes"]
    titles = ("completions and update by", "completions", "update", "step", "peak GiB, completions", "peak GiB, update")
    least = min(step["seconds"] for step in theirs) / max(step["seconds"] for step in ours)
    last = theirs[-1]["seconds"] / ours[-1]["seconds"]
    share = max(step["update_peak_gib"] for step in ours) / max(step["update_peak_gib"] for step in theirs)
    parts = [
        f"{prompts} prompts of {prompt:,} tokens and {completions} completions of {new} tokens for each, in TRL's "
        "trainer under autocast to bf16. Both rows have tigon's layers and head. Each has two timed steps, in order:",
        markdown_table(titles, rows, texts=(0,)),
        f"With the generator and the shared prefix the last step is {last:.1f} times as fast, and the slower one is "
        f"{least:.1f} times as fast as the faster one without them. The peak is {share:.2f} of that without them.",
        where(record),
    ]
    return "\n\n".join(parts)


def written(text: str) -> str:
    """`text` with the tables of the records between their markers."""
    parts = {
        "generation": generation,
        "shared prefix": shared_prefix,
        "GPU time": gpu_time,
        "whole step": whole_step,
    }
    return regions.written(text, "post-training", parts, DOCUMENT)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
