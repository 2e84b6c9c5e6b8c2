"""The values that a run chooses, one typed field per setting. Recipe, trainer and planner share these names.

A field's line here gives its name, type and default, and its place in every list. All else about a setting is in the
file of its technique: the recipe key, the flag, the allowed values, and how the planner uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Size -> (minimum, maximum or None), for sizes that recipes and plans share and that belong to no technique.
LIMITS: Mapping[str, tuple[int, int | None]] = {"batch": (1, None), "seq": (8, None)}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The settings of one run. The defaults are the recipe's, unless the setting has a `recipe_default`."""

    precision: str = "amp-bf16"
    fp8_scaling: str = "tensorwise"
    fp8_bf16_layers: int = 1
    optimizer: str = "adamw"
    galore_rank: int = 128
    checkpointing: str = "none"
    mlp_tile_tokens: int = 0
    attention_groups: int = 1
    kernels: str = "tigon"
    attention: str = "sdpa"
    attention_sinks: bool = True
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ("linear",)
    lora_dropout: float = 0.0
    lora_rslora: bool = False
    lora_dora: bool = False
    lora_modules_to_save: tuple[str, ...] = ()
    lora_bias: str = "none"
    lora_init: str = "default"
    lora_base: str = "auto"
    quantized: bool = False
    quantize_to: str = "nf4"
    gpus: int = 1
    sequence_shards: int = 1
    sequence_method: str = "ulysses"
    tensor_shards: int = 1
    zero: int = 0
    zero_copy_ranks: int = 1
    zero_int8_weights: bool = False
    zero_int4_gradients: bool = False
    fsdp: bool = False
    replicas: int = 1
    reshard: bool = True
    offload: str = "none"
    accumulate: int = 1
    accumulation_fusion: bool = False
    loss_memory_mib: int = 0
    cuda_graphs: bool = False
