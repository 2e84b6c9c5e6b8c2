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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.dispatch import Primitive
from tigon.ops.losses.chunk_loop import (
    ChunkOptions,
    ChunkTensors,
    _exp_weight_grad_into,
    chunk_loop,
    exp_hidden_grad,
    no_autocast,
    product_into,
)
from tigon.ops.losses.chunk_plan import even_chunk
from tigon.ops.losses.common import LossOptions, labels_ahead

# B batch, T positions, N = B·T tokens, C tokens of a chunk, H hidden, V vocabulary, K heads.

TOP = 5
"""Accuracy is counted for ranks 1 to TOP."""


class Heads(NamedTuple):
    """The numbers of the tensors that each head uses, and which gradients are wanted."""

    shifts: Sequence[int]
    hidden_of: Sequence[int]
    weight_of: Sequence[int]
    block_counts: Sequence[int]
    """Number of residual blocks of each head. The list of block tensors alternates weight and bias."""
    want_hiddens: Sequence[bool]
    want_weights: Sequence[bool]
    want_blocks: Sequence[bool]
    """One per tensor of the blocks."""

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


class _Loop:
    """One pass over the tokens; see the module docstring. Results are in losses, hits, dx, dw and db."""

    def __init__(
        self, target_BT: Tensor, positions_BT: Tensor | None, rows: Tensor | None, stored_K: Tensor,
        hiddens: Sequence[Tensor], weights: Sequence[Tensor], blocks: Sequence[Tensor], heads: Heads,
        options: LossOptions, chunk_bytes: tuple[int, int], top: bool,
    ) -> None:  # fmt: skip
        self.target_BT, self.positions_BT, self.rows, self.stored_K = target_BT, positions_BT, rows, stored_K
        self.hiddens, self.weights, self.blocks, self.heads = hiddens, weights, blocks, heads
        self.options, self.chunk_bytes, self.top = options, chunk_bytes, top
        self.tokens = int(target_BT.numel() if rows is None else rows.shape[0])
        self.losses, self.hits, self.dx, self.dw, self.db = empty_outputs(
            target_BT, rows is not None, hiddens, weights, blocks, heads, top
        )

    def run(self) -> None:
        self.losses.zero_()
        self.hits.zero_()
        for group in self.heads.groups():
            self._group(group)

    def _group(self, group: list[int]) -> None:
        number = self.heads.weight_of[group[0]]
        weight_VH, want = self.weights[number], self.heads.want_weights[number]
        chunk = chunk_of(self.tokens, weight_VH, want, self.chunk_bytes)
        acc = torch.promote_types(weight_VH.dtype, torch.float32)
        # A single product needs no fp32 sum, except in fp16, because the loss scale is not applied yet.
        alone = len(group) == 1 and self.tokens <= chunk and weight_VH.dtype != torch.float16
        dw_VH = rows_like(weight_VH, weight_VH.dtype if alone else acc) if want else None
        first = True
        for rows_C, at in self._chunks(chunk):
            parts: dict[int, Tensor] = {}
            for k in group:
                dx_CH = self._head(k, rows_C, at, weight_VH, dw_VH, first)
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
        self, k: int, rows_C: Tensor, at: Tensor | slice, weight_VH: Tensor, dw_VH: Tensor | None, first: bool
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
            ChunkTensors(hidden_NH=x_CH, weight_VH=weight_VH, target=target, grad_scale=self.stored_K[k]),
            ChunkOptions(loss=self.options, chunk=C, keep=keep, want_hidden=want_x, want_weight=want_w),
        )
        g_CV, factors = results.kept_NV, results.factors
        self.losses[k] += results.loss.sum()
        if not keep:
            return None
        if dw_VH is not None:
            if factors.numel():
                _exp_weight_grad_into(g_CV, x_CH, factors, target, dw_VH, accumulate=not first)
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

    The logits are computed again, a quarter of the chunk at a time, because after the loss their buffer holds their
    gradient, or exponentials too coarse to rank. This adds a third to the work, so it is not done at every step.
    """
    counts = torch.zeros(TOP, dtype=torch.int64, device=x_CH.device)
    for x, y in zip(x_CH.chunk(4), target.chunk(4), strict=True):
        logits = x @ weight_VH.t()
        if options.logit_scale < 0:
            logits = -logits
        # The loss reports labels out of range. A gather with such an index would crash a GPU.
        valid = (y != options.ignore_index) & (y >= 0) & (y < logits.shape[1])
        own = logits.gather(1, torch.where(valid, y, 0).long().unsqueeze(1))
        above = (~(logits <= own)).sum(1)  # NaN counts as larger
        counts += torch.stack([((above < k) & valid).sum() for k in range(1, TOP + 1)])
    return counts


def chunk_of(tokens: int, weight_VH: Tensor, want_weight: bool, chunk_bytes: tuple[int, int]) -> int:
    """Tokens per chunk: as many as `chunk_bytes` (least, most) of logits hold, more if the sum of dW is larger."""
    (V, H), (least, most) = weight_VH.shape, chunk_bytes
    fitting = min(max(least, 4 * V * H if want_weight else 0), most) // (V * weight_VH.element_size())
    return even_chunk(tokens, fitting)


def rows_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor of x's shape, because the kernel that scales gradients works row by row."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def empty_outputs(
    target_BT: Tensor, some_rows: bool, hiddens: Sequence[Tensor], weights: Sequence[Tensor],
    blocks: Sequence[Tensor], heads: Heads, top: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """(losses, hits, dX, dW, gradients of the blocks); outputs that are not wanted are empty.

    Outputs that the loop writes completely are uninitialised. The loop allocates each dW; here dW only has its dtype.
    """
    acc = torch.promote_types(hiddens[0].dtype, torch.float32)
    half = hiddens[0].dtype == torch.float16
    count = len(heads.shifts)
    dx = []
    for number, (hidden, wanted) in enumerate(zip(hiddens, heads.want_hiddens, strict=True)):
        dtype = acc if half or heads.crosses_groups(number) else hidden.dtype
        made = rows_like(hidden, dtype) if wanted else hidden.new_empty(0)
        dx.append(made.zero_() if some_rows or heads.crosses_groups(number) else made)
    dw = [weight.new_empty(0, dtype=acc if half else weight.dtype) for weight in weights]
    db = [
        rows_like(tensor, acc).zero_() if wanted else tensor.new_empty(0)
        for tensor, wanted in zip(blocks, heads.want_blocks, strict=True)
    ]
    return (
        hiddens[0].new_empty(count, dtype=acc),
        target_BT.new_empty((count, TOP) if top else (0, TOP), dtype=torch.int64),
        dx, dw, db,
    )  # fmt: skip


def _body(
    target_BT: Tensor, positions_BT: Tensor | None, rows: Tensor | None, stored_K: Tensor,
    hiddens: Sequence[Tensor], weights: Sequence[Tensor], blocks: Sequence[Tensor],
    shifts: Sequence[int], hidden_of: Sequence[int], weight_of: Sequence[int], block_counts: Sequence[int],
    want_hiddens: Sequence[bool], want_weights: Sequence[bool], want_blocks: Sequence[bool],
    ignore_index: int, label_smoothing: float, softcap: float | None, logit_scale: float, z_loss: float,
    chunk_bytes: Sequence[int], top: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """(sums of the heads' losses (K,), hits (K, TOP), dX, dW, gradients of the blocks).

    Gradients are for an upstream gradient of 1 / stored_K.
    """
    heads = Heads(shifts, hidden_of, weight_of, block_counts, want_hiddens, want_weights, want_blocks)
    options = LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    least, most = chunk_bytes
    with torch.no_grad(), no_autocast(hiddens[0]):
        loop = _Loop(
            target_BT, positions_BT, rows, stored_K, hiddens, weights, blocks, heads, options, (least, most), top
        )
        loop.run()
    return loop.losses, loop.hits, loop.dx, loop.dw, loop.db


def _fake(
    target_BT: Tensor, positions_BT: Tensor | None, rows: Tensor | None, stored_K: Tensor,
    hiddens: Sequence[Tensor], weights: Sequence[Tensor], blocks: Sequence[Tensor],
    shifts: Sequence[int], hidden_of: Sequence[int], weight_of: Sequence[int], block_counts: Sequence[int],
    want_hiddens: Sequence[bool], want_weights: Sequence[bool], want_blocks: Sequence[bool],
    ignore_index: int, label_smoothing: float, softcap: float | None, logit_scale: float, z_loss: float,
    chunk_bytes: Sequence[int], top: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    heads = Heads(shifts, hidden_of, weight_of, block_counts, want_hiddens, want_weights, want_blocks)
    losses, outputs, dx, dw, db = empty_outputs(target_BT, rows is not None, hiddens, weights, blocks, heads, top)
    # The planner traces this fake: besides the outputs, the loop holds a chunk's logits and blocks and one sum of dW.
    tokens = target_BT.numel() if rows is None else rows.shape[0]
    least, most = chunk_bytes
    for group in heads.groups():
        number = weight_of[group[0]]
        weight_VH, want = weights[number], want_weights[number]
        (V, H), acc = weight_VH.shape, torch.promote_types(weight_VH.dtype, torch.float32)
        known = isinstance(tokens, int)
        chunk = chunk_of(tokens, weight_VH, want, (least, most)) if known else least // (V * weight_VH.element_size())
        alone = known and len(group) == 1 and tokens <= chunk and weight_VH.dtype != torch.float16
        total = rows_like(weight_VH, weight_VH.dtype if alone else acc) if want else None
        deepest = max(block_counts[k] for k in group)
        alive = [weight_VH.new_empty((chunk, H)) for _ in range(2 + 2 * deepest)] + [weight_VH.new_empty((chunk, V))]
        del alive
        if total is not None:
            dw[number] = total.to(dw[number].dtype)
        del total
    return losses, outputs, dx, dw, db


multi_head_loop = Primitive(
    "multi_head_linear_cross_entropy_chunks",
    "(Tensor target, Tensor? positions, Tensor? rows, Tensor stored, Tensor[] hiddens, Tensor[] weights,"
    " Tensor[] blocks, int[] shifts, int[] hidden_of, int[] weight_of, int[] block_counts, bool[] want_hiddens,"
    " bool[] want_weights, bool[] want_blocks, int ignore_index, float label_smoothing, float? softcap,"
    " float logit_scale, float z_loss, int[] chunk_bytes, bool top)"
    " -> (Tensor, Tensor, Tensor[], Tensor[], Tensor[])",
    composite=_body,
    fake=_fake,
)
