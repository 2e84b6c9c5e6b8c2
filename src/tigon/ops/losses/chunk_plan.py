"""How many tokens linear cross entropy processes at a time, and what it keeps for backward.

`make_chunk_plan` chooses one of four modes by the number of bytes, not by V / H:

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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tigon.ops import dispatch

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


def make_chunk_plan(
    tokens: int, hidden: int, vocab: int, itemsize: int, *, chunk_bytes: tuple[int, int], per_row: bool,
    want_hidden: bool, want_weight: bool, fp32_accumulate: bool = True, fp32_logits: bool = False,
) -> Plan:  # fmt: skip
    """Choose the mode and the chunk size. Reads no tensor, so the planner calls it too.

    chunk_bytes: (least, most). fp32_logits: whether fp32 logits exist beside their gradient of `itemsize` bytes.
    """
    least, most = chunk_bytes
    accumulator_bytes = 4 * vocab * hidden if want_weight and fp32_accumulate else 0
    bytes_alive = min(max(least, accumulator_bytes), most)
    if not (want_hidden or want_weight):
        return _loss_plan(bytes_alive, tokens, vocab, itemsize, fp32_logits)
    fitting, logit_tokens = split_bytes(bytes_alive, vocab, itemsize, fp32_logits)
    logits_bytes = min(logit_tokens, tokens) * vocab * _LOGIT_BYTES
    if tokens * vocab * itemsize + logits_bytes <= least + accumulator_bytes and not per_row:
        return Plan("keep", max(tokens, 1), fp32_accumulate, min(logit_tokens, max(tokens, 1)))
    chunk = even_chunk(tokens, fitting)
    if not fp32_accumulate and tokens > _MOST_16_BIT_ADDENDS * chunk:
        return make_chunk_plan(
            tokens,
            hidden,
            vocab,
            itemsize,
            chunk_bytes=chunk_bytes,
            per_row=per_row,
            want_hidden=want_hidden,
            want_weight=want_weight,
            fp32_logits=fp32_logits,
        )
    return Plan("recompute" if per_row else "stream", chunk, fp32_accumulate, min(logit_tokens, chunk))


def _loss_plan(bytes_alive: int, tokens: int, vocab: int, itemsize: int, fp32_logits: bool) -> Plan:
    """The plan without gradients. A chunk of fp32 logits is no larger than a part of one is beside its gradient."""
    if not fp32_logits:
        return Plan("loss", even_chunk(tokens, bytes_alive // (vocab * itemsize)))
    chunk = even_chunk(tokens, min(bytes_alive // (vocab * _LOGIT_BYTES), _LOGIT_TOKENS))
    return Plan("loss", chunk, logit_tokens=chunk)


def split_bytes(bytes_alive: int, vocab: int, itemsize: int, fp32_logits: bool) -> tuple[int, int]:
    """(the most tokens of a chunk, tokens whose fp32 logits exist at once), within these bytes if they suffice."""
    if not fp32_logits:
        return bytes_alive // (vocab * itemsize), 0
    logit_tokens = max(min(bytes_alive // 2 // (vocab * _LOGIT_BYTES), _LOGIT_TOKENS), 1)
    fitting = (bytes_alive - logit_tokens * vocab * _LOGIT_BYTES) // (vocab * itemsize)
    return fitting, logit_tokens


def buffer_bytes(
    plan: Plan, tokens: int, hidden: int, vocab: int, itemsize: int, *, want_weight: bool
) -> int:  # fmt: skip
    """Bytes of logits and of the head's gradient that a plan holds at one time."""
    rows = tokens if plan.mode == "keep" else plan.chunk
    # A kept gradient of the logits is multiplied once, into the final dtype.
    wide = plan.mode != "keep" and plan.fp32_accumulate
    gradient = vocab * hidden * (max(itemsize, 4) if wide else itemsize) if want_weight and plan.mode != "loss" else 0
    of_gradient = 0 if plan.mode == "loss" and plan.logit_tokens else rows
    return (of_gradient * itemsize + plan.logit_tokens * _LOGIT_BYTES) * vocab + gradient


