"""Embeddings whose backward adds the rows that occur to `.grad` (ops/accumulation_fusion.py).

PyTorch's backward makes a gradient of the whole table, almost all of it zeros, and autograd adds it to `.grad`. For
128,256 tokens of width 2048 in bf16 each micro-batch writes 525 MB and then reads and writes 1.6 GB. A micro-batch of
8,192 tokens has at most 34 MB of rows.
"""

from __future__ import annotations

import functools
import inspect
import re
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.accumulation_fusion import LeafGradient
from tigon.ops.gradient_sums import add_rows_

# N tokens, V vocabulary, H hidden.


# Gemma 3's embedding and 23 more of transformers 5.23 multiply the rows by a number.
_SCALED = re.compile(r"return super\(\)\.forward\(input_ids\) \* self\.embed_scale(\.to\(self\.weight\.dtype\))?\s*$")


def fuse_embeddings(model: nn.Module) -> list[nn.Module]:
    """Let the trained embeddings of this instance add to `.grad` in place. Returns them.

    Left alone: embeddings with a forward of their own, unless it only scales the rows, and those with PyTorch's
    `sparse`, `max_norm` or `scale_grad_by_freq`.
    """
    embeddings = [module for name, module in model.named_modules() if "lora_" not in name and _fits(module)]
    for embedding in embeddings:
        embedding.forward = FusedEmbedding(embedding)
    return embeddings


def _fits(module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding) or "forward" in vars(module) or not module.weight.requires_grad:
        return False
    if module.sparse or module.scale_grad_by_freq or module.max_norm is not None:
        return False
    forward: Any = type(module).forward
    return forward is nn.Embedding.forward or _scaling(forward) is not None


@functools.cache
def _scaling(forward: FunctionType) -> re.Match[str] | None:
    """The line of a forward that returns PyTorch's rows times `embed_scale`, which it may cast to the rows' dtype."""
    try:
        return _SCALED.search(inspect.getsource(forward))
    except (OSError, TypeError):
        return None


class FusedEmbedding:
    """Replaces the forward of an embedding."""

    def __init__(self, embedding: nn.Module) -> None:
        self.embedding: Any = embedding

    def __call__(self, input_ids: Tensor) -> Tensor:
        embedding = self.embedding
        leaf, forward = LeafGradient.of(embedding.weight), type(embedding).forward
        if leaf is None:
            plain: Tensor = forward(embedding, input_ids)
            return plain
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx
        rows: Tensor = _FusedEmbedding.apply(input_ids, embedding.weight, padding, leaf)
        if forward is not nn.Embedding.forward and (scaling := _scaling(forward)) is not None:
            rows = rows * (embedding.embed_scale.to(rows.dtype) if scaling[1] else embedding.embed_scale)
        return rows


class _FusedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VH: Tensor, padding: int, leaf: LeafGradient) -> Tensor:
        ctx.leaf, ctx.padding, ctx.vocab = leaf, padding, len(weight_VH)
        ctx.save_for_backward(ids)
        return nn.functional.embedding(ids, weight_VH)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        target = ctx.leaf.target()
        if target is None:
            dense = torch.ops.aten.embedding_dense_backward(dy, ids, ctx.vocab, ctx.padding, False)
            return None, dense, None, None
        if not target.accumulate:
            target.tensor.zero_()
        add_rows_(target.tensor, dy.reshape(-1, dy.shape[-1]), ids.reshape(-1), ctx.padding)
        return None, None, None, None
