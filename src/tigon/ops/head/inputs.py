"""The inputs of every op over hidden states and an lm_head, checked, promoted and flattened once.

A LoRA adapter of the head enters as a thin product: logits = X Wᵀ + U Bᵀ, with the low-rank hidden states
U = s · X Aᵀ. A, the scaling and what the adapter reads stay in plain PyTorch, because they concern tensors of rank R
only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops import dispatch, products
from tigon.ops.dispatch import check_dtype, check_number
from tigon.ops.losses.labels import Places
from tigon.ops.losses.options import check_devices
from tigon.ops.products import product_dtype, product_into

# N tokens, n tokens of a block, c columns of a block, H hidden, V vocabulary, R rank of an adapter.


class Head(NamedTuple):
    """Hidden states and an lm_head in the dtype of their product. Each op of this folder reads one, or two."""

    hidden_NH: Tensor
    weight_VH: Tensor
    bias: Tensor | None = None
    low_NR: Tensor | None = None
    """U, the adapter's low-rank hidden states; None without an adapter."""
    lora_b_VR: Tensor | None = None

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "", *, divided: bool = False
    ) -> Head:  # fmt: skip
        """The head of a call with hidden (..., H), weight (V, H) and bias (V,); the casts are differentiable.

        Args:
            prefix: what the arguments' names begin with in the messages.
            divided: whether the weight is a process's part of a divided head, which may have no row.

        Raises:
            DtypeError: a tensor has another dtype than the four floats.
            ShapeError: the shapes do not fit, a size is 0, or the tensors are on several devices.
        """
        check_dtype(hidden, weight, bias)
        if hidden.ndim == 0 or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or not weight.shape[1]:
            raise ShapeError(
                f"{prefix}hidden is {tuple(hidden.shape)}, {prefix}weight is {tuple(weight.shape)}; they must be "
                "(..., H) and (V, H). "
                "A weight with no elements is sharded: gather it first (inside the lm_head's own forward it is whole)."
            )
        V = weight.shape[0]
        if V == 0 and not divided:
            raise ShapeError("the vocabulary has 0 classes; V must be at least 1.")
        if bias is not None and bias.shape != (V,):
            raise ShapeError(f"{prefix}bias is {tuple(bias.shape)}; it must be {(V,)}.")
        check_devices(**{f"{prefix}hidden": hidden, f"{prefix}weight": weight, f"{prefix}bias": bias})
        dtype, flat_NH = product_dtype(hidden, weight), hidden.reshape(-1, hidden.shape[-1])
        if dtype is hidden.dtype and dtype is weight.dtype and bias is None:
            return cls(flat_NH, weight)  # a cast to the same dtype takes 0.5 us of host time
        return cls(flat_NH.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype).contiguous())

    def with_adapter(
        self, hidden: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, scaling: float,
        adapter_hidden: Tensor | None,
    ) -> Head:  # fmt: skip
        """The head with the adapter of a call, if it has one. hidden: as the caller gave it."""
        _check_adapter(hidden, self.weight_VH, lora_a, lora_b, scaling, adapter_hidden)
        if lora_a is None:
            return self
        read = hidden if adapter_hidden is None else adapter_hidden
        return self._replace(low_NR=low_rank_hidden(read, lora_a, scaling, self.dtype), lora_b_VR=lora_b)

    @property
    def tokens(self) -> int:
        return self.hidden_NH.shape[0]

    @property
    def vocab(self) -> int:
        return self.weight_VH.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_NH.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of sums and statistics: fp32, or fp64 for fp64."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def logits_dtype(self) -> torch.dtype:
        return products.logits_dtype(self.dtype)

    def at(self, places: Places) -> Head:
        """The head with the tokens that count."""
        if places.index_N is None:
            return self
        return self._replace(hidden_NH=self.hidden_NH.index_select(0, places.index_N), low_NR=places.take(self.low_NR))

    def part(self, rows: slice) -> Head:
        """The head with some of the tokens."""
        low_NR = None if self.low_NR is None else self.low_NR[rows]
        return Head(self.hidden_NH[rows], self.weight_VH, self.bias, low_NR, self.lora_b_VR)

    def logits_into(self, out_nc: Tensor, columns: slice | None = None) -> None:
        """Write the logits of all tokens and of some columns of the vocabulary, by default of all."""
        weight, bias = self.weight_VH, self.bias
        if columns is not None:
            weight, bias = weight[columns], None if bias is None else bias[columns]
        products.logits_into(self.hidden_NH, weight, bias, out_nc)
        if self.low_NR is not None and self.lora_b_VR is not None:  # only a loss has an adapter, and whole rows
            product_into(self.low_NR, self.lora_b_VR.t(), out_nc, accumulate=True)


