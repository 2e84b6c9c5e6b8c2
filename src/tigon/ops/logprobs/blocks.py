"""The loop over blocks of logits: log-probabilities from hidden states and an lm_head, and the gradients of both.

A block is some tokens by some columns of the vocabulary. Its logits are matrix products into a reused buffer, of at
most `_LOGIT_TOKENS` tokens each, in fp32 also for 16-bit factors. The forward adds them to the statistics of their
rows. The backward computes them again and writes their gradient in the factors' dtype. Two products of the whole block
reduce that:

    dX += G W_block       summed over the blocks of columns, in fp32 (N · H elements)
    dW_block = Gᵀ X       complete after one product, so the weight gradient needs no fp32 sum

Splitting the vocabulary first is what saves memory: linear_cross_entropy, which splits the tokens, sums dW in fp32
(V · H elements). Tokens are split too if there are more than `_MOST_TOKENS`, because every block of columns then reads
and writes a sum of dX that takes as long as its products.

Forward and backward of `linear_logprobs` have products of the same shapes. In another shape a library may sum in
another order, and a logit may differ by a rounding. If a probability p is near 1, its gradient is of the size of 1 -
p and has the error of p.

If the logits of all tokens fit, they are kept from forward to backward, which saves one of the four products. The
backward then writes the gradient of one block of columns after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.ops import lm_head
from tigon.ops.dispatch import Primitive, planned_device, uses_kernel
from tigon.ops.lm_head import column_sum, logits_into, no_autocast, product_into
from tigon.ops.logprobs.rows import Block, LogprobOptions, Rows, Upstream, add_block, check_ids, gradient_into
from tigon.ops.losses.chunk_plan import TILE, even_chunk

# N tokens, H hidden, V vocabulary, K ids of a token, J largest logits; a block has n tokens and c columns.

_MOST_TOKENS = 32768
_LOGIT_TOKENS = 2048
"""The most tokens whose logits exist at once if they are computed twice: products of as many run at full rate."""
_FEWEST_COLUMNS = 1024
_KEPT_BLOCKS = 8
"""Logits are kept if there is room for the gradient of one in this many of their columns."""


class LogitBytes(NamedTuple):
    """Bytes of one token's logits of one column, and of their gradients. For two heads, of both together."""

    logits: int
    gradients: int


def logit_bytes(dtype: torch.dtype) -> LogitBytes:
    """For a head whose hidden states have this dtype."""
    return LogitBytes(lm_head.logits_dtype(dtype).itemsize, dtype.itemsize)


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
        return _slices(0, V, self.columns)

    def logit_slices(self, rows: slice) -> list[slice]:
        """The parts of a slice of the tokens whose logits exist at once."""
        return _slices(rows.start, rows.stop, self.logit_tokens)


def _slices(start: int, stop: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, stop)) for at in range(start, stop, step)]


def plan_blocks(tokens: int, vocab: int, size: LogitBytes, block_bytes: int) -> BlockPlan:
    """The largest blocks of at most `block_bytes` of logits and their gradient, all tokens first. Reads no tensor."""
    # Bytes of one column, if a block has no more than the fewest.
    column_bytes = block_bytes // min(vocab, _FEWEST_COLUMNS)
    n = column_bytes // (size.logits + size.gradients)
    if n > _LOGIT_TOKENS:
        n = (column_bytes - _LOGIT_TOKENS * size.logits) // size.gradients
    n = even_chunk(tokens, min(_MOST_TOKENS, max(n, 1)))
    logit_tokens = min(n, _LOGIT_TOKENS)
    most = block_bytes // (logit_tokens * size.logits + n * size.gradients)
    return BlockPlan(n, _even_columns(vocab, most), logit_tokens)


