"""The blocks of `linear_logprobs` and `linear_kl`: some tokens by some columns of the vocabulary.

Blocks of columns save memory: a loss, which splits the tokens alone, sums dW in fp32 (V · H elements). Tokens are split
too if there are more than `_MOST_TOKENS`, because every block of columns then reads and writes a sum of dX that takes
as long as its products. If the logits of all tokens fit, they are kept from forward to backward, which saves a product
of each head (`keeps_logits`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tigon.ops import products
from tigon.ops.head.block_loop import BlockPlan
from tigon.ops.head.chunks import TILE, even_chunk

_MOST_TOKENS = 32768
_BLOCK_LOGIT_TOKENS = 2048
"""The most tokens whose logits exist at once if they are computed twice: products of as many run at full rate."""
_FEWEST_COLUMNS = 1024
_KEPT_BLOCKS = 8
"""Logits are kept if there is room for the gradient of one in this many of their columns."""


class LogitBytes(NamedTuple):
    """Bytes of one token's logits of one column, and of their gradients. For two heads, of both together."""

    logits: int
    gradients: int

    @classmethod
    def of(cls, dtype: torch.dtype) -> LogitBytes:
        """For a head whose hidden states have this dtype."""
        return cls(products.logits_dtype(dtype).itemsize, dtype.itemsize)


def whole_plan(tokens: int, vocab: int) -> BlockPlan:
    """One block of all tokens and columns."""
    n = max(tokens, 1)
    return BlockPlan(n, vocab, n)


def plan_blocks(tokens: int, vocab: int, size: LogitBytes, block_bytes: int) -> BlockPlan:
    """The largest blocks of at most `block_bytes` of logits and their gradient, all tokens first. Reads no tensor."""
    # Bytes of one column, if a block has no more than the fewest.
    column_bytes = block_bytes // max(min(vocab, _FEWEST_COLUMNS), 1)
    n = column_bytes // (size.logits + size.gradients)
    if n > _BLOCK_LOGIT_TOKENS:
        n = (column_bytes - _BLOCK_LOGIT_TOKENS * size.logits) // size.gradients
    n = even_chunk(tokens, min(_MOST_TOKENS, max(n, 1)))
    logit_tokens = min(n, _BLOCK_LOGIT_TOKENS)
    most = block_bytes // (logit_tokens * size.logits + n * size.gradients)
    return BlockPlan(n, _even_columns(vocab, most), logit_tokens)


def _even_columns(vocab: int, most: int) -> int:
    """Columns of even blocks, whole tiles if one fits: rows of a block then start at multiples of 16 bytes."""
    if most >= vocab:
        return vocab
    return even_chunk(vocab, most if most < TILE else most // TILE * TILE)


def plan_whole_rows(tokens: int, vocab: int, size: LogitBytes, block_bytes: int) -> BlockPlan:
    """As `plan_blocks`, with all columns in a block, and as many logits at once as half of the bytes hold."""
    logit_tokens = max(min(block_bytes // 2 // (vocab * size.logits), _BLOCK_LOGIT_TOKENS), 1)
    most = (block_bytes - logit_tokens * vocab * size.logits) // (vocab * size.gradients)
    n = even_chunk(tokens, most if most < TILE else most // TILE * TILE)  # part of a tile takes as long as a whole one
    return BlockPlan(n, vocab, even_chunk(n, logit_tokens))


def keeps_logits(tokens: int, vocab: int, size: LogitBytes, most_bytes: int) -> bool:
    """Whether the logits of all tokens are kept for backward: they fit together with a block of their gradient."""
    columns = -(-vocab // _KEPT_BLOCKS)
    return tokens * (vocab * size.logits + columns * size.gradients) <= most_bytes


def plan_kept(tokens: int, vocab: int, size: LogitBytes, most_bytes: int) -> BlockPlan:
    """Blocks of all tokens for the gradient of kept logits, which fit together with the logits."""
    n = max(tokens, 1)
    most = (most_bytes - n * vocab * size.logits) // (n * size.gradients)
    return BlockPlan(n, _even_columns(vocab, max(most, -(-vocab // _KEPT_BLOCKS))), n)
