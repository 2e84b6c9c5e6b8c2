"""Functions of whole MLPs: gated, tiled over the tokens, and of experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tigon import ops
from tigon.compat.liger.ops import functions as f
from tigon.errors import OptionError


class LigerMLPFunction:
    """down(silu(gate_multiplier · gate(x)) · up(x)) · down_multiplier, for weights without biases."""

    @staticmethod
    def apply(
        input: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> Tensor:  # fmt: skip
        gate, up = F.linear(input, gate_weight), F.linear(input, up_weight)
        y = F.linear(f.LigerSiLUMulFunction.apply(gate, up, gate_multiplier), down_weight)
        return y if down_multiplier == 1.0 else y * down_multiplier


class LigerTiledMLPFunction:
    """`fn(mlp_module, ...)` of pieces of the tokens, each with PyTorch's activation checkpointing."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor], mlp_module: nn.Module, x: Tensor, shards: int, compute_params: Any = None
    ) -> Tensor:
        if shards < 1:
            raise OptionError(f"shards={shards} must be at least 1.")
        pieces = x.chunk(shards, -2)
        return torch.cat([checkpoint(fn, mlp_module, piece, use_reentrant=False) for piece in pieces], -2)


def apply_tiled_mlp(
    fn: Callable[..., Tensor], mlp_module: nn.Module, x: Tensor, num_shards: int | None = None,
    compute_params: Any = None,
) -> Tensor:  # fmt: skip
    """`fn(mlp_module, x)` in pieces of the tokens, so that only one piece's activations exist at a time.

    Args:
        fn: called with the module and a piece of x.
        mlp_module: the first argument of `fn`.
        x: (..., T, H).
        num_shards: the number of pieces; None: T / H, rounded up.
        compute_params: no effect. Liger passes the parameters on to DeepSpeed; here autograd finds them.
    """
    shards = math.ceil(x.shape[-2] / x.shape[-1]) if num_shards is None else num_shards
    return LigerTiledMLPFunction.apply(fn, mlp_module, x, max(1, shards))


class LigerFusedMoEFunction:
    """Experts with SwiGLU, by `tigon.experts`."""

    @staticmethod
    def apply(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return ops.experts(x, top_k_index, top_k_weights, gate_up_proj, down_proj)
