"""The loop of `multi_head_linear_cross_entropy`: heads with the same output weight process each chunk in turn.

No buffer has both all tokens and all heads. A head's residual blocks and their gradients are computed by hand for one
chunk at a time, and shifted labels are looked up per chunk. K heads therefore take the memory of one head, plus their
weights and weight gradients.

The loop runs over weights, then chunks, then heads. Heads that share a weight share one fp32 sum of its gradient. For
heads with separate weights only one such sum is alive at a time: 2 GiB instead of 10 for 5 heads of 128256 x 4096. The
hidden gradient is then summed in fp32 over all rows, which takes 4·N·H bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.dispatch import Primitive, no_autocast
from tigon.ops.head.chunks import ChunkOptions, chunk_loop, even_chunk, needs_fp32_logits, split_bytes
from tigon.ops.head.exponentials import exp_hidden_grad, weight_grad_into
from tigon.ops.head.inputs import Head, Wanted
from tigon.ops.losses.inputs import LossOptions, TokenLabels
from tigon.ops.losses.prepared_targets import labels_ahead
from tigon.ops.products import logits_dtype, logits_into, product_into

# B batch, T positions, N = B·T tokens, C tokens of a chunk, H hidden, V vocabulary, K heads.

TOP = 5
"""Accuracy is counted for ranks 1 to TOP."""


class HeadLayout(NamedTuple):
    """The offset of each head, and the numbers of the tensors that it uses."""

    shifts: Sequence[int]
    hidden_of: Sequence[int]
    weight_of: Sequence[int]
    block_counts: Sequence[int]
    """Number of residual blocks of each head. The list of block tensors alternates weight and bias."""


class WantedGradients(NamedTuple):
    """Which gradients are wanted."""

    want_hiddens: Sequence[bool]
    want_weights: Sequence[bool]
    want_blocks: Sequence[bool]
    """One per tensor of the blocks."""


class Heads:
    """The layout of the heads, and the questions that the loop asks about it."""

    def __init__(self, layout: HeadLayout, wanted: WantedGradients) -> None:
        self.shifts, self.hidden_of, self.weight_of, self.block_counts = layout
        self.want_hiddens, self.want_weights, self.want_blocks = wanted

    def groups(self) -> list[list[int]]:
        """The heads grouped by the weight that they use, in order."""
        numbers = sorted(set(self.weight_of), key=list(self.weight_of).index)
        return [[k for k, w in enumerate(self.weight_of) if w == number] for number in numbers]

    def blocks(self, head: int) -> range:
        """Indices of this head's weights in the list of block tensors; each bias follows its weight."""
        start = 2 * sum(self.block_counts[:head])
        return range(start, start + 2 * self.block_counts[head], 2)

    def wants(self, head: int) -> tuple[bool, bool]:
        """(whether the gradient of the output weight's input is wanted, whether that of the weight is)"""
        blocks = any(self.want_blocks[i] or self.want_blocks[i + 1] for i in self.blocks(head))
        return blocks or self.want_hiddens[self.hidden_of[head]], self.want_weights[self.weight_of[head]]

    def crosses_groups(self, hidden: int) -> bool:
        """Whether heads with different weights use this hidden state, so that its gradient is a sum over groups."""
        return len({w for h, w in zip(self.hidden_of, self.weight_of, strict=True) if h == hidden}) > 1


