"""The arguments of a linear cross entropy besides the head, checked and flattened once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.errors import OptionError
from tigon.ops import dispatch
from tigon.ops.head.inputs import Head
from tigon.ops.head.plan import ChunkLimits, default_chunk_bytes
from tigon.ops.losses.labels import (
    PreparedTargets,
    check_labels,
    check_target,
    may_wait,
    planned_tokens,
    tokens_that_count,
    wants_label_check,
)
from tigon.ops.losses.options import LossOptions, check_chunk_bytes, check_devices, check_options, check_vector
from tigon.ops.losses.reduction import inverse_denominator
from tigon.ops.losses.results import wants_entropy, wants_predicted

# N tokens.

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
            reduction=reduction, num_items=num_items, outputs=outputs,
        )  # fmt: skip
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
                head.hidden_NH, target_N, class_weight, num_items=num_items, ignore_index=ignore_index,
                reduction=reduction,
            ),
            index=_tokens(head, target if isinstance(target, PreparedTargets) else target_N, ignore_index, whole),
            options=options,
            per_row=reduction == "none",
            entropy=wants_entropy(outputs),
            predicted=wants_predicted(outputs),
            limits=_limits(head, chunk_bytes, fp32_accumulate, memory_bytes),
        )  # fmt: skip


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
    N = head.hidden_NH.shape[0]
    if (trace := dispatch.planned()) is not None:
        return planned_tokens(trace, N) if trace.ignored else None
    if isinstance(target, PreparedTargets):
        if whole:
            return target.rows() if may_wait(target.target) else None
        target = target.target.reshape(-1)
    labels_N = target
    pays = not whole or 6 * N * head.weight_VH.numel() >= _WORTH_A_WAIT_FLOPS
    return tokens_that_count(labels_N, lambda: labels_N != ignore_index, wait_pays=pays)


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
