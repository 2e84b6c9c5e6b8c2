"""The loop of `multi_head_linear_cross_entropy`: heads that share an output weight take turns with a chunk of tokens.

Nothing here is as long as the rows and there once a head: a head's residual blocks are computed for a chunk, their
gradient is made by hand while the chunk is there, and labels are looked up where they are. So K heads take the memory
of one, but for their weights and the gradients of those.

Order: weights, then chunks, then heads. Heads that share their weight share one fp32 sum of its gradient. Heads with
weights of their own come one after the other, so that one such sum is alive at a time: for 5 heads of 128256 x 4096
that is 2 GiB instead of 10. The hidden gradient is then summed in fp32 over all rows, which is 4 N H.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops._dispatch import Primitive
from tigon.ops.losses.chunk_loop import _exp_weight_grad_into, chunk_loop, exp_hidden_grad, no_autocast, product_into
from tigon.ops.losses.common import LossOptions, labels_ahead
from tigon.ops.losses.linear_cross_entropy import _even_chunk

# B batch, T positions, N = B·T tokens, C tokens of a chunk, H hidden, V vocabulary, K heads.

TOP = 5
"""Ranks that a head's accuracy is counted up to."""


class Heads(NamedTuple):
    """Which tensors each head uses, by number, and what is wanted of them."""

    shifts: Sequence[int]
    hidden_of: Sequence[int]
    weight_of: Sequence[int]
    block_counts: Sequence[int]
    """Residual blocks of each head; the blocks' tensors lie one after the other, a weight and then its bias."""
    want_hiddens: Sequence[bool]
    want_weights: Sequence[bool]
    want_blocks: Sequence[bool]
    """One for each tensor of the blocks."""

    def groups(self) -> list[list[int]]:
        """Heads by the weight they use, in order."""
        numbers = sorted(set(self.weight_of), key=list(self.weight_of).index)
        return [[k for k, w in enumerate(self.weight_of) if w == number] for number in numbers]

    def blocks(self, head: int) -> range:
        """Where the weights of this head's blocks lie among the blocks' tensors; the biases follow them."""
        start = 2 * sum(self.block_counts[:head])
        return range(start, start + 2 * self.block_counts[head], 2)

    def wants(self, head: int) -> tuple[bool, bool]:
        """(the gradient of what enters the output weight, that of the weight)"""
        blocks = any(self.want_blocks[i] or self.want_blocks[i + 1] for i in self.blocks(head))
        return blocks or self.want_hiddens[self.hidden_of[head]], self.want_weights[self.weight_of[head]]

    def crosses_groups(self, hidden: int) -> bool:
        """Whether heads with different weights use this hidden state, so that its gradient is a sum over groups."""
        return len({w for h, w in zip(self.hidden_of, self.weight_of, strict=True) if h == hidden}) > 1


