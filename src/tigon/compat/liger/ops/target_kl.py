"""KL divergence per token from target probabilities to a student's distribution, without the student's logits.

With the logits z = W h / τ and the probabilities q of a token, which need not sum to 1:

    KL = Σ q log q - Σ q z + lse(z) Σ q        dz = p Σ q - q, with p = softmax(z)

The forward goes over blocks of tokens. The backward goes over blocks of the vocabulary and computes the logits again.
Each row of the weight's gradient is then one product, and is not a sum of rounded parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.ops.dispatch import first_order
from tigon.ops.products import product_dtype

# N tokens, H hidden, V vocabulary.

BLOCK_BYTES = 1 << 26
"""Most bytes of one block of fp32 logits."""


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _TargetKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, target_NV: Tensor, temperature: float, eps: float
    ) -> Tensor:
        dtype = _accurate(hidden_NH.dtype)
        lse_N, mass_N, value_N = (hidden_NH.new_empty(len(hidden_NH), dtype=dtype) for _ in range(3))
        rows = max(1, BLOCK_BYTES // (4 * len(weight_VH)))
        for start in range(0, len(hidden_NH), rows):
            part = slice(start, start + rows)
            z = (hidden_NH[part] @ weight_VH.t()).to(dtype) / temperature
            q = target_NV[part].to(dtype)
            lse_N[part] = torch.logsumexp(z, -1)
            mass_N[part] = q.sum(-1)
            # Logits relative to the log-sum-exp: the two large sums of the formula would cancel.
            value_N[part] = (q * (q.clamp(min=eps).log() - (z - lse_N[part].unsqueeze(1)))).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, target_NV, lse_N, mass_N)
        ctx.temperature = temperature
        return value_N

    @staticmethod
    @first_order
    def backward(ctx: Any, dvalue_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_NV, lse_N, mass_N = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        dtype, N = lse_N.dtype, len(hidden_NH)
        dhidden_NH = hidden_NH.new_zeros(hidden_NH.shape, dtype=dtype)
        dweight_VH = torch.empty_like(weight_VH) if want_weight else None
        upstream_N1 = (dvalue_N / ctx.temperature).unsqueeze(1)
        columns = max(1, BLOCK_BYTES // (4 * max(N, 1)))
        for start in range(0, len(weight_VH), columns):
            part = slice(start, start + columns)
            z = (hidden_NH @ weight_VH[part].t()).to(dtype) / ctx.temperature
            p = torch.exp(z - lse_N.unsqueeze(1))
            dz = (upstream_N1 * (p * mass_N.unsqueeze(1) - target_NV[:, part].to(dtype))).to(hidden_NH.dtype)
            if want_hidden:
                dhidden_NH += dz @ weight_VH[part]
            if dweight_VH is not None:
                dweight_VH[part] = dz.t() @ hidden_NH
        return dhidden_NH.to(hidden_NH.dtype) if want_hidden else None, dweight_VH, None, None, None


def target_kl(hidden: Tensor, weight: Tensor, target: Tensor, *, temperature: float, eps: float) -> Tensor:
    """(N,) KL(target || softmax(hidden @ weight.T / temperature)), fp32, or fp64 for fp64 inputs.

    Args:
        hidden: (N, H).
        weight: (V, H).
        target: (N, V) probabilities; it gets no gradient.
        temperature: not 0.
        eps: the smallest probability whose logarithm is taken.
    """
    dtype = product_dtype(hidden, weight)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        value: Tensor = _TargetKL.apply(hidden, weight, target.detach(), temperature, eps)
    return value
