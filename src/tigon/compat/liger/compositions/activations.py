"""Squared ReLU, softmax, sparsemax and the embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.compat.liger.compositions._wide import wide


class LigerReLUSquaredFunction:
    """max(x, 0)²."""

    @staticmethod
    def apply(X: Tensor) -> Tensor:
        return F.relu(X).square()


def liger_relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)²."""
    return LigerReLUSquaredFunction.apply(x)


class LigerReLUSquared(nn.Module):
    """max(x, 0)²."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return LigerReLUSquaredFunction.apply(x)


class LigerSoftmaxFunction:
    """`torch.softmax` over the last dimension."""

    @staticmethod
    def apply(input_: Tensor) -> Tensor:
        return torch.softmax(input_, -1)


def liger_softmax(x: Tensor) -> Tensor:
    """`torch.softmax` over the last dimension."""
    return LigerSoftmaxFunction.apply(x)


class LigerSoftmax(nn.Module):
    """`torch.softmax` over the last dimension."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return LigerSoftmaxFunction.apply(x)


class LigerSparsemaxFunction:
    """The projection of x onto the probability simplex (Martins and Astudillo 2016, arXiv 1602.02068, algorithm 1)."""

    @staticmethod
    def apply(x: Tensor, dim: int) -> Tensor:
        z = wide(x).movedim(dim, -1)
        with torch.no_grad():
            ordered, _ = z.sort(-1, descending=True)
            excess = ordered.cumsum(-1) - 1.0
            rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
            size = (ordered * rank > excess).sum(-1, keepdim=True).clamp(min=1)
            support = z > excess.gather(-1, size - 1) / size
        # The threshold again, from the entries of the support alone, so that autograd gives the right gradient.
        threshold = (z.where(support, 0.0).sum(-1, keepdim=True) - 1.0) / support.sum(-1, keepdim=True).clamp(min=1)
        return (z - threshold).where(support, 0.0).movedim(-1, dim).to(x.dtype)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Sparsemax over `dim`."""
    return LigerSparsemaxFunction.apply(input, dim)


class LigerSparsemax(nn.Module):
    """Sparsemax over `dim`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return LigerSparsemaxFunction.apply(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class LigerEmbeddingFunction:
    """`torch.nn.functional.embedding`."""

    @staticmethod
    def apply(embeddings: Tensor, indices: Tensor) -> Tensor:
        return F.embedding(indices, embeddings)


class LigerEmbedding(nn.Module):
    """An embedding. The row `padding_idx` is 0 in the result and gets no gradient."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.weight = nn.Parameter(torch.randn(num_embeddings, embedding_dim))
        if padding_idx is not None:
            with torch.no_grad():
                self.weight[padding_idx].fill_(0)

    def forward(self, indices: Tensor) -> Tensor:
        embedded = LigerEmbeddingFunction.apply(self.weight, indices)
        if self.padding_idx is None:
            return embedded
        return embedded.masked_fill((indices == self.padding_idx)[..., None], 0.0)