def _even_columns(vocab: int, most: int) -> int:
    """Columns of even blocks, whole tiles if one fits: rows of a block then start at multiples of 16 bytes."""
    if most >= vocab:
        return vocab
    return even_chunk(vocab, most if most < TILE else most // TILE * TILE)


def plan_whole_rows(tokens: int, vocab: int, size: LogitBytes, block_bytes: int) -> BlockPlan:
    """As `plan_blocks`, with all columns in a block, and as many logits at once as half of the bytes hold."""
    logit_tokens = max(min(block_bytes // 2 // (vocab * size.logits), _LOGIT_TOKENS), 1)
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


class _Buffer:
    """Memory of a dtype for the logits or the gradient of one block.

    For kernels, rows start at multiples of 16 bytes. On the CPU they are contiguous (see `lm_head.logits_buffer`).
    """

    def __init__(self, tokens: int, columns: int, like: Tensor, dtype: torch.dtype) -> None:
        aligned = planned_device(like) != "cpu" or uses_kernel(like)
        self._line = 16 // dtype.itemsize if aligned else 1
        self.memory = like.new_empty(tokens * self._width(columns), dtype=dtype)

    def _width(self, columns: int) -> int:
        return -(-columns // self._line) * self._line

    def view(self, n: int, c: int) -> Tensor:
        """(n, c) at the start of the buffer."""
        width = self._width(c)
        return self.memory[: n * width].view(n, width)[:, :c]


@dataclass(frozen=True)
class HeadTensors:
    """Hidden states and the lm_head."""

    hidden_NH: Tensor
    weight_VH: Tensor
    bias: Tensor | None

    @property
    def logits_dtype(self) -> torch.dtype:
        return lm_head.logits_dtype(self.hidden_NH.dtype)

    @property
    def logit_bytes(self) -> LogitBytes:
        return logit_bytes(self.hidden_NH.dtype)

    def logits_buffer(self, plan: BlockPlan) -> _Buffer:
        """Memory for the logits that exist at once."""
        return _Buffer(plan.logit_tokens, plan.columns, self.hidden_NH, self.logits_dtype)

    def gradient_buffer(self, plan: BlockPlan) -> _Buffer:
        """Memory for the gradient of a block of logits."""
        return _Buffer(plan.tokens, plan.columns, self.hidden_NH, self.hidden_NH.dtype)

    def no_logits(self) -> Tensor:
        """Logits that are not kept."""
        return self.hidden_NH.new_empty((0, self.weight_VH.shape[0]), dtype=self.logits_dtype)

    def logits(self, rows: slice, columns: slice, out_nc: Tensor) -> Block:
        """Compute the logits of a block into `out_nc`."""
        bias = None if self.bias is None else self.bias[columns]
        logits_into(self.hidden_NH[rows], self.weight_VH[columns], bias, out_nc)
        return Block(out_nc, columns.start, self.weight_VH.shape[0])


class ForwardResults(NamedTuple):
    """The forward's results; those that are not wanted are empty."""

    logprob_NK: Tensor
    stats_2N: Tensor
    entropy_N: Tensor
    predicted_N: Tensor
    topk_logprob_NJ: Tensor
    topk_ids_NJ: Tensor
    kept_NV: Tensor


def _forward_plan(tensors: HeadTensors, keep: bool, block_bytes: int) -> BlockPlan:
    N, V = tensors.hidden_NH.shape[0], tensors.weight_VH.shape[0]
    if keep:
        n = max(N, 1)
        return BlockPlan(n, V, n)
    return plan_blocks(N, V, tensors.logit_bytes, block_bytes)


def _forward_body(
    tensors: HeadTensors, ids_NK: Tensor, options: LogprobOptions, keep: bool, block_bytes: int
) -> ForwardResults:  # fmt: skip
    hidden_NH, weight_VH = tensors.hidden_NH, tensors.weight_VH
    N, V = hidden_NH.shape[0], weight_VH.shape[0]
    check_ids(hidden_NH, ids_NK, V, options.ignore_index)
    plan = _forward_plan(tensors, keep, block_bytes)
    buffer = tensors.logits_buffer(plan)
    kept_NV = buffer.view(N, V) if keep else tensors.no_logits()
    parts: list[_RowResults] = []
    with no_autocast(hidden_NH):
        for rows in (part for chunk in plan.token_slices(N) for part in plan.logit_slices(chunk)):
            at = None
            for columns in plan.column_slices(V):
                block = tensors.logits(rows, columns, buffer.view(rows.stop - rows.start, columns.stop - columns.start))
                if at is None:  # allocated while the first product runs
                    at = Rows.empty(ids_NK[rows], hidden_NH, options, one_block=plan.columns >= V)
                add_block(block, at, options)
            assert at is not None
            parts.append(_row_results(at, options))
    if not parts:
        parts.append(_row_results(Rows.empty(ids_NK, hidden_NH, options, one_block=True), options))
    results = parts[0] if len(parts) == 1 else _joined(parts)
    return ForwardResults(*results, kept_NV)


_RowResults = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The fields of `ForwardResults` but the last."""


def _joined(parts: Sequence[_RowResults]) -> _RowResults:
    """The results of several chunks of tokens. The rows are the last dimension of stats_2N, the first of the others."""
    logprob, stats, entropy, predicted, topk_logprob, topk_ids = zip(*parts, strict=True)
    return (
        torch.cat(logprob), torch.cat(stats, 1), torch.cat(entropy), torch.cat(predicted), torch.cat(topk_logprob),
        torch.cat(topk_ids),
    )  # fmt: skip


def _row_results(rows: Rows, options: LogprobOptions) -> _RowResults:
    return (
        rows.logprob_NK, rows.stats_2N, rows.entropy_N, rows.predicted_N, rows.topk_logprob(options), rows.topk_ids_NJ
    )  # fmt: skip


def _forward_fake(
    tensors: HeadTensors, ids_NK: Tensor, options: LogprobOptions, keep: bool, block_bytes: int
) -> ForwardResults:  # fmt: skip
    hidden_NH, V = tensors.hidden_NH, tensors.weight_VH.shape[0]
    N = hidden_NH.shape[0]
    if keep or not isinstance(N, int):
        rows = Rows.empty(ids_NK, hidden_NH, options, one_block=True)
        kept_NV = tensors.logits_buffer(BlockPlan(N, V, N)).view(N, V) if keep else tensors.no_logits()
    else:
        # The planner traces this fake: the buffer is alive inside the operator.
        plan = _forward_plan(tensors, keep, block_bytes)
        buffer = tensors.logits_buffer(plan)
        rows = Rows.empty(ids_NK, hidden_NH, options, one_block=plan.columns >= V)
        kept_NV = tensors.no_logits()
        del buffer
    return ForwardResults(
        rows.logprob_NK, rows.stats_2N, rows.entropy_N, rows.predicted_N, torch.empty_like(rows.topk_raw_NJ),
        rows.topk_ids_NJ, kept_NV,
    )  # fmt: skip


linear_logprobs_fwd = Primitive("linear_logprobs_fwd", composite=_forward_body, fake=_forward_fake)


@dataclass(frozen=True)
class BackwardOptions:
    """The gradients that are wanted."""

    want_hidden: bool
    want_weight: bool
    want_bias: bool
    block_bytes: int
    """The most bytes of logits and of their gradient. For kept logits, of these and a block of their gradient."""
    fp32_hidden: bool = False
    """Whether the gradient of hidden is at least fp32, because other processes' parts are added to it."""
    gathered: bool = False
    """Whether only rows that count are there, so that none is left out."""


class Gradients(NamedTuple):
    """Gradients times `Upstream.scale`; what is not wanted is empty. In fp16 they are fp32."""

    dx_NH: Tensor
    dw_VH: Tensor
    db_V: Tensor


def _sum_dtype(x: Tensor, several: bool) -> torch.dtype:
    """fp32 if several products are summed, and for fp16, whose gradients still lack a factor."""
    return torch.promote_types(x.dtype, torch.float32) if several or x.dtype == torch.float16 else x.dtype


def _backward_plan(tensors: HeadTensors, options: BackwardOptions, kept: bool) -> BlockPlan:
    N, V = tensors.hidden_NH.shape[0], tensors.weight_VH.shape[0]
    plan = plan_kept if kept else plan_blocks
    return plan(N, V, tensors.logit_bytes, options.block_bytes)


def empty_gradients(tensors: HeadTensors, options: BackwardOptions, plan: BlockPlan) -> Gradients:
    """Uninitialised gradients, in the dtypes that blocks of this plan need."""
    hidden_NH, weight_VH = tensors.hidden_NH, tensors.weight_VH
    (N, H), V = hidden_NH.shape, weight_VH.shape[0]
    dw_dtype, acc = _sum_dtype(weight_VH, plan.tokens < N), torch.promote_types(hidden_NH.dtype, torch.float32)
    dx_dtype = _sum_dtype(hidden_NH, options.fp32_hidden)
    return Gradients(
        dx_NH=hidden_NH.new_empty((N if options.want_hidden else 0, H), dtype=dx_dtype),
        dw_VH=hidden_NH.new_empty((V if options.want_weight else 0, H), dtype=dw_dtype),
        db_V=hidden_NH.new_empty(V if options.want_bias else 0, dtype=acc),
    )


def _backward_body(
    tensors: HeadTensors, upstream: Upstream, kept_NV: Tensor | None, logprob: LogprobOptions,
    options: BackwardOptions,
) -> Gradients:  # fmt: skip
    """The gradients of all blocks. kept_NV: the logits of all tokens; None to compute them again."""
    N, V = tensors.hidden_NH.shape[0], tensors.weight_VH.shape[0]
    plan = _backward_plan(tensors, options, kept_NV is not None)
    gradients, logits = tensors.gradient_buffer(plan), None if kept_NV is not None else tensors.logits_buffer(plan)
    sums = GradientSums(tensors, options, plan)
    with no_autocast(tensors.hidden_NH):
        for rows in plan.token_slices(N):
            parts = [(part, upstream.part(part)) for part in plan.logit_slices(rows)]
            of_rows = upstream.ids_NK[rows]
            sums.begin(rows, None if options.gathered else (of_rows == logprob.ignore_index).all(1))
            for columns in plan.column_slices(V):
                c = columns.stop - columns.start
                grad_nc = gradients.view(rows.stop - rows.start, c)
                for part, of_part in parts:
                    if logits is None:
                        block = Block(kept_NV[part, columns], columns.start, V)  # type: ignore[index]
                    else:
                        block = tensors.logits(part, columns, logits.view(part.stop - part.start, c))
                    gradient_into(block, of_part, logprob, grad_nc[part.start - rows.start : part.stop - rows.start])
                sums.add(grad_nc, columns)
            sums.end()
    return sums.gradients


class GradientSums:
    """The gradients of a head, summed over blocks.

    For each slice of the tokens, call `begin`, then `add` with the gradient of each block of columns, then `end`.
    """

    def __init__(self, tensors: HeadTensors, wanted: BackwardOptions, plan: BlockPlan) -> None:
        self._tensors, self._wanted = tensors, wanted
        self._several = plan.columns < tensors.weight_VH.shape[0]
        self.gradients = empty_gradients(tensors, wanted, plan)
        if not tensors.hidden_NH.shape[0]:
            self.gradients.dw_VH.zero_()
            self.gradients.db_V.zero_()

    def begin(self, rows: slice, left_out_n: Tensor | None) -> None:
        """Start with the first block of columns of `rows`.

        left_out_n: True for rows without a gradient; None if there are none. Their hidden states may be NaN or
        infinite, which times a gradient of 0 would reach the weight's gradient. So a copy has zeros there. It costs
        0.1 % of the products, and less than a wait for the number of such rows.
        """
        self._rows = rows
        if self._wanted.want_weight:
            x_nH = self._tensors.hidden_NH[rows]
            self._x_nH = x_nH if left_out_n is None else x_nH.masked_fill(left_out_n.unsqueeze(1), 0.0)
        self._dx_nH = self._sum_nH = self.gradients.dx_NH[rows]
        dtype = _sum_dtype(self._tensors.hidden_NH, True)
        if self._wanted.want_hidden and self._several and self._dx_nH.dtype != dtype:
            self._sum_nH = self._dx_nH.new_empty(self._dx_nH.shape, dtype=dtype)

    def add(self, grad_nc: Tensor, columns: slice) -> None:
        """Add the gradient of a block's logits."""
        gradients, later = self.gradients, self._rows.start > 0
        if self._wanted.want_bias:
            db = column_sum(grad_nc)
            gradients.db_V[columns] = gradients.db_V[columns] + db if later else db
        if self._wanted.want_weight:
            product_into(grad_nc.t(), self._x_nH, gradients.dw_VH[columns], accumulate=later)
        if self._wanted.want_hidden:
            product_into(grad_nc, self._tensors.weight_VH[columns], self._sum_nH, accumulate=columns.start > 0)

    def end(self) -> None:
        """Finish the slice of the tokens."""
        if self._sum_nH is not self._dx_nH:
            self._dx_nH.copy_(self._sum_nH)
        del self._sum_nH  # one sum is alive at a time


def _backward_fake(
    tensors: HeadTensors, upstream: Upstream, kept_NV: Tensor | None, logprob: LogprobOptions,
    options: BackwardOptions,
) -> Gradients:  # fmt: skip
    N, kept = tensors.hidden_NH.shape[0], kept_NV is not None
    plan = _backward_plan(tensors, options, kept) if isinstance(N, int) else BlockPlan(N, 1, N)
    gradients = empty_gradients(tensors, options, plan)
    if isinstance(N, int):
        # The planner traces this fake: the buffers, the copy of X and the sum of dX are alive inside the operator.
        alive = [tensors.gradient_buffer(plan).memory]
        if not kept:
            alive.append(tensors.logits_buffer(plan).memory)
        if options.want_weight and not options.gathered:
            alive.append(tensors.hidden_NH.new_empty((min(plan.tokens, N), tensors.hidden_NH.shape[1])))
        if options.want_hidden and plan.columns < tensors.weight_VH.shape[0]:
            shape = (min(plan.tokens, N), tensors.hidden_NH.shape[1])
            alive.append(tensors.hidden_NH.new_empty(shape, dtype=_sum_dtype(tensors.hidden_NH, True)))
        del alive
    return gradients


linear_logprobs_bwd = Primitive("linear_logprobs_bwd", composite=_backward_body, fake=_backward_fake)