class Wanted(NamedTuple):
    """The gradients that a call needs, in the order of `Head`."""

    want_hidden: bool = False
    want_weight: bool = False
    want_bias: bool = False
    want_low: bool = False
    want_lora_b: bool = False

    @classmethod
    def of(cls, needs: Sequence[bool], grad_enabled: bool) -> Wanted:
        """needs: `ctx.needs_input_grad` of a head's tensors, which ignores no_grad."""
        return cls(*(grad_enabled and need for need in needs))


NOTHING = Wanted()


def _check_adapter(
    hidden: Tensor, weight: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, scaling: float,
    adapter_hidden: Tensor | None,
) -> None:  # fmt: skip
    """Raise unless the adapter is absent, or fits hidden (..., H) and weight (V, H)."""
    if not -math.inf < check_number("scaling", scaling) < math.inf:
        raise OptionError(f"scaling={scaling} must be finite.")
    if lora_a is None or lora_b is None:
        if lora_a is not lora_b:
            given, missing = ("lora_a", "lora_b") if lora_b is None else ("lora_b", "lora_a")
            raise OptionError(f"{given} is given without {missing}; an adapter needs both.")
        if adapter_hidden is not None:
            raise OptionError("adapter_hidden is given without lora_a and lora_b; there is no adapter to read it.")
        return
    check_dtype(lora_a, lora_b, adapter_hidden)
    (V, H), R = weight.shape, lora_a.shape[0] if lora_a.ndim else 0
    if lora_a.shape != (R, H) or lora_b.shape != (V, R):
        raise ShapeError(
            f"lora_a is {tuple(lora_a.shape)}, lora_b is {tuple(lora_b.shape)}; for a weight of {(V, H)} they must be "
            f"(R, {H}) and ({V}, R)."
        )
    if adapter_hidden is not None and adapter_hidden.shape != hidden.shape:
        raise ShapeError(
            f"adapter_hidden is {tuple(adapter_hidden.shape)}, hidden is {tuple(hidden.shape)}; they must agree."
        )
    check_devices(hidden=hidden, lora_a=lora_a, lora_b=lora_b, adapter_hidden=adapter_hidden)


def low_rank_hidden(hidden: Tensor, lora_a: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """U (N, R) = scaling · hidden @ lora_a.T in `dtype`.

    The scaling is applied to A, in fp32 at least, so that U is rounded once.
    """
    scaled = lora_a.to(torch.promote_types(lora_a.dtype, torch.float32)) * scaling
    return F.linear(hidden.to(dtype).reshape(-1, hidden.shape[-1]), scaled.to(dtype))


# --- memory -----------------------------------------------------------------------------------------------------------


class LogitBuffer:
    """Memory for the logits of a block, or for their gradient.

    For kernels, rows start at a multiple of 16 bytes, because unaligned rows halve the width of every load. On the CPU
    rows are contiguous: its bf16 product (oneDNN for AMX, torch 2.13) multiplies the padding between rows by 0, which
    gives NaN if that memory holds a NaN.
    """

    def __init__(self, tokens: int, columns: int, like: Tensor, dtype: torch.dtype) -> None:
        aligned = dispatch.planned_device(like) != "cpu" or dispatch.uses_kernel(like)
        self._line = 16 // dtype.itemsize if aligned else 1
        self.tokens = tokens
        self.memory = like.new_empty(tokens * self._width(columns), dtype=dtype)

    def _width(self, columns: int) -> int:
        return -(-columns // self._line) * self._line

    def view(self, n: int, c: int) -> Tensor:
        """(n, c) at the start of the buffer."""
        width = self._width(c)
        return self.memory[: n * width].view(n, width)[:, :c]
