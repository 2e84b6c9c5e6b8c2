"""Attention of one token per row over a pool: against a loop over rows in fp64."""

from __future__ import annotations

import pytest
import torch

from backends import Backend
from tigon.ops.decode_attention import decode_attention

PREFIXES = ((0, 9), (9, 9), (9, 80))
"""The second group has no prompt; the third is longer than a block of keys."""
GROUPS = (0, 0, 0, 1, 2)
TILES = ((0, 2), (2, 1), (3, 1), (4, 1), (0, 0))
"""The first group has two tiles."""
OWN_BEGIN, OWN_LENGTHS = 80, (1, 5, 3, 2, 7)
LONGEST = 7
WIDE = 12


def bounds_of(window: int | None = None) -> torch.Tensor:
    rows = []
    for row, group in enumerate(GROUPS):
        (begin, end), own = PREFIXES[group], OWN_BEGIN + row * LONGEST
        length = OWN_LENGTHS[row]
        if window is not None:
            begin = max(begin, end + length - window)
            own, length = own + max(0, length - window), min(length, window)
        rows.append((begin, end, own, own + length, *TILES[row]))
    return torch.tensor(rows, dtype=torch.int32)


def by_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, sinks: torch.Tensor | None, softcap: float
) -> torch.Tensor:
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for s, (begin, end, own, own_end, _, _) in enumerate(bounds.tolist()):
        places = [*range(begin, end), *range(own, own_end)]
        for h in range(q.shape[1]):
            key_head = h // (q.shape[1] // k.shape[0])
            scores = (k[key_head, places].double() @ q[s, h].double()) * 0.3
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            extra = scores.new_empty(0) if sinks is None else sinks[h : h + 1].double()
            weights = torch.softmax(torch.cat([scores, extra]), 0)[: len(places)]
            out[s, h] = weights @ v[key_head, places].double()
    return out


@pytest.mark.parametrize(
    ("heads", "softcap", "has_sinks", "window"),
    [(4, 0.0, False, None), (4, 2.0, False, 4), (2, 0.0, True, 11), (6, 0.0, False, 90)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_row_attends_to_its_prefix_and_its_own_tokens(
    backend: Backend, dtype: torch.dtype, heads: int, softcap: float, has_sinks: bool, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(heads)
    tokens = OWN_BEGIN + LONGEST * len(GROUPS)
    q, k, v = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((len(GROUPS), heads, WIDE), (2, tokens, WIDE), (2, tokens, 20))
    )
    sinks = torch.randn(heads, generator=generator).to(dtype) if has_sinks else None
    bounds = bounds_of(window)
    expected = by_rows(q, k, v, bounds, sinks, softcap)
    given = [None if x is None else x.to(backend.device) for x in (q, k, v, bounds, sinks)]
    out = decode_attention(*given, 0.3, softcap, 71, LONGEST, 2)
    assert out.dtype == dtype
    error = (out.cpu().double() - expected).abs().max().item()
    assert error < (1e-5 if dtype == torch.float32 else 2e-2), error
