"""The loop over blocks of logits that all ops of a head share, and the chunks of linear cross entropy.

A block is some tokens by some columns of the vocabulary. Its logits are matrix products into a reused buffer, in fp32
also for 16-bit factors. The op turns them into results and into their gradient, which has the factors' dtype. Two
products of the whole block reduce the gradient:

    dX += G W_block       summed over the blocks of columns
    dW_block += Gᵀ X      summed over the blocks of tokens

fp32 logits that are wider than their gradient exist for a part of the block's tokens at a time. Otherwise the gradient
takes the logits' place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tigon.kernels.chips import LogitsTile
from tigon.ops.dispatch import Primitive
from tigon.ops.head import exponentials
from tigon.ops.head.inputs import NOTHING, Head, LogitBuffer, Wanted
from tigon.ops.head.plan import BlockPlan
from tigon.ops.losses.cross_entropy_rows import Rows, TokenLabels, rows_with_gradient
from tigon.ops.losses.options import LossOptions
from tigon.ops.products import column_sum, no_autocast, product_into
from tigon.ops.signature import SYMBOLIC

# N tokens, C tokens of a chunk, H hidden, V vocabulary, R rank of an adapter; a block has n tokens and c columns.


class Gradients(NamedTuple):
    """The gradients of a head, in the order of `Head`; what is not wanted is empty. In fp16 they are fp32."""

    dx_NH: Tensor
    dw_VH: Tensor
    db_V: Tensor
    dlow_NR: Tensor
    dlora_b_VR: Tensor

    @classmethod
    def empty(cls, head: Head, wanted: Wanted, dx_dtype: torch.dtype, dw_dtype: torch.dtype) -> Gradients:
        """Uninitialised gradients."""
        x, acc = head.hidden_NH, head.sum_dtype
        (N, H), V, R = x.shape, head.vocab, 0 if head.low_NR is None else head.low_NR.shape[1]
        return cls(
            dx_NH=x.new_empty((N if wanted.want_hidden else 0, H), dtype=dx_dtype),
            dw_VH=x.new_empty((V if wanted.want_weight else 0, H), dtype=dw_dtype),
            db_V=x.new_empty(V if wanted.want_bias else 0, dtype=acc),
            dlow_NR=x.new_empty((N if wanted.want_low else 0, R), dtype=dx_dtype),
            dlora_b_VR=x.new_empty((V if wanted.want_lora_b else 0, R), dtype=acc),
        )

    def zero_sums(self) -> None:
        """Set the sums over tokens to those of no token."""
        for total in (self.dw_VH, self.db_V, self.dlora_b_VR):
            total.zero_()


def sum_dtype(x: Tensor, several: bool) -> torch.dtype:
    """fp32 if several products are summed, and for fp16, whose gradients still lack a factor."""
    return torch.promote_types(x.dtype, torch.float32) if several or x.dtype == torch.float16 else x.dtype


class GradientSums:
    """The gradients of a head, summed over blocks.

    For each slice of the tokens, call `begin`, then `add` with the gradient of each block of columns, then `end`.
    block: memory for the gradient of n x c logits; None if the head has none.
    """

    def __init__(
        self, head: Head, wanted: Wanted, made: Gradients, plan: BlockPlan, block: Callable[[int, int], Tensor] | None
    ) -> None:
        self._head, self._wanted, self.gradients, self._block = head, wanted, made, block
        self._several = plan.columns < head.vocab
        if not head.tokens:
            made.zero_sums()

    def block(self, n: int, c: int) -> Tensor | None:
        return None if self._block is None else self._block(n, c)

    def begin(self, rows: slice, left_out_n: Tensor | None) -> None:
        """Start with the first block of columns of `rows`.

        left_out_n: True for rows without a gradient; None if there are none. Their hidden states may be NaN or
        infinite, which times a gradient of 0 would reach the weight's gradient. So a copy has zeros there. It costs
        0.1 % of the products, and less than a wait for the number of such rows.
        """
        self._rows = rows
        if self._wanted.want_weight:
            x_nH = self._head.hidden_NH[rows]
            self._x_nH = x_nH if left_out_n is None else x_nH.masked_fill(left_out_n.unsqueeze(1), 0.0)
        self._dx_nH = self._sum_nH = self.gradients.dx_NH[rows]
        dtype = sum_dtype(self._head.hidden_NH, True)
        if self._wanted.want_hidden and self._several and self._dx_nH.dtype != dtype:
            self._sum_nH = self._dx_nH.new_empty(self._dx_nH.shape, dtype=dtype)

    def add(self, grad_nc: Tensor, columns: slice) -> None:
        """Add the gradient of a block's logits."""
        head, wanted, made = self._head, self._wanted, self.gradients
        later = self._rows.start > 0
        if not grad_nc.shape[1]:  # a process may hold no row of the weight
            self._sum_nH.zero_()
            return
        if wanted.want_bias:
            db = column_sum(grad_nc)
            made.db_V[columns] = made.db_V[columns] + db if later else db
        if wanted.want_weight:
            product_into(grad_nc.t(), self._x_nH, made.dw_VH[columns], accumulate=later)
        if wanted.want_hidden:
            product_into(grad_nc, head.weight_VH[columns], self._sum_nH, accumulate=columns.start > 0)
        if head.low_NR is not None and head.lora_b_VR is not None:
            if wanted.want_low:
                product_into(grad_nc, head.lora_b_VR, made.dlow_NR[self._rows], accumulate=False)
            if wanted.want_lora_b:
                product_into(grad_nc.t(), head.low_NR[self._rows], made.dlora_b_VR, accumulate=later)

    def end(self) -> None:
        """Finish the slice of the tokens."""
        if self._sum_nH is not self._dx_nH:
            self._dx_nH.copy_(self._sum_nH)
        del self._sum_nH  # one sum is alive at a time


