"""How many tokens and columns of the vocabulary the ops of a head process at a time, and what they keep for backward.

For a loss, `make_chunk_plan` chooses one of four modes by the number of bytes, not by V / H:

    keep       One chunk. Its gradient G is kept until backward, which computes dX = G W and dW = Gᵀ (g ⊙ X). Chosen if
               the logits fit into `chunk_bytes`, or take less memory than the fp32 accumulator that chunks would need:
               b·N·V <= 4·V·H + chunk_bytes.
    stream     Several chunks. The forward computes dX and an fp32 dW for g = 1; the backward scales them. This is
               exact, because a scalar loss is linear in g.
    recompute  One loss per token. Its g is known only in the backward, which recomputes the logits with g in the row
               factors. Multiplying a 16-bit G by g would save that product but round twice, with three times the
               unfused op's error in bf16. If the weights are known beforehand, `token_weight` costs nothing.
    loss       No gradient is needed: only logits and statistics are computed.

Logits of 16-bit inputs are fp32, unless their product writes exponentials. They exist for a part of a chunk at a time,
beside the 16-bit gradient of the whole chunk. They take up to half of the bytes, so a chunk is 30 to 50 % smaller than
with logits in 16 bits.

For log-probabilities and divergences (`linear_logprobs`, `linear_kl`), `plan_blocks` also splits the vocabulary. That
saves memory: a loss, which splits the tokens alone, sums dW in fp32 (V · H elements). Tokens are split too if there are
more than `_MOST_TOKENS`, because every block of columns then reads and writes a sum of dX that takes as long as its
products. If the logits of all tokens fit, they are kept from forward to backward, which saves a product of each head
(`keeps_logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tigon.ops import dispatch, products
from tigon.ops.head.inputs import Head, Wanted

MIB = 1 << 20
# Bytes of logits alive at once, (least, most). On a GPU, chunks of at least 2048 tokens keep the products at full rate
# (with 128256 columns, 512 MiB hold 2093 tokens of 16-bit logits, and 1024 where logits are fp32). On a CPU, a chunk
# should stay near its last-level cache.
# Each chunk also reads and writes the fp32 sum of dW, so a chunk is as large as that sum, up to `most`. On an H200,
# 16384 x 3584 x 152064 took 87 ms with 1 GiB and 96 ms without. The peak memory was the same, because the cast of the
# sum needs as much.
DEFAULT_CHUNK_BYTES = {"cuda": (512 * MIB, 1024 * MIB), "cpu": (16 * MIB, 16 * MIB)}
# Chunk sizes are multiples of this many tokens, the tile of the products.
TILE = 128
# At most this many chunks have their weight gradients summed in 16 bits; for more, the sum is fp32. A sum of 26 chunks
# (32768 x 2048 x 128256 in 320 MiB of logits) has an error of 4.8e-3, above the limit of 3.4e-3 (twice the unfused op's
# error). A sum of 7 stays below it.
_MOST_16_BIT_ADDENDS = 7

_FULL_RATE_TOKENS = 2048
"""Products of chunks of this many tokens run at full rate; see DEFAULT_CHUNK_BYTES."""
_FEWEST_TOKENS = 512
"""A limit of memory makes no smaller chunks with an fp32 sum. Each chunk reads and writes the sum, 8 bytes per weight.
At 4 TB/s that takes 1.4 times as long as the product of 512 tokens at 700 TFLOP/s (computed, not measured)."""

_LOGIT_TOKENS = 512
"""The most tokens whose fp32 logits exist at once. For 128256 columns they take 251 MiB, and their product takes twice
as long as reading the weight (computed for an H100, not measured)."""
_LOGIT_BYTES = 4

Mode = Literal["keep", "stream", "recompute", "loss"]


class Plan(NamedTuple):
    """The number of tokens per chunk, and what is kept for backward."""

    mode: Mode
    chunk: int
    fp32_accumulate: bool = True
    logit_tokens: int = 0
    """Tokens whose fp32 logits exist at once, beside the gradient of a chunk's logits; 0 if both share memory."""


@dataclass(frozen=True, kw_only=True)
class ChunkRequest:
    """The sizes of a loss, and what it computes."""

    tokens: int
    hidden: int
    vocab: int
    itemsize: int
    chunk_bytes: tuple[int, int]
    """(least, most)"""
    per_row: bool = False
    want_hidden: bool = True
    want_weight: bool = True
    fp32_accumulate: bool = True
    fp32_logits: bool = False
    """Whether fp32 logits exist beside their gradient of `itemsize` bytes."""
    may_sum_in_16_bits: bool = False

    def split(self, bytes_alive: int) -> tuple[int, int]:
        """(the most tokens of a chunk, tokens whose fp32 logits exist at once), within these bytes if they suffice."""
        return split_bytes(bytes_alive, self.vocab, self.itemsize, self.fp32_logits)


