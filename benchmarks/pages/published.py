"""Figures that others published for the same experiments. tigon measured none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Who measured, and on which hardware and data."""

    name: str
    setting: str


STUDY = Source("the study", "Llama-3.2-1B on one RTX 4090 of 24 GB, unpatched and with Liger")
PAPER = Source(
    "the paper", "Liger Kernel, arXiv 2410.10989, figures 4 to 7: four A100 of 80 GB, FSDP, Alpaca, 20 steps"
)
AMD = Source("the AMD port", "Liger on four MI300X, FSDP, Alpaca, sequences of 512 tokens")

OUT_OF_MEMORY = None

# Sequences of 1024 tokens -> (unpatched, Liger): peak in GiB, or out of memory.
STUDY_PEAK_GIB: Mapping[int, tuple[float | None, float | None]] = {
    4: (9.0, 3.4),
    8: (17.1, 3.4),
    16: (OUT_OF_MEMORY, 4.1),
    112: (OUT_OF_MEMORY, 19.4),
}
STUDY_LARGEST_BATCH = 112
"""The largest batch that the study trained in 24 GB with Liger, in sequences of 1024 tokens."""
STUDY_LONGEST_SEQUENCE = 24576
"""The longest of 4 sequences that the study trained in 24 GB with Liger, in tokens."""
STUDY_LONGEST_GB = 17.0
"""Memory of that run, in GB."""


@dataclass(frozen=True)
class Gain:
    """Relative change from the unpatched model to the model with Liger's kernels."""

    memory: float
    tokens_per_s: float
    batch: int | None
    """Sequences of 512 tokens per micro-batch and GPU; None if the source does not say."""


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

UNSLOTH_PAGE = "https://unsloth.ai/docs/basics/unsloth-benchmarks"
UNSLOTH_QLORA: Mapping[str, Mapping[str, int]] = {
    "8B": {"8 GB": 2972, "12 GB": 21848, "16 GB": 40724, "24 GB": 78475, "48 GB": 191728, "80 GB": 342733},
    "70B": {"48 GB": 12106, "80 GB": 89389},
}
"""Longest sequence of one sample by size of card: Llama 3.1 8B and 3.3 70B Instruct, QLoRA of rank 32 on all linear
layers. Source: `UNSLOTH_PAGE`, read on 2026-11-24 and 2026-11-28."""
UNSLOTH_HUGGING_FACE_8B = 5789
"""The same in 24 GB with Hugging Face and FlashAttention 2, as Unsloth measured it. The same source."""
