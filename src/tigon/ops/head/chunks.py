"""Linear cross entropy in chunks of tokens: how large they are, what is kept for backward, and the loop over them.

`plan_for` chooses one of four modes by the number of bytes, not by V / H:

    keep_grad  One chunk. Its gradient G is kept until backward, which computes dX = G W and dW = Gᵀ (g ⊙ X). Chosen if
               the logits fit into `chunk_bytes`, or take less memory than the fp32 accumulator that chunks would need:
               b·N·V <= 4·V·H + chunk_bytes.
    stream     Several chunks. The forward computes dX and an fp32 dW for g = 1; the backward scales them. This is
               exact, because a scalar loss is linear in g.
    recompute  One loss per token. Its g is known only in the backward, which recomputes the logits with g in the row
               factors. Multiplying a 16-bit G by g would save that product but round twice, with three times the
               unfused op's error in bf16. If the weights are known beforehand, `token_weight` costs nothing. If the
               head is frozen, the mode is `stream`: then g multiplies the rows of dX.
    loss       No gradient is needed: only logits and statistics are computed.

Logits of 16-bit inputs are fp32, unless their product writes exponentials. They exist for a part of a chunk at a time,
beside the 16-bit gradient of the whole chunk. They take up to half of the bytes, so a chunk is 30 to 50 % smaller than
with logits in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.chips import LogitsTile
from tigon.ops import dispatch
from tigon.ops.dispatch import Primitive, no_autocast
from tigon.ops.head import exponentials
from tigon.ops.head.block_loop import BlockPlan, GradientSums, run_blocks
from tigon.ops.head.inputs import (
    NOTHING,
    ChunkLimits,
    Gradients,
    Head,
    LogitBuffer,
    Wanted,
    starts_aligned,
    sum_dtype,
)
from tigon.ops.losses.cross_entropy_rows import Rows, rows_with_gradient
from tigon.ops.losses.inputs import LossOptions, TokenLabels, check_labels, wants_label_check
from tigon.ops.signature import SYMBOLIC

# N tokens, C tokens of a chunk, H hidden, V vocabulary, R rank of an adapter.

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

Mode = Literal["keep_grad", "stream", "recompute", "loss"]


def even_chunk(tokens: int, most: int) -> int:
    """The chunk size that splits `tokens` evenly into the fewest chunks of at most `most`; whole tiles if they fit."""
    most = max(most, 1)
    if tokens <= most:
        return max(tokens, 1)
    chunks = -(-tokens // most)
    even = -(-tokens // chunks)
    tiles = -(-even // TILE) * TILE
    return tiles if tiles <= most else even


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
    sums_tokens: bool = True
    """Whether a wanted gradient adds up tokens, as a weight's does. Otherwise g can multiply rows afterwards."""
    want_hidden: bool = True
    want_weight: bool = True
    fp32_accumulate: bool = True
    fp32_logits: bool = False
    """Whether fp32 logits exist beside their gradient of `itemsize` bytes."""
    may_sum_in_16_bits: bool = False

    @property
    def mode_of_chunks(self) -> Mode:
        return "recompute" if self.per_row and self.sums_tokens else "stream"

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
        return Plan("keep_grad", max(tokens, 1), request.fp32_accumulate, min(logit_tokens, max(tokens, 1)))
    chunk = even_chunk(tokens, fitting)
    if not request.fp32_accumulate and tokens > _MOST_16_BIT_ADDENDS * chunk:
        return make_chunk_plan(replace(request, fp32_accumulate=True))
    return Plan(request.mode_of_chunks, chunk, request.fp32_accumulate, min(logit_tokens, chunk))


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
    rows = request.tokens if plan.mode == "keep_grad" else plan.chunk
    # A kept gradient of the logits is multiplied once, into the final dtype.
    wide = plan.mode != "keep_grad" and plan.fp32_accumulate
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
    mode = request.mode_of_chunks

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
        tokens=N,
        hidden=H,
        vocab=V,
        itemsize=itemsize,
        chunk_bytes=(least, most),
        per_row=per_row,
        sums_tokens=wanted.want_weight or wanted.want_bias or wanted.want_lora_b,
        want_hidden=wanted.want_hidden or wanted.want_low or wanted.want_lora_b,
        want_weight=wanted.want_weight or wanted.want_bias,
        fp32_accumulate=limits.fp32_accumulate or limits.memory_bytes > 0,
        fp32_logits=fp32_logits,
        may_sum_in_16_bits=head.dtype == torch.bfloat16,
    )
    return plan_within(limits.memory_bytes, request) if limits.memory_bytes else make_chunk_plan(request)


