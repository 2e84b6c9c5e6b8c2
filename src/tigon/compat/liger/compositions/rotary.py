"""The other rotary position embeddings, through `tigon.rope`: M-RoPE, Llama 4, GPT-OSS and vision towers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon import ops
from tigon.compat.liger.ops import functions as f
from tigon.errors import DtypeError, ShapeError

# B batch, T tokens, D head width.


class LigerQwen2VLMRopeFunction:
    """`tigon.rope` with one table put together from those for time, height and width."""

    @staticmethod
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        half = q.shape[-1] // 2
        time, height = mrope_section[:2]
        sections = (time, height, half - time - height)
        if cos.ndim != 4 or cos.shape[0] != 3 or min(sections) < 0:
            raise ShapeError(
                f"cos has the shape {tuple(cos.shape)} and mrope_section is {list(mrope_section)}; expected (3, B, T, "
                f"{2 * half}) and sections whose sum is {half}."
            )
        tables = []
        for table in (cos, sin):
            parts = table[..., :half].split(sections, -1)
            one = torch.cat([part[axis] for axis, part in enumerate(parts)], -1)
            tables.append(torch.cat((one, one), -1))
        return ops.rope(q, k, *tables, unsqueeze_dim=unsqueeze_dim)


def liger_qwen2vl_mrope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate q and k (B, heads, T, D) with cos and sin (3, B, T, D) for time, height and width.

    `mrope_section` has the number of angles of each of the three; the sum is D / 2.
    """
    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section, unsqueeze_dim)


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`liger_qwen2vl_mrope` under its other name."""
    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section, unsqueeze_dim)


class LigerLlama4RopeFunction:
    """`tigon.rope` of neighbouring pairs with complex frequencies; every sequence has its own positions."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> tuple[Tensor, Tensor]:
        if not freqs_cis.is_complex():
            raise DtypeError(f"freqs_cis is {freqs_cis.dtype}; expected a complex dtype.")
        table = _per_token(freqs_cis, q.shape[1])
        return _rotate_pairs(q, k, table.real, table.imag)


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k (B, T, heads, D) with complex frequencies (T, D / 2) or (B, T, D / 2)."""
    return LigerLlama4RopeFunction.apply(xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k (B, T, heads, D) of Llama 4's vision tower.

    Real frequencies are those that `model.to(torch.bfloat16)` leaves of complex ones. They scale the pairs, as in
    transformers.
    """
    if freqs_ci.is_complex():
        return LigerLlama4RopeFunction.apply(query, key, freqs_ci)
    table = _per_token(freqs_ci, query.shape[1])
    return _rotate_pairs(query, key, table, torch.zeros_like(table))


def _per_token(frequencies: Tensor, T: int) -> Tensor:
    """Frequencies as (1 or B, T, D / 2). Axes of size 1 for heads are dropped, and so are tokens past T."""
    if frequencies.ndim == 4:
        frequencies = frequencies.squeeze(2)
    elif frequencies.ndim == 3 and frequencies.shape[1] == 1 and T > 1:
        frequencies = frequencies.squeeze(1)
    if frequencies.ndim not in (2, 3) or frequencies.shape[-2] < T:
        raise ShapeError(f"the frequencies have the shape {tuple(frequencies.shape)}; expected rows for {T} tokens.")
    return frequencies[..., :T, :]


def _rotate_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    tables = (table.repeat_interleave(2, -1) for table in (cos, sin))
    return ops.rope(q, k, *tables, interleaved=True, unsqueeze_dim=2)


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate whole heads (B, heads, T, D) with tables of D / 2 columns."""
    return f.LigerRopeFunction.apply(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k (T, heads, D) of a vision tower with tables (T, D)."""
    q_out, k_out = ops.rope(q[None], k[None], cos, sin, unsqueeze_dim=2)
    return q_out[0], k_out[0]