def residual_blocks(x_CH: Tensor, blocks: Sequence[Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Apply x ← x + SiLU(x Wᵀ + b) for each block; returns (the last x, [(block input, SiLU input), ...])."""
    kept = []
    for weight_HH, bias_H in zip(blocks[::2], blocks[1::2], strict=True):
        a_CH = F.linear(x_CH, weight_HH, bias_H)
        kept.append((x_CH, a_CH))
        x_CH = x_CH + F.silu(a_CH)
    return x_CH, kept


@dataclass(frozen=True, kw_only=True)
class LoopCall:
    """The arguments of the loop besides the hidden states, weights and blocks."""

    target: Tensor
    """(B, T)"""
    positions: Tensor | None
    rows: Tensor | None
    """Flat positions of the tokens that any head is scored on; None for all."""
    stored: Tensor
    """(K,); each head's gradients are for an upstream gradient of 1 / stored."""
    layout: HeadLayout
    wanted: WantedGradients
    options: LossOptions
    chunk_bytes: Sequence[int]
    """(least, most)"""
    top: bool
    """Count the targets among the largest logits."""

    def heads(self) -> Heads:
        return Heads(self.layout, self.wanted)

    def tokens(self) -> int:
        """The number of tokens that the loop processes."""
        return self.target.numel() if self.rows is None else self.rows.shape[0]


class LoopResults(NamedTuple):
    """Sums of the heads' losses (K,), hits (K, TOP), and the gradients of hiddens, weights and blocks."""

    losses: Tensor
    hits: Tensor
    dx: list[Tensor]
    dw: list[Tensor]
    db: list[Tensor]


class _Loop:
    """One pass over the tokens; see the module docstring. Results are in losses, hits, dx, dw and db."""

    def __init__(
        self, hiddens: Sequence[Tensor], weights: Sequence[Tensor], blocks: Sequence[Tensor], call: LoopCall
    ) -> None:
        self.hiddens, self.weights, self.blocks = hiddens, weights, blocks
        self.target_BT, self.positions_BT, self.rows = call.target, call.positions, call.rows
        self.stored_K, self.options, self.top = call.stored, call.options, call.top
        self.heads, self.chunk_bytes = call.heads(), call.chunk_bytes
        self.tokens = call.tokens()
        self.losses, self.hits, self.dx, self.dw, self.db = empty_outputs(hiddens, weights, blocks, call)

    def run(self) -> None:
        self.losses.zero_()
        self.hits.zero_()
        for group in self.heads.groups():
            self._group(group)

    def _group(self, group: list[int]) -> None:
        number = self.heads.weight_of[group[0]]
        weight_VH, want = self.weights[number], self.heads.want_weights[number]
        chunk, logit_tokens = chunk_of(self.tokens, weight_VH, want, self.chunk_bytes, self.options)
        acc = torch.promote_types(weight_VH.dtype, torch.float32)
        # A single product needs no fp32 sum, except in fp16, because the loss scale is not applied yet.
        alone = len(group) == 1 and self.tokens <= chunk and weight_VH.dtype != torch.float16
        dw_VH = rows_like(weight_VH, weight_VH.dtype if alone else acc) if want else None
        first = True
        for rows_C, at in self._chunks(chunk):
            parts: dict[int, Tensor] = {}
            for k in group:
                dx_CH = self._head(k, rows_C, at, weight_VH, dw_VH, first, logit_tokens)
                first = False
                hidden = self.heads.hidden_of[k]
                if dx_CH is not None and self.heads.want_hiddens[hidden]:
                    known = parts.get(hidden)
                    parts[hidden] = dx_CH if known is None else known.to(acc).add_(dx_CH)
            for hidden, part_CH in parts.items():
                self._put(hidden, at, part_CH)
        if dw_VH is not None:
            dw_VH = dw_VH.zero_() if first else dw_VH
            self.dw[number] = dw_VH.to(self.dw[number].dtype)

    def _chunks(self, chunk: int) -> Iterator[tuple[Tensor, Tensor | slice]]:
        """Yield the flat positions of each chunk's tokens, and an index for them: a slice if all tokens are used."""
        for start in range(0, self.tokens, chunk):
            stop = min(start + chunk, self.tokens)
            if self.rows is None:
                yield torch.arange(start, stop, device=self.target_BT.device), slice(start, stop)
            else:
                yield self.rows[start:stop], self.rows[start:stop]

    def _put(self, hidden: int, at: Tensor | slice, part_CH: Tensor) -> None:
        out_NH, is_sum = self.dx[hidden], self.heads.crosses_groups(hidden)
        if isinstance(at, slice):
            out_CH = out_NH[at]
            out_CH.add_(part_CH) if is_sum else out_CH.copy_(part_CH)
        elif is_sum:
            out_NH.index_add_(0, at, part_CH.to(out_NH.dtype))
        else:
            out_NH.index_copy_(0, at, part_CH.to(out_NH.dtype))

    def _head(
        self,
        k: int,
        rows_C: Tensor,
        at: Tensor | slice,
        weight_VH: Tensor,
        dw_VH: Tensor | None,
        first: bool,
        logit_tokens: int,
    ) -> Tensor | None:
        """Process one chunk for head k: add to its loss, its hits, dW and the gradients of its blocks.

        Returns its part of the hidden gradient, or None if nothing before the output weight needs a gradient.
        """
        numbers = self.heads.blocks(k)
        blocks = [self.blocks[i] for n in numbers for i in (n, n + 1)]
        x_CH, kept = residual_blocks(self.hiddens[self.heads.hidden_of[k]][at], blocks)
        shift, ignore_index = self.heads.shifts[k], self.options.ignore_index
        target = labels_ahead(self.target_BT, self.positions_BT, rows_C, shift, ignore_index)
        if self.top:
            self.hits[k] += hits(x_CH, weight_VH, target, self.options)
        want_x, want_w = self.heads.wants(k)
        keep, C = want_x or want_w, int(x_CH.shape[0])
        results = chunk_loop(
            Head(x_CH, weight_VH),
            TokenLabels(target, None, None, self.stored_K[k]),
            ChunkOptions(
                loss=self.options, chunk=C, logit_tokens=logit_tokens, keep=keep, wanted=Wanted(want_x, want_w)
            ),
        )
        g_CV, factors = results.kept_NV, results.factors
        self.losses[k] += results.loss.sum()
        if not keep:
            return None
        if dw_VH is not None:
            if factors.numel():
                weight_grad_into(g_CV, x_CH, factors, target, dw_VH, accumulate=not first)
            else:
                product_into(g_CV.t(), x_CH, dw_VH, accumulate=not first)
        if not want_x:
            return None
        if factors.numel():
            dx_CH = exp_hidden_grad(g_CV, weight_VH, factors, target, None, C)
        else:
            # An fp16 gradient stays in fp32 until the loss scale is applied.
            dtype = self.losses.dtype if x_CH.dtype == torch.float16 else x_CH.dtype
            dx_CH = torch.empty_like(x_CH, dtype=dtype)
            product_into(g_CV, weight_VH, dx_CH, accumulate=False)
        del g_CV, results
        return self._through_blocks(dx_CH, kept, numbers, self.heads.want_hiddens[self.heads.hidden_of[k]])

    def _through_blocks(
        self, dx_CH: Tensor, kept: list[tuple[Tensor, Tensor]], numbers: range, want_hidden: bool
    ) -> Tensor:
        """Backward through a head's blocks: dx of their output -> dx of their input; adds to the block gradients."""
        for position in reversed(range(len(numbers))):
            n, (x_CH, a_CH) = numbers[position], kept[position]
            da_CH = torch.ops.aten.silu_backward(dx_CH.to(a_CH.dtype), a_CH)
            if self.heads.want_blocks[n]:
                product_into(da_CH.t(), x_CH, self.db[n], accumulate=True)
            if self.heads.want_blocks[n + 1]:
                self.db[n + 1] += da_CH.sum(0, dtype=self.db[n + 1].dtype)
            if position or want_hidden:
                dx_CH = dx_CH + da_CH @ self.blocks[n]
        return dx_CH


def hits(x_CH: Tensor, weight_VH: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """(TOP,) int64: the number of tokens whose target is among the 1, 2, ... TOP largest logits; a tie counts.

    The logits are computed again, an eighth of the chunk at a time, because after the loss their buffer holds their
    gradient, or exponentials too coarse to rank. This adds a third to the work, so it is not done at every step.
    """
    counts = torch.zeros(TOP, dtype=torch.int64, device=x_CH.device)
    for x, y in zip(x_CH.chunk(8), target.chunk(8), strict=True):
        logits = x.new_empty((len(x), weight_VH.shape[0]), dtype=logits_dtype(x.dtype))
        logits_into(x, weight_VH, None, logits)
        if options.logit_scale < 0:
            logits = -logits
        # The loss reports labels out of range. A gather with such an index would crash a GPU.
        valid = (y != options.ignore_index) & (y >= 0) & (y < logits.shape[1])
        own = logits.gather(1, torch.where(valid, y, 0).long().unsqueeze(1))
        above = (~(logits <= own)).sum(1)  # NaN counts as larger
        counts += torch.stack([((above < k) & valid).sum() for k in range(1, TOP + 1)])
    return counts


def chunk_of(
    tokens: int, weight_VH: Tensor, want_weight: bool, chunk_bytes: Sequence[int], options: LossOptions
) -> tuple[int, int]:
    """(tokens per chunk, tokens whose fp32 logits exist at once or 0).

    `chunk_bytes` (least, most) hold the logits and their gradient; more bytes are taken if the sum of dW is larger.
    """
    (V, H), (least, most) = weight_VH.shape, chunk_bytes
    bytes_alive = min(max(least, 4 * V * H if want_weight else 0), most)
    fp32_logits = needs_fp32_logits(weight_VH, weight_VH, options, other_outputs=False)
    fitting, logit_tokens = split_bytes(bytes_alive, V, weight_VH.element_size(), fp32_logits)
    chunk = even_chunk(tokens, fitting) if isinstance(tokens, int) else max(fitting, 1)
    return chunk, min(logit_tokens, chunk)


def rows_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor of x's shape, because the kernel that scales gradients works row by row."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def empty_outputs(
    hiddens: Sequence[Tensor], weights: Sequence[Tensor], blocks: Sequence[Tensor], call: LoopCall
) -> LoopResults:
    """Outputs of the loop; those that are not wanted are empty.

    Outputs that the loop writes completely are uninitialised. The loop allocates each dW; here dW only has its dtype.
    """
    heads = call.heads()
    acc = torch.promote_types(hiddens[0].dtype, torch.float32)
    half = hiddens[0].dtype == torch.float16
    count = len(heads.shifts)
    dx = []
    for number, (hidden, wanted) in enumerate(zip(hiddens, heads.want_hiddens, strict=True)):
        dtype = acc if half or heads.crosses_groups(number) else hidden.dtype
        made = rows_like(hidden, dtype) if wanted else hidden.new_empty(0)
        dx.append(made.zero_() if call.rows is not None or heads.crosses_groups(number) else made)
    dw = [weight.new_empty(0, dtype=acc if half else weight.dtype) for weight in weights]
    db = [
        rows_like(tensor, acc).zero_() if wanted else tensor.new_empty(0)
        for tensor, wanted in zip(blocks, heads.want_blocks, strict=True)
    ]
    return LoopResults(
        losses=hiddens[0].new_empty(count, dtype=acc),
        hits=call.target.new_empty((count, TOP) if call.top else (0, TOP), dtype=torch.int64),
        dx=dx,
        dw=dw,
        db=db,
    )


def _body(
    hiddens: Sequence[Tensor], weights: Sequence[Tensor], blocks: Sequence[Tensor], call: LoopCall
) -> LoopResults:
    with torch.no_grad(), no_autocast(hiddens[0]):
        loop = _Loop(hiddens, weights, blocks, call)
        loop.run()
    return LoopResults(loop.losses, loop.hits, loop.dx, loop.dw, loop.db)


def _fake(
    hiddens: Sequence[Tensor], weights: Sequence[Tensor], blocks: Sequence[Tensor], call: LoopCall
) -> LoopResults:
    heads, tokens = call.heads(), call.tokens()
    results = empty_outputs(hiddens, weights, blocks, call)
    # The planner traces this fake: besides the outputs, the loop holds a chunk's logits and blocks and one sum of dW.
    for group in heads.groups():
        number = heads.weight_of[group[0]]
        weight_VH, want = weights[number], heads.want_weights[number]
        (V, H), acc = weight_VH.shape, torch.promote_types(weight_VH.dtype, torch.float32)
        known = isinstance(tokens, int)
        chunk, logit_tokens = chunk_of(tokens, weight_VH, want, call.chunk_bytes, call.options)
        alone = known and len(group) == 1 and tokens <= chunk and weight_VH.dtype != torch.float16
        total = rows_like(weight_VH, weight_VH.dtype if alone else acc) if want else None
        deepest = max(heads.block_counts[k] for k in group)
        alive = [weight_VH.new_empty((chunk, H)) for _ in range(2 + 2 * deepest)] + [weight_VH.new_empty((chunk, V))]
        alive.append(weight_VH.new_empty((logit_tokens, V), dtype=acc))
        del alive
        if total is not None:
            results.dw[number] = total.to(results.dw[number].dtype)
        del total
    return results


multi_head_loop = Primitive("multi_head_linear_cross_entropy_chunks", composite=_body, fake=_fake)