# --- bf16 logits that leave their product as exponentials, so that no pass over them follows ---

FEWEST_EXP_ROWS = 16
"""With fewer tokens, reading the weight takes the time, and the vendor's product is faster. It takes 0.25 ms instead of
0.33 for 1 x 4096 x 128256 on an H200 (torch 2.11+cu130, triton 3.6, commit 3dc13d9, 2026-11-21)."""


def exp_tile(hidden_NH: Tensor, weight_VH: Tensor, options: LossOptions, other_outputs: bool) -> LogitsTile | None:
    """The tile of the product that writes exponentials, or None if a pass over the logits follows. Reads no data."""
    bf16 = hidden_NH.dtype == weight_VH.dtype == torch.bfloat16
    aligned = hidden_NH.shape[1] % 8 == 0  # rows of 16 bytes, which tensor descriptors need
    if not (bf16 and aligned) or options.label_smoothing or other_outputs:
        return None
    chip = dispatch.planned_chip(hidden_NH)
    return None if chip is None else chip.logits_tile


def needs_fp32_logits(hidden_NH: Tensor, weight_VH: Tensor, options: LossOptions, other_outputs: bool) -> bool:
    """Whether the loop stores fp32 logits: a pass reads the logits, and the hidden states have 16 bits.

    other_outputs: a bias is trained, or there is an adapter, entropy or predictions.
    """
    return hidden_NH.dtype.itemsize == 2 and exp_tile(hidden_NH, weight_VH, options, other_outputs) is None


def exp_logits(
    head: Head, labels: TokenLabels, options: LossOptions, tile: LogitsTile, e_CV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, stats, factors) of a chunk; writes the exponentials E, which lack the factors, into `e_CV`."""
    from tigon.kernels.linear_cross_entropy import exp_logits

    if wants_label_check(head.hidden_NH):
        check_labels(head.vocab, labels.target, options.ignore_index)
    if not starts_aligned(head.hidden_NH):
        head = head._replace(hidden_NH=head.hidden_NH.clone(memory_format=torch.contiguous_format))
    return exp_logits(head, labels, options, tile, e_CV)  # type: ignore[no-any-return]


# --- the chunks of linear cross entropy -------------------------------------------------------------------------------

_UNPLANNED_ROWS = 128
"""Tokens whose fp32 logits exist at once if the plan was for exponentials, and the weight does not start on 16 bytes.
For 128256 columns they take 63 MiB, which no plan counts."""


@dataclass(frozen=True, kw_only=True)
class ChunkOptions:
    """The chunk size, and the results that are wanted."""

    loss: LossOptions
    chunk: Annotated[int, SYMBOLIC]
    """Tokens of a chunk."""
    logit_tokens: Annotated[int, SYMBOLIC] = 0
    """As in `Plan`."""
    keep: bool = False
    """Return the logits' gradient instead of the gradients of hidden and weight."""
    fp32_accumulate: bool = True
    wanted: Wanted = NOTHING
    entropy: bool = False
    predicted: bool = False

    @property
    def summed(self) -> Wanted:
        """The gradients that the loop sums."""
        return Wanted(want_bias=self.wanted.want_bias) if self.keep else self.wanted