def make_chunk_plan(request: ChunkRequest) -> Plan:
    """Choose the mode and the chunk size."""
    tokens, vocab, (least, most) = request.tokens, request.vocab, request.chunk_bytes
    accumulator_bytes = 4 * vocab * request.hidden if request.want_weight and request.fp32_accumulate else 0
    bytes_alive = min(max(least, accumulator_bytes), most)
    if not (request.want_hidden or request.want_weight):
        return _loss_plan(request, bytes_alive)
    fitting, logit_tokens = request.split(bytes_alive)
    logits_bytes = min(logit_tokens, tokens) * vocab * _LOGIT_BYTES
    if tokens * vocab * request.itemsize + logits_bytes <= least + accumulator_bytes and not request.per_row:
        return Plan("keep", max(tokens, 1), request.fp32_accumulate, min(logit_tokens, max(tokens, 1)))
    chunk = even_chunk(tokens, fitting)
    if not request.fp32_accumulate and tokens > _MOST_16_BIT_ADDENDS * chunk:
        return make_chunk_plan(replace(request, fp32_accumulate=True))
    mode: Mode = "recompute" if request.per_row else "stream"
    return Plan(mode, chunk, request.fp32_accumulate, min(logit_tokens, chunk))


def _loss_plan(request: ChunkRequest, bytes_alive: int) -> Plan:
    """The plan without gradients. A chunk of fp32 logits is no larger than a part of one is beside its gradient."""
    if not request.fp32_logits:
        return Plan("loss", even_chunk(request.tokens, bytes_alive // (request.vocab * request.itemsize)))
    chunk = even_chunk(request.tokens, min(bytes_alive // (request.vocab * _LOGIT_BYTES), _LOGIT_TOKENS))
    return Plan("loss", chunk, logit_tokens=chunk)


def split_bytes(bytes_alive: int, vocab: int, itemsize: int, fp32_logits: bool) -> tuple[int, int]:
    """(the most tokens of a chunk, tokens whose fp32 logits exist at once), within these bytes if they suffice."""
    if not fp32_logits:
        return bytes_alive // (vocab * itemsize), 0
    logit_tokens = max(min(bytes_alive // 2 // (vocab * _LOGIT_BYTES), _LOGIT_TOKENS), 1)
    fitting = (bytes_alive - logit_tokens * vocab * _LOGIT_BYTES) // (vocab * itemsize)
    return fitting, logit_tokens


def buffer_bytes(plan: Plan, request: ChunkRequest) -> int:
    """Bytes of logits and of the head's gradient that a plan holds at one time."""
    itemsize, vocab = request.itemsize, request.vocab
    rows = request.tokens if plan.mode == "keep" else plan.chunk
    # A kept gradient of the logits is multiplied once, into the final dtype.
    wide = plan.mode != "keep" and plan.fp32_accumulate
    gradient = 0
    if request.want_weight and plan.mode != "loss":
        gradient = vocab * request.hidden * (max(itemsize, 4) if wide else itemsize)
    of_gradient = 0 if plan.mode == "loss" and plan.logit_tokens else rows
    return (of_gradient * itemsize + plan.logit_tokens * _LOGIT_BYTES) * vocab + gradient


def plan_within(memory_bytes: int, request: ChunkRequest) -> Plan:
    """The fastest plan whose buffers fit into `memory_bytes`, or else the plan with the smallest buffers.

    First is the usual plan. Next is an fp32 sum, as long as chunks are large enough for the products' full rate; then a
    16-bit sum of few chunks; then an fp32 sum of smaller chunks.
    """
    tokens, most_alive = request.tokens, request.chunk_bytes[1]
    usual = make_chunk_plan(request)
    if usual.mode == "loss":
        return _loss_plan(request, min(memory_bytes, most_alive))
    mode: Mode = "recompute" if request.per_row else "stream"

    def of_sum(fp32: bool, least_rows: int) -> Plan:
        """A plan with as many tokens per chunk as fit beside the sum, and at least `least_rows`."""
        fitting, logit_tokens = request.split(
            min(memory_bytes - buffer_bytes(Plan(mode, 0, fp32), request), most_alive)
        )
        most = max(fitting, least_rows)
        most = most if most < TILE else most // TILE * TILE
        chunk = even_chunk(tokens, most)
        return Plan(mode, chunk, fp32, min(max(logit_tokens, TILE), chunk) if request.fp32_logits else 0)

    plans = [usual, of_sum(True, min(_FULL_RATE_TOKENS, max(tokens, 1)))]
    if request.may_sum_in_16_bits and request.itemsize == 2 and request.want_weight:
        fewest = -(-tokens // _MOST_16_BIT_ADDENDS)
        plans.append(of_sum(False, fewest if fewest < TILE else -(-fewest // TILE) * TILE))
    plans.append(of_sum(True, _FEWEST_TOKENS))
    fitting_plans = (plan for plan in plans if buffer_bytes(plan, request) <= memory_bytes)
    return next(fitting_plans, min(plans, key=lambda plan: buffer_bytes(plan, request)))


def default_chunk_bytes(hidden: Tensor, chunk_bytes: int | None = None) -> tuple[int, int]:
    """(least, most) bytes of logits alive at once; by default those of hidden's device."""
    if chunk_bytes is not None:
        return chunk_bytes, chunk_bytes
    return DEFAULT_CHUNK_BYTES.get(dispatch.planned_device(hidden), DEFAULT_CHUNK_BYTES["cuda"])


def even_chunk(tokens: int, most: int) -> int:
    """The chunk size that splits `tokens` evenly into the fewest chunks of at most `most`; whole tiles if they fit."""
    most = max(most, 1)
    if tokens <= most:
        return max(tokens, 1)
    chunks = -(-tokens // most)
    even = -(-tokens // chunks)
    tiles = -(-even // TILE) * TILE
    return tiles if tiles <= most else even


class ChunkLimits(NamedTuple):
    """The limits that a call sets to its plan."""

    chunk_bytes: Sequence[int]
    """(least, most)"""
    fp32_accumulate: bool
    memory_bytes: int
    """The most bytes of logits and of the weight's gradient; 0 for no limit."""


def plan_for(head: Head, limits: ChunkLimits, wanted: Wanted, *, per_row: bool, fp32_logits: bool) -> Plan:
    """The plan of a call. The sum of an adapter's second gradient is too small to count."""
    (N, H), V, itemsize = head.hidden_NH.shape, head.vocab, head.hidden_NH.element_size()
    least, most = limits.chunk_bytes
    if not isinstance(N, int):
        # A symbolic token count must not decide anything, or every count would need a new compilation.
        mode: Mode = "loss" if not any(wanted) else "recompute" if per_row else "stream"
        fitting, logit_tokens = split_bytes(least, V, itemsize, fp32_logits)
        return Plan(mode, max(1, fitting), limits.fp32_accumulate, min(logit_tokens, max(1, fitting)))
    request = ChunkRequest(
        tokens=N, hidden=H, vocab=V, itemsize=itemsize, chunk_bytes=(least, most), per_row=per_row,
        want_hidden=wanted.want_hidden or wanted.want_low or wanted.want_lora_b,
        want_weight=wanted.want_weight or wanted.want_bias,
        fp32_accumulate=limits.fp32_accumulate or limits.memory_bytes > 0, fp32_logits=fp32_logits,
        may_sum_in_16_bits=head.dtype == torch.bfloat16,
    )  # fmt: skip
    return plan_within(limits.memory_bytes, request) if limits.memory_bytes else make_chunk_plan(request)


# --- blocks of tokens and columns -------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class BlockPlan:
    """The size of the blocks."""

    tokens: int
    columns: int
    logit_tokens: int
    """Tokens whose logits exist at once."""

    def token_slices(self, N: int) -> list[slice]:
        return _slices(0, N, self.tokens)

    def column_slices(self, V: int) -> list[slice]:
        return _slices(0, V, self.columns) or [slice(0, 0)]  # a process may hold no row of the weight

    def logit_slices(self, rows: slice) -> list[slice]:
        """The parts of a slice of the tokens whose logits exist at once."""
        return _slices(rows.start, rows.stop, self.logit_tokens)


def _slices(start: int, stop: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, stop)) for at in range(start, stop, max(step, 1))]


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
    n = even_chunk(tokens, most)
    return BlockPlan(n, vocab, min(n, logit_tokens))


def keeps_logits(tokens: int, vocab: int, size: LogitBytes, most_bytes: int) -> bool:
    """Whether the logits of all tokens are kept for backward: they fit together with a block of their gradient."""
    columns = -(-vocab // _KEPT_BLOCKS)
    return tokens * (vocab * size.logits + columns * size.gradients) <= most_bytes


def plan_kept(tokens: int, vocab: int, size: LogitBytes, most_bytes: int) -> BlockPlan:
    """Blocks of all tokens for the gradient of kept logits, which fit together with the logits."""
    n = max(tokens, 1)
    most = (most_bytes - n * vocab * size.logits) // (n * size.gradients)
    return BlockPlan(n, _even_columns(vocab, max(most, -(-vocab // _KEPT_BLOCKS))), n)
