"""The memory that the generator takes beside the weights. A plan calls it too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tigon.models.decoding.prompt_queue import Room
from tigon.models.kv_cache import kv_widths

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FP32 = 4
SAMPLED_COPIES = 3
"""fp32 copies of the logits that the generator holds at once: scaled, noise, and their sum."""

SPARE = 1.1
"""Free memory that the generator asks for beside divided weights, relative to what it needs. Blocks in the allocator's
cache are free too, but not in one piece."""


def cache_bytes(config: PreTrainedConfig, room: Room, new_tokens: int, itemsize: int) -> list[int]:
    """The size of the keys, and of the values, of each layer. A layer with a window keeps all tokens too."""
    tokens = room.prompt_tokens + room.rows * new_tokens
    return [tokens * width * itemsize for widths in kv_widths(config, 1) for width in widths]


def logits_bytes(rows: int, vocab_size: int, itemsize: int) -> list[int]:
    """The sizes of the logits as the model returns them, and of their copies in fp32."""
    return [rows * vocab_size * itemsize, *[rows * vocab_size * FP32] * SAMPLED_COPIES]