class ChunkResults(NamedTuple):
    """The results of the loop; tensors that are not wanted are empty."""

    loss: Tensor
    stats: Tensor
    entropy: Tensor
    predicted: Tensor
    dx_NH: Tensor
    dw_VH: Tensor
    db_V: Tensor
    dlow_NR: Tensor
    dlora_b_VR: Tensor
    kept_NV: Tensor
    factors: Tensor
    """(2, N): the factors of kept_NV's rows and of the label terms that it lacks; empty if it is complete."""

    @property
    def gradients(self) -> Gradients:
        return Gradients(*self[4:9])


def _chunks_outputs(head: Head, options: ChunkOptions, exp: bool) -> ChunkResults:
    """Uninitialised outputs of the chunk loop; outputs that are not wanted are empty."""
    x, N, V, acc = head.hidden_NH, head.tokens, head.vocab, head.sum_dtype
    # fp16 sums stay in fp32 until the loss scale is applied.
    dw_dtype = acc if options.fp32_accumulate else head.weight_VH.dtype
    return ChunkResults(
        x.new_empty(N, dtype=acc),
        x.new_empty((3, N), dtype=acc),
        x.new_empty(N if options.entropy else 0, dtype=acc),
        x.new_empty(N if options.predicted else 0, dtype=torch.int64),
        *Gradients.empty(head, options.summed, sum_dtype(x, False), dw_dtype),
        LogitBuffer(N, V, x, x.dtype).view(N, V) if options.keep else x.new_empty((0, V)),
        x.new_empty((2, N if options.keep and exp else 0), dtype=acc),
    )


def _tile_of(head: Head, options: ChunkOptions) -> LogitsTile | None:
    other_outputs = options.wanted.want_bias or options.entropy or options.predicted or head.low_NR is not None
    return exp_tile(head.hidden_NH, head.weight_VH, options.loss, other_outputs)


def _logits_memory(head: Head, options: ChunkOptions, rows: int) -> LogitBuffer | None:
    """Memory for logits that are wider than their gradient; None if both share memory. rows: of a chunk."""
    if head.logits_dtype == head.dtype:
        return None
    return LogitBuffer(
        min(options.logit_tokens or _UNPLANNED_ROWS, rows), head.vocab, head.hidden_NH, head.logits_dtype
    )


