"""Liger's MLPs for single model families, its tiled MLPs, and its experts."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.compat.liger.compositions.mlps import LigerFusedMoEFunction, LigerMLPFunction, apply_tiled_mlp
from tigon.compat.liger.transformers.modules import LigerGEGLUMLP, LigerMLPBase, LigerSwiGLUMLP, require_silu
from tigon.errors import OptionError


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """As `LigerSwiGLUMLP`."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` that keeps the number of its layer."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` whose config may name the activation `hidden_activation`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerMLP(LigerSwiGLUMLP):
    """As `LigerSwiGLUMLP`. It runs on every device."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        return LigerMLPFunction.apply(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


class LigerBlockSparseTop2MLP(nn.Module):
    """w2(silu(w1(x)) · w3(x)): one expert of transformers 4."""

    tigon_flag: ClassVar[str] = "mlp"

    def __init__(self, config: Any) -> None:
        super().__init__()
        require_silu(config)
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ops.swiglu(self.w1(x), self.w3(x)))  # type: ignore[no-any-return]


class LigerFalconH1SwiGLUMLP(LigerMLPBase):
    """down_proj(silu(gate_multiplier · gate_proj(x)) · up_proj(x)) · down_multiplier.

    With biases, Liger multiplies before down_proj, so it scales the product and not the bias.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        require_silu(config)
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        self.gate_multiplier, self.down_multiplier = map(float, config.mlp_multipliers)

    def forward(self, x: Tensor) -> Tensor:
        activation = ops.swiglu(self.gate_proj(x) * self.gate_multiplier, self.up_proj(x))
        return self.down_proj(activation) * self.down_multiplier  # type: ignore[no-any-return]


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """`LigerFalconH1SwiGLUMLP` without biases."""

    def __init__(self, config: Any) -> None:
        if getattr(config, "mlp_bias", False):
            raise OptionError("mlp_bias=True: LigerFalconH1MLP has no biases; use LigerFalconH1SwiGLUMLP.")
        super().__init__(config)


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """`LigerGEGLUMLP` of twice the width in layers that share keys and values, if use_double_wide_mlp is set."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        shared = getattr(config, "num_kv_shared_layers", 0)
        first_shared = getattr(config, "num_hidden_layers", 0) - shared
        wide = copy.copy(config)
        if layer_idx is not None and getattr(config, "use_double_wide_mlp", False) and shared > 0:
            wide.intermediate_size = config.intermediate_size * (2 if layer_idx >= first_shared else 1)
        super().__init__(wide)
        self.config = config


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` of pieces of the tokens; `num_shards` None is T / hidden size, rounded up."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        return apply_tiled_mlp(LigerSwiGLUMLP.forward, self, x, self.num_shards)


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """`LigerGEGLUMLP` of pieces of the tokens; `num_shards` None is T / hidden size, rounded up."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        return apply_tiled_mlp(LigerGEGLUMLP.forward, self, x, self.num_shards)


# Names of the number of experts in configs, in Liger's order.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class LigerExperts(nn.Module):
    """The experts of transformers 5 in its 3-D layout. Their weights are uninitialised, as in transformers."""

    tigon_flag: ClassVar[str] = "mlp"

    def __init__(self, config: Any) -> None:
        super().__init__()
        require_silu(config)
        self.num_experts = next(getattr(config, name) for name in _EXPERTS if hasattr(config, name))
        self.intermediate_dim = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.hidden_dim = config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        K = top_k_index.shape[-1]
        rows = hidden_states.reshape(-1, self.hidden_dim)
        index, weights = top_k_index.reshape(-1, K), top_k_weights.reshape(-1, K)
        y = LigerFusedMoEFunction.apply(rows, self.gate_up_proj, self.down_proj, index, weights)
        return y.view(hidden_states.shape)
