"""The losses as modules. They hold the options, and the class weight in a buffer like `torch.nn.CrossEntropyLoss`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tigon import ops
from tigon.ops.losses.cross_entropy import Reduction
from tigon.ops.losses.prepared_targets import PreparedTargets
from tigon.ops.losses.results import LossOutput

# H hidden size, V vocabulary size.


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
    """`tigon.cross_entropy` as a module that holds its options.

    forward takes logits (..., V) and target (...), and optionally num_items and token_weight. Classes are the last
    dimension; in `torch.nn.CrossEntropyLoss` they are the second.

    Args:
        weight: (V,) class weights, or None.
        inplace: overwrite the logits with their gradient.
        options: the other options of `tigon.cross_entropy`, under the same names.

    Raises:
        ShapeError, DtypeError, OptionError, LabelError: in forward, under the conditions of `tigon.cross_entropy`.
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
    """`tigon.linear_cross_entropy` as a module that holds its options.

    forward takes hidden (..., H), the layer's weight (V, H), target (...) and optionally bias (V,), num_items and
    token_weight.

    Args:
        weight: (V,) class weights, or None. This is not the layer's weight, which is an argument of forward.
        chunk_bytes, fp32_accumulate: as in `tigon.linear_cross_entropy`.
        options: the other options of `tigon.linear_cross_entropy`, under the same names.

    Raises:
        ShapeError, DtypeError, OptionError, LabelError: in forward, under the conditions of
            `tigon.linear_cross_entropy`.
    """

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