def plan_within(
    memory_bytes: int, tokens: int, hidden: int, vocab: int, itemsize: int, *, chunk_bytes: tuple[int, int],
    per_row: bool, want_hidden: bool, want_weight: bool, may_sum_in_16_bits: bool, fp32_logits: bool = False,
) -> Plan:  # fmt: skip
    """The fastest plan whose buffers fit into `memory_bytes`, or else the plan with the smallest buffers.

    First is the usual plan. Next is an fp32 sum, as long as chunks are large enough for the products' full rate; then a
    16-bit sum of few chunks; then an fp32 sum of smaller chunks.
    """
    usual = make_chunk_plan(
        tokens, hidden, vocab, itemsize, chunk_bytes=chunk_bytes, per_row=per_row, want_hidden=want_hidden,
        want_weight=want_weight, fp32_logits=fp32_logits,
    )  # fmt: skip
    if usual.mode == "loss":
        return _loss_plan(min(memory_bytes, chunk_bytes[1]), tokens, vocab, itemsize, fp32_logits)
    mode: Mode = "recompute" if per_row else "stream"

    def of_sum(fp32: bool, least_rows: int) -> Plan:
        """A plan with as many tokens per chunk as fit beside the sum, and at least `least_rows`."""
        sum_bytes = buffer_bytes(Plan(mode, 0, fp32), tokens, hidden, vocab, itemsize, want_weight=want_weight)
        bytes_alive = min(memory_bytes - sum_bytes, chunk_bytes[1])
        fitting, logit_tokens = split_bytes(bytes_alive, vocab, itemsize, fp32_logits)
        most = max(fitting, least_rows)
        most = most if most < TILE else most // TILE * TILE
        chunk = even_chunk(tokens, most)
        return Plan(mode, chunk, fp32, min(max(logit_tokens, TILE), chunk) if fp32_logits else 0)

    plans = [usual, of_sum(True, min(_FULL_RATE_TOKENS, max(tokens, 1)))]
    if may_sum_in_16_bits and itemsize == 2 and want_weight:
        fewest = -(-tokens // _MOST_16_BIT_ADDENDS)
        plans.append(of_sum(False, fewest if fewest < TILE else -(-fewest // TILE) * TILE))
    plans.append(of_sum(True, _FEWEST_TOKENS))

    def held(plan: Plan) -> int:
        return buffer_bytes(plan, tokens, hidden, vocab, itemsize, want_weight=want_weight)

    return next((plan for plan in plans if held(plan) <= memory_bytes), min(plans, key=held))


def default_chunk_bytes(hidden: Tensor) -> tuple[int, int]:
    """(least, most) bytes of logits alive at once on hidden's device."""
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


def plan_for(
    hidden_NH: Tensor, weight_VH: Tensor, per_row: bool, want: tuple[bool, ...], chunk_bytes: Sequence[int],
    fp32_accumulate: bool, memory_bytes: int = 0, *, fp32_logits: bool,
) -> Plan:  # fmt: skip
    """The plan of a call.

    chunk_bytes: (least, most). want: the gradients of hidden, weight and bias, and of an adapter's low-rank hidden
    states and second matrix, whose sum is too small to count. memory_bytes: 0 for no limit.
    """
    (N, H), V, itemsize = hidden_NH.shape, weight_VH.shape[0], hidden_NH.element_size()
    least, most = chunk_bytes
    if not isinstance(N, int):
        # A symbolic token count must not decide anything, or every count would need a new compilation.
        mode: Mode = "loss" if not any(want) else "recompute" if per_row else "stream"
        fitting, logit_tokens = split_bytes(least, V, itemsize, fp32_logits)
        return Plan(mode, max(1, fitting), fp32_accumulate, min(logit_tokens, max(1, fitting)))
    want_hidden, want_weight = want[0] or any(want[3:]), want[1] or want[2]
    if memory_bytes:
        return plan_within(
            memory_bytes, N, H, V, itemsize, chunk_bytes=(least, most), per_row=per_row, want_hidden=want_hidden,
            want_weight=want_weight, may_sum_in_16_bits=hidden_NH.dtype == torch.bfloat16, fp32_logits=fp32_logits,
        )  # fmt: skip
    return make_chunk_plan(
        N, H, V, itemsize, chunk_bytes=(least, most), per_row=per_row, want_hidden=want_hidden, want_weight=want_weight,
        fp32_accumulate=fp32_accumulate, fp32_logits=fp32_logits,
    )  # fmt: skip
