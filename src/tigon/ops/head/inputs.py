"""The inputs of every op over hidden states and an lm_head, checked, promoted, flattened and gathered once.

`Head` holds the tensors of the products, and `LossArguments` the other arguments of a linear cross entropy.

A LoRA adapter of the head enters as a thin product: logits = X Wᵀ + U Bᵀ, with the low-rank hidden states
U = s · X Aᵀ. A, the scaling and what the adapter reads stay in plain PyTorch, because they concern tensors of rank R
only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError
from tigon.ops import dispatch, products
from tigon.ops.dispatch import check_dtype, check_number, product_dtype
from tigon.ops.losses.inputs import (
    CountedTokens,
    LossOptions,
    check_chunk_bytes,
    check_devices,
    check_labels,
    check_options,
    check_target,
    check_vector,
    inverse_denominator,
    may_wait,
    tokens_that_count,
    wants_label_check,
)
from tigon.ops.losses.prepared_targets import PreparedTargets
from tigon.ops.products import product_into

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
    ) -> Head:
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
        self,
        hidden: Tensor,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        scaling: float,
        adapter_hidden: Tensor | None,
    ) -> Head:
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

    def at(self, counted: CountedTokens) -> Head:
        """The head with the tokens that count."""
        if counted.index_N is None:
            return self
        return self._replace(
            hidden_NH=self.hidden_NH.index_select(0, counted.index_N), low_NR=counted.take(self.low_NR)
        )

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


MIB = 1 << 20
# Bytes of logits alive at once, (least, most). On a GPU, chunks of at least 2048 tokens keep the products at full rate
# (with 128256 columns, 512 MiB hold 2093 tokens of 16-bit logits, and 1024 where logits are fp32). On a CPU, a chunk
# should stay near its last-level cache.
# Each chunk also reads and writes the fp32 sum of dW, so a chunk is as large as that sum, up to `most`. On an H200,
# 16384 x 3584 x 152064 took 87 ms with 1 GiB and 96 ms without. The peak memory was the same, because the cast of the
# sum needs as much.
DEFAULT_CHUNK_BYTES = {"cuda": (512 * MIB, 1024 * MIB), "cpu": (16 * MIB, 16 * MIB)}


def default_chunk_bytes(hidden: Tensor, chunk_bytes: int | None = None) -> tuple[int, int]:
    """(least, most) bytes of logits alive at once; by default those of hidden's device."""
    if chunk_bytes is not None:
        return chunk_bytes, chunk_bytes
    return DEFAULT_CHUNK_BYTES.get(dispatch.planned_device(hidden), DEFAULT_CHUNK_BYTES["cuda"])


class ChunkLimits(NamedTuple):
    """The limits that a call sets to its plan."""

    chunk_bytes: Sequence[int]
    """(least, most)"""
    fp32_accumulate: bool
    memory_bytes: int
    """The most bytes of logits and of the weight's gradient; 0 for no limit."""


def _check_adapter(
    hidden: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    scaling: float,
    adapter_hidden: Tensor | None,
) -> None:
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


def starts_aligned(x: Tensor) -> bool:
    """Whether rows have unit stride and start at multiples of 16 bytes."""
    step = 16 // x.element_size()
    return x.stride(1) == 1 and x.stride(0) % step == 0 and x.data_ptr() % 16 == 0


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


# --- a loss's own arguments ---

# Reading the count on the host leaves the GPU idle for 0.7 ms (H200, 4096 x 2048 x 50264: the time of the step minus
# that of its kernels, commit a3809ce). Three products with this many operations take about as long.
_WORTH_A_WAIT_FLOPS = 5 * 10**11