class Work(Protocol):
    """What an op does with each block."""

    def part(self, rows: slice) -> Any:
        """The op's tensors of some tokens."""

    def left_out(self, rows: slice) -> Tensor | None:
        """True for tokens without a gradient; None if there are none."""

    def write(self, part: Any, rows: slice, columns: slice, grads: Sequence[Tensor | None]) -> None:
        """Compute the results of `part`, and write the gradient of each head's logits."""


def run_blocks(plan: BlockPlan, heads: Sequence[GradientSums], size: tuple[int, int], work: Work) -> None:
    """Run the op on each block, and add up the gradients of its heads. size: (N, V)"""
    for rows in plan.token_slices(size[0]):
        parts = [(at, work.part(at)) for at in plan.logit_slices(rows)]
        left_out_n = work.left_out(rows)
        for sums in heads:
            sums.begin(rows, left_out_n)
        for columns in plan.column_slices(size[1]):
            grads = [sums.block(rows.stop - rows.start, columns.stop - columns.start) for sums in heads]
            for at, part in parts:
                inside = slice(at.start - rows.start, at.stop - rows.start)
                work.write(part, at, columns, [None if grad is None else grad[inside] for grad in grads])
            for sums, grad in zip(heads, grads, strict=True):
                if grad is not None:
                    sums.add(grad, columns)
        for sums in heads:
            sums.end()


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
    return exponentials.exp_tile(head.hidden_NH, head.weight_VH, options.loss, other_outputs)


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

    def part(self, rows: slice) -> tuple[Head, TokenLabels]:
        return self.head.part(rows), self.labels.part(rows)

    def left_out(self, rows: slice) -> None:
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

    def write(
        self, part: tuple[Head, TokenLabels], rows: slice, columns: slice, grads: Sequence[Tensor | None]
    ) -> None:  # fmt: skip
        (head, labels), options, grad = part, self.options, grads[0]
        logits = grad if self.logits is None else self.logits.view(head.tokens, head.vocab)
        assert logits is not None
        head.logits_into(logits)
        loss, stats, entropy, predicted = rows_with_gradient(
            Rows(logits, labels.target, labels.class_weight, labels.token_weight, options.loss), options.entropy,
            options.predicted, labels.grad_scale, grad if any(options.wanted) else None,
        )  # fmt: skip
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
        for rows in BlockPlan(options.chunk, V, 1).token_slices(N):
            e_CV = None if block is None else block(rows.stop - rows.start, V)
            self._exp_chunk(rows, tile, e_CV)

    def _exp_chunk(self, rows: slice, tile: LogitsTile, e_CV: Tensor | None) -> None:
        (head, labels), options = self.part(rows), self.options
        loss, stats, factors = exponentials.exp_logits(head, labels, options.loss, tile, e_CV)
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
    few = head.tokens < exponentials.FEWEST_EXP_ROWS
    if tile is not None and (few or not exponentials.starts_aligned(head.weight_VH)):
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
