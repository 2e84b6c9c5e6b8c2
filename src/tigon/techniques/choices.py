"""The values that a run chooses, one typed field per setting. Recipe, trainer and planner share these names.

A field's line here gives its name, type and default, and its place in every list. All else about a setting stands in
the file of its technique: the recipe key, the flag, the values it takes, and what the planner does with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Size -> (minimum, maximum or None), for sizes that recipes and plans share and that belong to no technique.
LIMITS: Mapping[str, tuple[int, int | None]] = {"batch": (1, None), "seq": (8, None)}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The settings of one run. The defaults are the recipe's."""

    precision: str = "amp-bf16"
    optimizer: str = "adamw"
    galore_rank: int = 128
    checkpointing: str = "none"
    mlp_tile_tokens: int = 0
    attention_groups: int = 1
    kernels: str = "tigon"
    attention: str = "sdpa"
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ("linear",)
    quantized: bool = False
    gpus: int = 1
    zero: int = 0
    fsdp: bool = False
    reshard: bool = True
    offload: str = "none"
    accumulate: int = 1