class _Chunks:
    """The results of each chunk's tokens, and the gradient of their logits."""

    def __init__(self, head: Head, labels: TokenLabels, options: ChunkOptions, outputs: ChunkResults) -> None:
        self.head, self.labels, self.options, self.outputs = head, labels, options, outputs
        self.logits: LogitBuffer | None = None

    def select_tokens(self, rows: slice) -> tuple[Head, TokenLabels]:
        return self.head.part(rows), self.labels.part(rows)

    def no_gradient_mask(self, rows: slice) -> None:
        return None

    def run(self) -> None:
        head, options, (N, V) = self.head, self.options, (self.head.tokens, self.head.vocab)
        most = min(options.chunk, N)
        self.logits = _logits_memory(head, options, most)
        plan = BlockPlan(options.chunk, V, options.chunk if self.logits is None else self.logits.tokens)
        block = self._gradient_block(most, shared=self.logits is None)
        sums = GradientSums(head, options.summed, self.outputs.gradients, plan, block)
        run_blocks(plan, [sums], (N, V), self)

    def _gradient_block(self, most: int, *, shared: bool) -> Callable[[int, int], Tensor] | None:
        """Memory for the gradient of a chunk's logits, and for the logits if they share it."""
        x, V = self.head.hidden_NH, self.head.vocab
        if self.options.keep:
            return lambda n, c: self.outputs.kept_NV
        return LogitBuffer(most, V, x, x.dtype).view if any(self.options.wanted) or shared else None

    def compute_block(
        self, part: tuple[Head, TokenLabels], rows: slice, columns: slice, grads: Sequence[Tensor | None]
    ) -> None:
        (head, labels), options, grad = part, self.options, grads[0]
        logits = grad if self.logits is None else self.logits.view(head.tokens, head.vocab)
        assert logits is not None
        head.logits_into(logits)
        loss, stats, entropy, predicted = rows_with_gradient(
            Rows(logits, labels.target, labels.class_weight, labels.token_weight, options.loss),
            options.entropy,
            options.predicted,
            labels.grad_scale,
            grad if any(options.wanted) else None,
        )
        self.put(rows, loss=loss, stats=stats)
        if options.entropy:
            self.put(rows, entropy=entropy)
        if options.predicted:
            self.put(rows, predicted=predicted)

    def put(self, rows: slice, **parts: Tensor) -> None:
        """Take the values of some rows. A single part's tensors are taken as they are, without a copy."""
        if rows.stop - rows.start == self.head.tokens:
            self.outputs = self.outputs._replace(**parts)
            return
        for name, part in parts.items():
            getattr(self.outputs, name)[..., rows] = part

    def run_exp(self, tile: LogitsTile) -> None:
        """As `run`, for logits that leave their product as exponentials."""
        options, (N, V) = self.options, (self.head.tokens, self.head.vocab)
        block = self._gradient_block(min(options.chunk, N), shared=False)
        if not N:
            self.outputs.gradients.zero_sums()
        for start in range(0, N, options.chunk):
            rows = slice(start, min(start + options.chunk, N))
            e_CV = None if block is None else block(rows.stop - rows.start, V)
            self._exp_chunk(rows, tile, e_CV)

    def _exp_chunk(self, rows: slice, tile: LogitsTile, e_CV: Tensor | None) -> None:
        (head, labels), options = self.select_tokens(rows), self.options
        loss, stats, factors = exp_logits(head, labels, options.loss, tile, e_CV)
        self.put(rows, loss=loss, stats=stats)
        if options.keep:
            self.put(rows, factors=factors)
            return
        del loss, stats  # otherwise they stay until the next chunk's exist: 16 bytes per token of a chunk
        if e_CV is not None and options.wanted.want_hidden:
            self.outputs.dx_NH[rows] = exponentials.hidden_grad(
                e_CV, head.weight_VH, factors, labels.target, None, head.tokens
            )
        if e_CV is not None and options.wanted.want_weight:
            exponentials.weight_grad_into(
                e_CV, head.hidden_NH, factors, labels.target, self.outputs.dw_VH, accumulate=rows.start > 0
            )


def _chunks_body(head: Head, labels: TokenLabels, options: ChunkOptions) -> ChunkResults:
    tile = _tile_of(head, options)
    outputs = _chunks_outputs(head, options, tile is not None)
    few = head.tokens < FEWEST_EXP_ROWS
    if tile is not None and (few or not starts_aligned(head.weight_VH)):
        tile = None
        outputs.factors[0], outputs.factors[1] = 1.0, 0.0
    chunks = _Chunks(head, labels, options, outputs)
    with no_autocast(head.hidden_NH):
        chunks.run() if tile is None else chunks.run_exp(tile)
    return chunks.outputs


def _chunks_fake(head: Head, labels: TokenLabels, options: ChunkOptions) -> ChunkResults:
    x, rows, V = head.hidden_NH, options.chunk, head.vocab
    tile = _tile_of(head, options)
    outputs = _chunks_outputs(head, options, tile is not None)
    # The planner traces this fake: besides the outputs, the loop holds a chunk's logits and its kernels' buffers.
    logits = _logits_memory(head, options, rows) if tile is None else None
    alive = [] if logits is None else [logits.memory]
    shared = tile is None and logits is None
    del logits
    if not options.keep and (any(options.wanted) or shared):
        alive.append(LogitBuffer(rows, V, x, x.dtype).memory)
    if tile is not None:
        alive.append(x.new_empty((rows, -(-V // tile.vocab)), dtype=torch.float32))
        if any(options.wanted) and not options.keep:
            alive.append(x.new_empty((rows, x.shape[1])))
    del alive
    return outputs


chunk_loop = Primitive("linear_cross_entropy_chunks", composite=_chunks_body, fake=_chunks_fake)
"""Run the loop; chunk_loop(Head, TokenLabels, ChunkOptions) -> ChunkResults."""
