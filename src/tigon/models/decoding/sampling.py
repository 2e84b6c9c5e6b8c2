"""Logits to tokens: temperature, top-k, top-p and min-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# S rows, V vocabulary.


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen. The filters apply in this order, as in transformers."""

    temperature: float = 1.0
    """0: the likeliest token each time."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all. Tokens as likely as the last of them count too."""
    top_p: float = 1.0
    """Only the likeliest tokens that have this probability together."""
    min_p: float = 0.0
    """Only tokens with this share of the likeliest token's probability."""
    seed: int = 0

    def restricted(self, z_SV: Tensor) -> Tensor:
        """The logits, with -inf for every token that the filters rule out."""
        if 0 < self.top_k < z_SV.shape[-1]:
            least_S1 = z_SV.topk(self.top_k, -1).values[:, -1:]
            z_SV = z_SV.masked_fill(z_SV < least_S1, float("-inf"))
        if self.top_p < 1.0:
            sorted_SV, order_SV = z_SV.sort(-1, descending=True)
            p_SV = torch.softmax(sorted_SV, -1)
            sorted_SV = sorted_SV.masked_fill(p_SV.cumsum(-1) - p_SV >= self.top_p, float("-inf"))
            z_SV = torch.empty_like(z_SV).scatter_(-1, order_SV, sorted_SV)
        if self.min_p > 0:
            p_SV = torch.softmax(z_SV, -1)
            z_SV = z_SV.masked_fill(p_SV < self.min_p * p_SV.amax(-1, keepdim=True), float("-inf"))
        return z_SV


def sample(logits_SV: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The next token of each row, and its log-probability at the temperature before the filters, as TRL computes it.

    The largest of z - log(e) with e from an exponential distribution is a draw from softmax(z) (the Gumbel-max trick),
    so that no sum over the vocabulary has to be inverted, and nothing waits for the host.
    """
    z_SV = logits_SV.float()
    if sampling.temperature == 0:
        tokens_S = z_SV.argmax(-1)
    else:
        z_SV = z_SV / sampling.temperature
        noise_SV = torch.empty_like(z_SV).exponential_(generator=generator).log_()
        tokens_S = (sampling.restricted(z_SV) - noise_SV).argmax(-1)
    logprobs_S = z_SV.gather(-1, tokens_S[:, None])[:, 0] - torch.logsumexp(z_SV, -1)
    return tokens_S, logprobs_S
