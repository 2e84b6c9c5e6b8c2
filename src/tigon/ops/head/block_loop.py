"""The loop over blocks of logits that all ops of a head share, and the chunks of linear cross entropy.

A block is some tokens by some columns of the vocabulary. Its logits are matrix products into a reused buffer, in fp32
also for 16-bit factors. The op turns them into results and into their gradient, which has the factors' dtype. Two
products of the whole block reduce the gradient:

    dX += G W_block       summed over the blocks of columns
    dW_block += Gᵀ X      summed over the blocks of tokens

If fp32 logits are wider than their gradient, they are computed for part of the block's tokens at a time. Otherwise the
gradient overwrites the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tigon.ops.head.inputs import Gradients, Head, Wanted, sum_dtype
from tigon.ops.products import column_sum, product_into

# N tokens, C tokens of a chunk, H hidden, V vocabulary, R rank of an adapter; a block has n tokens and c columns.


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

    def logit_slices(self, token_slice: slice) -> list[slice]:
        """The parts of a slice of the tokens whose logits exist at once."""
        return _slices(token_slice.start, token_slice.stop, self.logit_tokens)


def _slices(start: int, stop: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, stop)) for at in range(start, stop, max(step, 1))]


class GradientSums:
    """The gradients of a head, summed over blocks.

    For each slice of the tokens, call `begin`, then `add` with the gradient of each block of columns, then `end`.
    grad_buffer: memory for the gradient of n x c logits; None if the head has none.
    """

    def __init__(
        self,
        head: Head,
        wanted: Wanted,
        gradients: Gradients,
        plan: BlockPlan,
        grad_buffer: Callable[[int, int], Tensor] | None,
    ) -> None:
        self._head, self._wanted, self.gradients, self._grad_buffer = head, wanted, gradients, grad_buffer
        self._several_column_blocks = plan.columns < head.vocab
        if not head.tokens:
            gradients.zero_sums()

    def grad_buffer(self, n: int, c: int) -> Tensor | None:
        return None if self._grad_buffer is None else self._grad_buffer(n, c)

    def begin(self, token_slice: slice, no_gradient_n: Tensor | None) -> None:
        """Start with the first block of columns of these tokens.

        no_gradient_n: True for tokens without a gradient; None if there are none. Their hidden states may be NaN or
        infinite. NaN times a zero gradient is NaN, which would enter dW. So a copy has zeros there. It costs 0.1 % of
        the products, and less than a wait for the number of such tokens.
        """
        self._token_slice = token_slice
        if self._wanted.want_weight:
            x_nH = self._head.hidden_NH[token_slice]
            self._x_nH = x_nH if no_gradient_n is None else x_nH.masked_fill(no_gradient_n.unsqueeze(1), 0.0)
        self._dx_nH = self._sum_nH = self.gradients.dx_NH[token_slice]
        dtype = sum_dtype(self._head.hidden_NH, True)
        if self._wanted.want_hidden and self._several_column_blocks and self._dx_nH.dtype != dtype:
            self._sum_nH = self._dx_nH.new_empty(self._dx_nH.shape, dtype=dtype)

    def add(self, grad_nc: Tensor, columns: slice) -> None:
        """Add the gradient of a block's logits."""
        head, wanted, gradients = self._head, self._wanted, self.gradients
        after_first_tokens = self._token_slice.start > 0
        if not grad_nc.shape[1]:  # a process may hold no row of the weight
            self._sum_nH.zero_()
            return
        if wanted.want_bias:
            db = column_sum(grad_nc)
            gradients.db_V[columns] = gradients.db_V[columns] + db if after_first_tokens else db
        if wanted.want_weight:
            product_into(grad_nc.t(), self._x_nH, gradients.dw_VH[columns], accumulate=after_first_tokens)
        if wanted.want_hidden:
            product_into(grad_nc, head.weight_VH[columns], self._sum_nH, accumulate=columns.start > 0)
        # An adapter implies one block of all columns.
        if head.low_NR is not None and head.lora_b_VR is not None:
            if wanted.want_low:
                product_into(grad_nc, head.lora_b_VR, gradients.dlow_NR[self._token_slice], accumulate=False)
            if wanted.want_lora_b:
                product_into(
                    grad_nc.t(), head.low_NR[self._token_slice], gradients.dlora_b_VR, accumulate=after_first_tokens
                )

    def end(self) -> None:
        """Finish the slice of the tokens."""
        if self._sum_nH is not self._dx_nH:
            self._dx_nH.copy_(self._sum_nH)
        del self._sum_nH  # one sum is alive at a time


class BlockOp(Protocol):
    """What an op does with each block."""

    def select_tokens(self, token_slice: slice) -> Any:
        """The op's tensors of some tokens."""

    def no_gradient_mask(self, token_slice: slice) -> Tensor | None:
        """True for tokens without a gradient; None if there are none."""

    def compute_block(self, part: Any, token_slice: slice, columns: slice, grads: Sequence[Tensor | None]) -> None:
        """Compute the results of `part` from `select_tokens`, and write the gradient of each head's logits."""


def run_blocks(plan: BlockPlan, head_sums: Sequence[GradientSums], size: tuple[int, int], op: BlockOp) -> None:
    """Run the op on each block, and add up the gradients of its heads. size: (N, V)"""
    for token_slice in plan.token_slices(size[0]):
        parts = [(at, op.select_tokens(at)) for at in plan.logit_slices(token_slice)]
        no_gradient_n = op.no_gradient_mask(token_slice)
        for sums in head_sums:
            sums.begin(token_slice, no_gradient_n)
        for columns in plan.column_slices(size[1]):
            n, c = token_slice.stop - token_slice.start, columns.stop - columns.start
            grads = [sums.grad_buffer(n, c) for sums in head_sums]
            for at, part in parts:
                inside = slice(at.start - token_slice.start, at.stop - token_slice.start)
                op.compute_block(part, at, columns, [None if grad is None else grad[inside] for grad in grads])
            for sums, grad in zip(head_sums, grads, strict=True):
                if grad is not None:
                    sums.add(grad, columns)
        for sums in head_sums:
            sums.end()
