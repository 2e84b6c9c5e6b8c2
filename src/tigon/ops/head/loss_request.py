"""The labels, weights and options of a linear cross entropy, checked once, for whole and for divided heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.errors import OptionError
from tigon.ops.losses.labels import PreparedTargets, check_target
from tigon.ops.losses.options import LossOptions, check_chunk_bytes, check_devices, check_options, check_vector
from tigon.ops.losses.reduction import inverse_denominator


@dataclass(frozen=True, kw_only=True)
class LossRequest:
    """The arguments of `linear_cross_entropy` that are not of the head, without contradictions."""

    target: Tensor
    prepared: PreparedTargets | None
    options: LossOptions
    class_weight: Tensor | None
    token_weight: Tensor | None
    num_items: Any
    reduction: str
    outputs: tuple[str, ...]
    chunk_bytes: int | None
    fp32_accumulate: bool
    memory_bytes: int | None

    @classmethod
    def of(
        cls, target: Tensor | PreparedTargets, *, class_weight: Tensor | None = None, ignore_index: int = -100,
        reduction: str = "mean", label_smoothing: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
        z_loss: float = 0.0, num_items: Any = None, token_weight: Tensor | None = None,
        chunk_bytes: int | None = None, fp32_accumulate: bool = True, memory_bytes: int | None = None,
        outputs: tuple[str, ...] = (),
    ) -> LossRequest:  # fmt: skip
        """Raises `OptionError` for an invalid option, and for options that contradict each other."""
        prepared = target if isinstance(target, PreparedTargets) else None
        labels: Tensor = prepared.target if prepared is not None else target  # type: ignore[assignment]
        if prepared is not None and prepared.shifts != (0,):
            raise OptionError(f"target was prepared for heads with shifts {prepared.shifts}; leave out the shifts.")
        if prepared is not None and prepared.ignore_index != ignore_index:
            raise OptionError(
                f"target was prepared with ignore_index {prepared.ignore_index}, the loss has {ignore_index}."
            )
        options, num_items = check_options(
            LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss),
            reduction=reduction, num_items=num_items, outputs=outputs,
        )  # fmt: skip
        check_chunk_bytes(chunk_bytes)
        check_chunk_bytes(memory_bytes, "memory_bytes")
        if memory_bytes is not None and (chunk_bytes is not None or not fp32_accumulate):
            raise OptionError(
                "memory_bytes chooses the chunks and their sum; leave out chunk_bytes and fp32_accumulate."
            )
        return cls(
            target=labels, prepared=prepared, options=options, class_weight=class_weight, token_weight=token_weight,
            num_items=num_items, reduction=reduction, outputs=outputs, chunk_bytes=chunk_bytes,
            fp32_accumulate=fp32_accumulate, memory_bytes=memory_bytes,
        )  # fmt: skip

    def check_tensors(self, hidden: Tensor) -> None:
        """Raise unless the labels and weights are of hidden's tokens and device."""
        check_target(self.target, hidden.shape[:-1], "hidden")
        check_devices(hidden=hidden, target=self.target, class_weight=self.class_weight, token_weight=self.token_weight)
        check_vector("token_weight", self.token_weight, self.target.shape)

    @property
    def per_row(self) -> bool:
        return self.reduction == "none"

    def inverse_denominator(self, like: Tensor, target_N: Tensor) -> Tensor:
        """1 / D, with which the loss is a mean."""
        return inverse_denominator(
            like, target_N, self.class_weight, num_items=self.num_items, ignore_index=self.options.ignore_index,
            reduction=self.reduction,
        )  # fmt: skip

    def check_sum(self, dtype: torch.dtype) -> None:
        """Raise if the chunks' gradients in this dtype cannot be summed as the caller wants."""
        if not self.fp32_accumulate and dtype == torch.float16:
            raise OptionError(
                "fp32_accumulate=False is not for float16, whose range sums of gradients leave; use bfloat16."
            )
