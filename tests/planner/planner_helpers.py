"""Small models and requests that the tests of the estimator share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import AutoConfig

from tests.short_names import settings_of
from tigon.objectives.base import PlannedObjective
from tigon.planner.gpus import MIB, Gpu, find_gpu
from tigon.planner.request import Request
from tigon.planner.trace.tape import Tape

H200 = find_gpu("h200")
# cuBLAS's 64 MiB would be most of what a small model takes
BARE = replace(H200, cublas_workspace_bytes=0)


def small_gpu(memory_mib: float) -> Gpu:
    """A GPU for small models: 1 MiB of context and of cuBLAS's, and nothing else outside of the allocator."""
    return replace(
        H200, memory_bytes=int(memory_mib * MIB), context_bytes=MIB, host_copies_bytes=0, cublas_workspace_bytes=MIB,
        lone_group_bytes=0, group_bytes=0, deepspeed_bytes=0,
    )  # fmt: skip


_SHAPE: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 5},
    "qwen3": {"model_type": "qwen3", "num_hidden_layers": 5, "head_dim": 16, "tie_word_embeddings": False},
    # kinds of layers alternate in sixes, and the last pattern is cut off
    "gemma3_text": {"model_type": "gemma3_text", "num_hidden_layers": 15, "head_dim": 16, "sliding_window": 32},
}


def config_of(name: str, **changes: Any) -> Any:
    """The small config of a family."""
    shape = {**_SHAPE, **CONFIGS[name], **changes}
    return AutoConfig.for_model(shape.pop("model_type"), **shape)


def request_of(
    name: str = "llama", *, batch: int = 2, seq: int = 64, masked: bool = False, evaluated: bool = False,
    objective: PlannedObjective | None = None, shape: dict[str, Any] | None = None, adapters_fused: bool = True,
    **settings: Any,
) -> Request:  # fmt: skip
    """A request for a small model with these settings."""
    return Request(
        model=name, config=config_of(name, **(shape or {})), batch=batch, seq=seq, masked=masked,
        objective=objective or PlannedObjective(), evaluated=evaluated,
        adapters_fused=adapters_fused, settings=settings_of(settings),
    )  # fmt: skip


def peak_bytes(tape: Tape, component: str) -> int:
    """The most bytes of one component that are held at one time."""
    live = peak = 0
    for event in (event for segment in tape.segments for event in segment.events):
        block = event if event >= 0 else ~event
        if tape.components[block] == component:
            live += tape.sizes[block] if event >= 0 else -tape.sizes[block]
            peak = max(peak, live)
    return peak
