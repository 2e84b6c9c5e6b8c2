"""The losses as modules: they hold options, and the class weight as the buffer `torch.nn.CrossEntropyLoss` has."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tigon import ops
from tigon.ops.losses.common import LossOutput
from tigon.ops.losses.cross_entropy import Reduction
from tigon.ops.losses.linear_cross_entropy import PreparedTargets

# N = tokens, in any leading dimensions; H = hidden, V = vocabulary.


class _Loss(nn.Module):
    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        outputs: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "outputs": outputs,
        }

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class CrossEntropyLoss(_Loss):
    """`tigon.cross_entropy` with its options fixed; see there.

    Classes are the last dimension, logits (..., V) and target (...), where `torch.nn.CrossEntropyLoss` has them second.
    With `inplace=True` the logits are overwritten with their gradient.
    """

    def __init__(self, weight: Tensor | None = None, *, inplace: bool = False, **options: Any) -> None:
        super().__init__(weight, **options)
        self.options["inplace"] = inplace

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        num_items: Tensor | float | None = None,
        token_weight: Tensor | None = None,
    ) -> Tensor | LossOutput:
        return ops.cross_entropy(
            logits, target, weight=self.weight, num_items=num_items, token_weight=token_weight, **self.options
        )


class LinearCrossEntropyLoss(_Loss):
    """`tigon.linear_cross_entropy` with its options fixed; see there. The weight (V, H) of the layer is an argument."""

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        chunk_bytes: int | None = None,
        fp32_accumulate: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(weight, **options)
        self.options.update(chunk_bytes=chunk_bytes, fp32_accumulate=fp32_accumulate)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor | PreparedTargets,
        bias: Tensor | None = None,
        *,
        num_items: Tensor | float | None = None,
        token_weight: Tensor | None = None,
    ) -> Tensor | LossOutput:
        return ops.linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            class_weight=self.weight,
            num_items=num_items,
            token_weight=token_weight,
            **self.options,
        )
