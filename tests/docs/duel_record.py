"""A record of `benchmarks.duel` with figures of no machine."""

from __future__ import annotations

from typing import Any


def row(entry: str, tokens_per_s: int, peak_gib: float, task: str = "qlora", size: str = "4x2048") -> dict[str, Any]:
    return {
        "task": task, "entry": entry, "size": size, "tokens_per_s": tokens_per_s, "peak_gib": peak_gib, "row_s": 30.0,
        "losses": [3.0] * 10 + [2.0], "trained_dtypes": ["float32"], "tigon_commit": "0123456789", "date": "2000-01-01",
    }  # fmt: skip


def made_up() -> dict[str, Any]:
    packages = ("torch", "triton", "transformers", "peft", "trl", "bitsandbytes", "liger-kernel", "unsloth")
    return {
        "environment": {"device": "Card", "versions": dict.fromkeys(packages, "9.9")},
        "measurements": [
            row("tigon-auto", 900, 40.0), row("tigon-auto24", 700, 20.0), row("tigon-offload", 600, 7.0),
            row("unsloth", 480, 7.5), row("unsloth-loop", 500, 8.0), row("unsloth-none", 800, 30.0),
            row("hf", 300, 19.0), row("hf", 100, 50.0, size="1x16384"),
        ],
        "refused": [{**row("liger", 9999, 1.0), "refused": ["the loss of step 0 is 9"]}],
        "failed": [{"task": "qlora", "entry": "hf-trl", "size": "4x2048", "error": "out of memory", "row_s": 30.0}],
    }  # fmt: skip
