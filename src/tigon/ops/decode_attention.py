"""Attention of one new token per row over a pool of keys and values, of which rows share prefixes. No backward.

    out_s = Σ_j softmax(scale · q_s k_j)_j v_j        j in the prefix of row s, or among its own tokens

With `softcap` c the scores are c · tanh(scale · q k / c). With sinks the softmax has one more score per head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.ops.dispatch import Primitive

# S rows, h query heads, k key heads, N tokens of the pool, D head width, E width of the values.

COLUMNS = 6
"""Numbers of a row of `bounds`: the prefix's begin and end, its own tokens' begin and end, then a tile's first row and
its count of rows. Row i holds tile i; a tile is a run of rows with one prefix, and unused ones have a count of 0."""
MOST_TILE_QUERIES = 64
"""The most queries of a tile: rows times the query heads that share a key head."""


def _empty(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty((*q.shape[:2], v.shape[2]))


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    prefix_tokens: int,
    own_tokens: int,
    tile_rows: int,
) -> Tensor:
    """Gathers each row's keys and values."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    places_SN, seen_SN = _places(bounds, prefix_tokens, own_tokens)
    S, heads, D = q.shape
    keys, values = (x[:, places_SN].to(wide) for x in (k, v))  # (k, S, n, D)
    queries = q.to(wide).reshape(S, k.shape[0], -1, D).transpose(0, 1)
    scores = torch.einsum("kshd,ksnd->kshn", queries, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen_SN[:, None], float("-inf"))
    if sinks is not None:
        sink = sinks.to(wide).reshape(k.shape[0], 1, -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1)[..., : places_SN.shape[1]]
    out = torch.einsum("kshn,ksne->kshe", weights, values)
    return out.transpose(0, 1).reshape(S, heads, -1).to(q.dtype)


def _places(bounds: Tensor, prefix_tokens: int, own_tokens: int) -> tuple[Tensor, Tensor]:
    """(S, n) places in the pool that the rows may see, and whether a row sees them."""
    ranges = []
    for column, tokens in ((0, prefix_tokens), (2, own_tokens)):
        begin_S1, end_S1 = bounds[:, column, None].long(), bounds[:, column + 1, None].long()
        place_Sn = begin_S1 + torch.arange(tokens, device=bounds.device)
        ranges.append((place_Sn, place_Sn < end_S1))
    places_SN, seen_SN = (torch.cat(parts, 1) for parts in zip(*ranges, strict=True))
    return places_SN.masked_fill(~seen_SN, 0), seen_SN


decode_attention = Primitive(
    "decode_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor? sinks, float scale, float softcap, SymInt prefix_tokens, "
    "SymInt own_tokens, SymInt tile_rows) -> Tensor",
    fake=_empty,
    reference=_reference,
    kernel="tigon.kernels.decode_attention:decode_attention",
)
"""Arguments: q (S, h, D); k (k, N, D) and v (k, N, E), contiguous; bounds (S, 6) int32; sinks (h,) or None; softcap 0:
none; the most tokens of a prefix and of a row; the most rows of a tile, times the queries per key at most 64. Returns
(S, h, E)."""
