"""Multi-token attention, neighbourhood attention, and attention over the outputs of earlier blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.compat.liger.compositions._wide import wide
from tigon.compat.liger.compositions.activations import LigerSparsemaxFunction
from tigon.errors import OptionError, ShapeError

Pair = int | Sequence[int]

# --- multi-token attention (Golovneva et al. 2025, arXiv 2504.00927) --------------------------------------------------


class LigerMultiTokenAttentionFunction:
    """Causal softmax of the scores, a 2-D convolution over queries and keys, then zeros above the diagonal."""

    @staticmethod
    def apply(
        scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair = 0,
        dilation: Pair = 1, groups: int = 1, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        if scores.ndim != 4 or scores.shape[-1] != scores.shape[-2]:
            raise ShapeError(f"scores has the shape {tuple(scores.shape)}; expected (batch, channels, T, T).")
        T = scores.shape[-1]
        future = torch.ones(T, T, dtype=torch.bool, device=scores.device).triu(1)
        causal = scores.masked_fill(future, -math.inf)
        weights = LigerSparsemaxFunction.apply(causal, -1) if sparse else torch.softmax(causal, -1)
        return F.conv2d(weights, weight, bias, stride, padding, dilation, groups).tril()


def liger_multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair = 0,
    dilation: Pair = 1, groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """The attention weights of multi-token attention.

    Args:
        scores: (B, C_in, T, T).
        weight: (C_out, C_in / groups, K, K), of the convolution.
        bias: (C_out,) or None.
        stride, padding, dilation, groups: as in `torch.nn.functional.conv2d`.
        sparse: sparsemax instead of softmax.
    """
    return LigerMultiTokenAttentionFunction.apply(scores, weight, bias, stride, padding, dilation, groups, sparse)


class LigerMultiTokenAttention(nn.Module):
    """`liger_multi_token_attention` with the convolution's weight."""

    bias: nn.Parameter | None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0,
        dilation: Pair = 1, groups: int = 1, bias: bool = True, sparse: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_channels, self.out_channels, self.groups, self.sparse = in_channels, out_channels, groups, sparse
        self.kernel_size, self.stride = _pair(kernel_size), _pair(stride)
        self.padding, self.dilation = _pair(padding), _pair(dilation)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        return LigerMultiTokenAttentionFunction.apply(
            scores, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.sparse
        )


def _pair(value: Pair) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


# --- neighbourhood attention (Hassani et al. 2025, arXiv 2504.16922) --------------------------------------------------


class LigerFusedNeighborhoodAttentionFunction:
    """`scaled_dot_product_attention` in which a token sees every `dilation`-th token of a window around it."""

    @staticmethod
    def apply(
        query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
    ) -> Tensor:
        place = torch.arange(query.shape[-2], device=query.device)
        distance = place[None, :] - place[:, None]
        neighbour = (distance.abs() <= kernel_size // 2 * dilation) & (distance % dilation == 0)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=neighbour, scale=scale)


def liger_fused_neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:
    """Neighbourhood attention of (B, heads, T, D); scale None is 1 / sqrt(D). The mask has T · T entries."""
    return LigerFusedNeighborhoodAttentionFunction.apply(query, key, value, kernel_size, dilation, scale)


class LigerFusedNeighborhoodAttention(nn.Module):
    """Neighbourhood attention with its four projections."""

    dropout: nn.Dropout | None

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if hidden_size % num_heads:
            raise OptionError(f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}.")
        if kernel_size <= 0 or kernel_size % 2 == 0:
            raise OptionError(f"kernel_size={kernel_size} must be positive and odd.")
        if dilation < 1:
            raise OptionError(f"dilation={dilation} must be at least 1.")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.kernel_size, self.dilation, self.dropout_p = kernel_size, dilation, dropout
        self.scale = 1.0 / math.sqrt(self.head_dim) if scale is None else scale
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None:
            raise NotImplementedError("attention_mask: neighbourhood attention takes none, as in Liger.")
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in projections)
        attended = LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, self.kernel_size, self.dilation, self.scale)
        attended = attended.transpose(1, 2).flatten(-2)
        return self.out_proj(attended if self.dropout is None else self.dropout(attended))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, num_heads={self.num_heads}, kernel_size={self.kernel_size}, scale={self.scale}"


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """x + attention(layer_norm(x))."""

    dropout: nn.Dropout | None

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, layer_norm_eps: float = 1e-5, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.layer_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        attended = self.attention(self.layer_norm(hidden_states), attention_mask)
        return hidden_states + (attended if self.dropout is None else self.dropout(attended))  # type: ignore[no-any-return]


class LigerFusedNeighborhoodAttentionConfig:
    """The options of `LigerFusedNeighborhoodAttentionLayer` in one object."""

    def __init__(
        self, hidden_size: int = 768, num_heads: int = 12, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, layer_norm_eps: float = 1e-5, scale: float | None = None,
    ) -> None:  # fmt: skip
        self.hidden_size, self.num_heads, self.kernel_size, self.dilation = (
            hidden_size,
            num_heads,
            kernel_size,
            dilation,
        )
        self.bias, self.dropout, self.layer_norm_eps, self.scale = bias, dropout, layer_norm_eps, scale

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


# --- attention residuals (arXiv 2603.15031) ---------------------------------------------------------------------------


class LigerAttnResFunction:
    """The blocks' outputs, weighted by a softmax over the blocks of w_query · rms_norm(block)."""

    @staticmethod
    def apply(V_stacked: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float) -> Tensor:
        stacked = V_stacked if isinstance(V_stacked, Tensor) else torch.stack(list(V_stacked))
        V = wide(stacked)
        keys = F.rms_norm(V, V.shape[-1:], wide(w_norm), eps)
        share = torch.softmax((keys * wide(w_query)).sum(-1, keepdim=True), 0)
        return (share * V).sum(0).to(stacked.dtype)


def liger_attn_res(V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6) -> Tensor:
    """Attention over the outputs of earlier blocks instead of a sum of residuals.

    Args:
        V: (blocks, B, T, D), or a list of (B, T, D).
        w_query, w_norm: (D,), the learned query and the weight of the keys' norm.
        eps: of the norm.

    Returns:
        (B, T, D).
    """
    return LigerAttnResFunction.apply(V, w_query, w_norm, eps)