@dataclass(frozen=True, kw_only=True)
class LossArguments:
    """The arguments of one call that are not differentiated."""

    target: Tensor
    class_weight: Tensor | None
    token_weight: Tensor | None
    inv_denominator: Tensor
    index: Tensor | None
    """Flat positions of the tokens that count; None for all."""
    options: LossOptions
    per_row: bool
    entropy: bool
    predicted: bool
    limits: ChunkLimits

    @classmethod
    def of(
        cls, head: Head, rows: torch.Size, target: Tensor | PreparedTargets, *, whole: bool = True,
        class_weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0, z_loss: float = 0.0,
        num_items: Any = None, token_weight: Tensor | None = None, chunk_bytes: int | None = None,
        fp32_accumulate: bool = True, memory_bytes: int | None = None, outputs: tuple[str, ...] = (),
    ) -> LossArguments:  # fmt: skip
        """The arguments of a call, from the options of `linear_cross_entropy`.

        Args:
            rows: the shape of the tokens.
            whole: whether the head is. The parts of a divided head drop the same tokens, and check their labels later.

        Raises:
            OptionError: an option is invalid, or options contradict each other.
            ShapeError, DtypeError, LabelError: labels or weights do not fit the head.
        """
        labels = _labels(target, ignore_index)
        options, num_items = check_options(
            LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss),
            reduction=reduction,
            num_items=num_items,
            outputs=outputs,
        )
        check_target(labels, rows, "hidden")
        check_devices(hidden=head.hidden_NH, target=labels, class_weight=class_weight, token_weight=token_weight)
        if whole:
            check_vector("class_weight", class_weight, (head.weight_VH.shape[0],))
        check_vector("token_weight", token_weight, labels.shape)
        target_N = labels.reshape(-1).contiguous()
        if whole and may_wait(target_N) and wants_label_check(head.hidden_NH):
            # Checked here so that the message names the caller's position: ignored rows are dropped below.
            check_labels(head.weight_VH.shape[0], target_N, ignore_index)
        class_weight = None if class_weight is None else class_weight.contiguous()
        return cls(
            target=target_N,
            class_weight=class_weight,
            token_weight=None if token_weight is None else token_weight.reshape(-1).contiguous(),
            inv_denominator=inverse_denominator(
                head.hidden_NH,
                target_N,
                class_weight,
                num_items=num_items,
                ignore_index=ignore_index,
                reduction=reduction,
            ),
            index=_tokens(head, target if isinstance(target, PreparedTargets) else target_N, ignore_index, whole),
            options=options,
            per_row=reduction == "none",
            entropy="entropy" in outputs,
            predicted="predicted" in outputs or "accuracy" in outputs,
            limits=_limits(head, chunk_bytes, fp32_accumulate, memory_bytes),
        )


def _labels(target: Tensor | PreparedTargets, ignore_index: int) -> Tensor:
    if not isinstance(target, PreparedTargets):
        return target
    if target.shifts != (0,):
        raise OptionError(f"target was prepared for heads with shifts {target.shifts}; leave out the shifts.")
    if target.ignore_index != ignore_index:
        raise OptionError(f"target was prepared with ignore_index {target.ignore_index}, the loss has {ignore_index}.")
    return target.target


def _tokens(head: Head, target: Tensor | PreparedTargets, ignore_index: int, whole: bool) -> Tensor | None:
    """Flat positions of the labels that are not ignored, or None to use all rows."""
    pays = 6 * head.tokens * head.weight_VH.numel() >= _WORTH_A_WAIT_FLOPS
    if isinstance(target, PreparedTargets):
        if whole and dispatch.planned() is None:
            return target.rows() if may_wait(target.target) else None
        target, pays = target.target.reshape(-1), True  # of a whole head, the count is there already
    labels_N = target
    return tokens_that_count(labels_N, lambda: labels_N != ignore_index, wait_pays=pays or not whole)


def _limits(head: Head, chunk_bytes: int | None, fp32_accumulate: bool, memory_bytes: int | None) -> ChunkLimits:
    check_chunk_bytes(chunk_bytes)
    check_chunk_bytes(memory_bytes, "memory_bytes")
    if memory_bytes is not None and (chunk_bytes is not None or not fp32_accumulate):
        raise OptionError("memory_bytes chooses the chunks and their sum; leave out chunk_bytes and fp32_accumulate.")
    if not fp32_accumulate and head.dtype == torch.float16:
        raise OptionError(
            "fp32_accumulate=False is not for float16, whose range sums of gradients leave; use bfloat16."
        )
    return ChunkLimits(default_chunk_bytes(head.hidden_NH, chunk_bytes), fp32_accumulate, memory_bytes or 0)
