"""What others published of the same experiments, to stand beside ours. Nothing here was measured by tigon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Who measured, on what."""

    name: str
    setting: str


STUDY = Source("the study", "Llama-3.2-1B on one RTX 4090 of 24 GB, its unpatched run and its run with Liger")
PAPER = Source(
    "the paper", "Liger Kernel, arXiv 2410.10989, figures 4 to 7: four A100 of 80 GB, FSDP, Alpaca, 20 steps"
)
AMD = Source("the AMD port", "Liger on four MI300X, FSDP, Alpaca, rows of 512 tokens")

OUT_OF_MEMORY = None

# Rows of 1024 tokens -> (unpatched, Liger): peak in GiB, or out of memory.
STUDY_PEAK_GIB: Mapping[int, tuple[float | None, float | None]] = {
    4: (9.0, 3.4),
    8: (17.1, 3.4),
    16: (OUT_OF_MEMORY, 4.1),
    112: (OUT_OF_MEMORY, 19.4),
}
STUDY_LARGEST_BATCH = 112
"""Rows of 1024 tokens that it trained in 24 GB, with Liger."""
STUDY_LONGEST_SEQUENCE = 24576
"""Tokens in each of 4 rows that it trained in 24 GB, with Liger."""
STUDY_LONGEST_GB = 17.0
"""What that took."""


@dataclass(frozen=True)
class Gain:
    """What Liger's kernels change against the unpatched model, as shares."""

    memory: float
    tokens_per_s: float
    batch: int | None
    """Rows of 512 tokens in a micro-batch of each GPU, where the source says so."""


PAPER_GAINS: Mapping[str, Gain] = {
    "llama-3-8b": Gain(-0.548, 0.428, 64),
    "qwen2-7b": Gain(-0.568, 0.255, 48),
    "gemma-7b": Gain(-0.518, 0.119, 48),
    "mistral-7b": Gain(-0.21, 0.27, 128),
}
AMD_GAINS: Mapping[str, Gain] = {
    "llama-3-8b": Gain(-0.59, 0.23, None),
    "qwen2-7b": Gain(-0.60, 0.27, None),
    "gemma-7b": Gain(-0.55, 0.10, None),
    "mistral-7b": Gain(-0.26, 0.18, None),
}