def residual_blocks(x_CH: Tensor, blocks: Sequence[Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """x ← x + SiLU(x Wᵀ + b), block after block: (the last x, each block's input and what went into its SiLU)."""
    kept = []
    for weight_HH, bias_H in zip(blocks[::2], blocks[1::2], strict=True):
        a_CH = F.linear(x_CH, weight_HH, bias_H)
        kept.append((x_CH, a_CH))
        x_CH = x_CH + F.silu(a_CH)
    return x_CH, kept


class _Loop:
    """One pass over the tokens; see the module docstring. `outputs` holds what it found."""

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
        # A single product needs no sum in fp32, but for fp16, whose loss scale is not on yet.
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
        """Flat positions of the tokens of each chunk; and as what indexes them, a slice where all tokens are taken."""
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
        """Head k on one chunk: its loss and hits are added up, dW and the blocks' gradients too. Its part of the hidden
        gradient, or None if nothing before the output weight wants one."""
        numbers = self.heads.blocks(k)
        blocks = [self.blocks[i] for n in numbers for i in (n, n + 1)]
        x_CH, kept = residual_blocks(self.hiddens[self.heads.hidden_of[k]][at], blocks)
        shift, ignore_index = self.heads.shifts[k], self.options.ignore_index
        target = labels_ahead(self.target_BT, self.positions_BT, rows_C, shift, ignore_index)
        if self.top:
            self.hits[k] += hits(x_CH, weight_VH, target, self.options)
        want_x, want_w = self.heads.wants(k)
        keep, C = want_x or want_w, int(x_CH.shape[0])
        loss_C, _, _, _, _, _, _, g_CV, factors = chunk_loop(
            x_CH, weight_VH, None, target, None, None, self.stored_K[k], *self.options, C, keep, True,
            want_x and keep, want_w and keep, False, False, False,
        )  # fmt: skip
        self.losses[k] += loss_C.sum()
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
            # fp16 stays in fp32 until the loss scale is on.
            dtype = self.losses.dtype if x_CH.dtype == torch.float16 else x_CH.dtype
            dx_CH = torch.empty_like(x_CH, dtype=dtype)
            product_into(g_CV, weight_VH, dx_CH, accumulate=False)
        del g_CV
        return self._through_blocks(dx_CH, kept, numbers, self.heads.want_hiddens[self.heads.hidden_of[k]])

    def _through_blocks(
        self, dx_CH: Tensor, kept: list[tuple[Tensor, Tensor]], numbers: range, want_hidden: bool
    ) -> Tensor:
        """dx of a head's blocks' output -> of their input; their weights' gradients are added up on the way."""
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
    """(TOP,) int64: of how many tokens the target is among the 1, 2, ... TOP largest logits; a tie counts as one.

    The logits are made once more for it, a quarter of the chunk at a time: when the loss is done their place holds
    their gradient, or exponentials too coarse to rank. It is a third more work, so it is not asked for at every step.
    """
    found = torch.zeros(TOP, dtype=torch.int64, device=x_CH.device)
    for x, y in zip(x_CH.chunk(4), target.chunk(4), strict=True):
        logits = x @ weight_VH.t()
        if options.logit_scale < 0:
            logits = -logits
        # A label out of range is the loss's to report; a GPU's gather would stop the device.
        valid = (y != options.ignore_index) & (y >= 0) & (y < logits.shape[1])
        own = logits.gather(1, torch.where(valid, y, 0).long().unsqueeze(1))
        above = (~(logits <= own)).sum(1)  # NaN is above all
        found += torch.stack([((above < k) & valid).sum() for k in range(1, TOP + 1)])
    return found


def chunk_of(tokens: int, weight_VH: Tensor, want_weight: bool, chunk_bytes: tuple[int, int]) -> int:
    """Tokens of a chunk: as many as `chunk_bytes` (least, most) of logits hold, more where the sum of dW is larger."""
    (V, H), (least, most) = weight_VH.shape, chunk_bytes
    fitting = min(max(least, 4 * V * H if want_weight else 0), most) // (V * weight_VH.element_size())
    return _even_chunk(tokens, fitting)


def rows_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Unwritten, of x's shape, row after row whatever its strides: the kernel that scales gradients walks rows."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def empty_outputs(
    target_BT: Tensor, some_rows: bool, hiddens: Sequence[Tensor], weights: Sequence[Tensor],
    blocks: Sequence[Tensor], heads: Heads, top: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """(losses, hits, dX, dW, gradients of the blocks), unwritten where the loop writes all of it; what is not wanted is
    empty. dW is made by the loop, weight by weight: here stands its dtype."""
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
    """(sums of the heads' losses (K,), hits (K, TOP), dX, dW, gradients of the blocks), for an upstream gradient of
    1 / stored_K."""
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
    losses, found, dx, dw, db = empty_outputs(target_BT, rows is not None, hiddens, weights, blocks, heads, top)
    # The planner traces this: besides the outputs, a chunk's logits and blocks and one sum of dW live in the loop.
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
    return losses, found, dx, dw, db


multi_head_loop = Primitive(
    "multi_head_linear_cross_entropy_chunks",
    "(Tensor target, Tensor? positions, Tensor? rows, Tensor stored, Tensor[] hiddens, Tensor[] weights,"
    " Tensor[] blocks, int[] shifts, int[] hidden_of, int[] weight_of, int[] block_counts, bool[] want_hiddens,"
    " bool[] want_weights, bool[] want_blocks, int ignore_index, float label_smoothing, float? softcap,"
    " float logit_scale, float z_loss, int[] chunk_bytes, bool top)"
    " -> (Tensor, Tensor, Tensor[], Tensor[], Tensor[])",
    reference=_body,
    kernel=None,
    fake=_fake,
)
