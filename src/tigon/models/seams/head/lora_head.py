"""The seam for an output head with a LoRA adapter: PEFT's layer computes the loss, as a plain head does.

The adapter is a low-rank operand of `linear_cross_entropy`: its product is added to each chunk's logits. Neither all
logits nor W + s·B A are formed. If the op cannot compute the adapter (see `lora.py`), PEFT's layer computes the
logits, with one warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from tigon.models.seams.head.loss import deferred, requested_loss, sees_full_weight, warn_full_logits
from tigon.models.seams.lora import (
    LoraSeam,
    adapted_from,
    apply_adapter_dropout,
    is_plain_linear,
    plain_adapter,
    scaling_of,
    variant_objection,
)

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


@dataclass(frozen=True, kw_only=True)
class LoraHeadSeam(LoraSeam):
    """`peft.tuners.lora`'s layer around the output head."""

    op: ClassVar[str] = "linear_cross_entropy"
    flag: ClassVar[str] = "linear_cross_entropy"

    lora_linear: bool
    """If True, `lora_linear` computes logits when they are read. Otherwise PEFT's forward does."""

    def objection(self, module: nn.Module) -> str | None:
        base: Any = getattr(module, "base_layer", None)
        if not is_plain_linear(base):
            return f"its layer is a {type(base).__name__}; the fused loss needs torch's Linear"
        return super().objection(module) or variant_objection(module)

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        attributes = super().namespace(base) if self.lora_linear else {}
        plain_forward: Callable[..., Tensor] = attributes.get("forward", base.forward)

        def forward(self: LoraLayer, x: Tensor, *args: object, **kwargs: object) -> Any:
            loss_call = None if args or kwargs else requested_loss(self)
            if loss_call is None or not loss_call.fits(x):
                return plain_forward(self, x, *args, **kwargs)
            adapter = plain_adapter(self, x)
            if adapter is None or not sees_full_weight(self.base_layer):
                warn_full_logits(self, "PEFT computes the head with its adapter")
                return plain_forward(self, x)
            head, adapter_x = self.base_layer, apply_adapter_dropout(self, x, adapter)
            loss = loss_call.compute(
                x,
                head.weight,
                head.bias,
                lora_a=self.lora_A[adapter].weight,
                lora_b=self.lora_B[adapter].weight,
                scaling=scaling_of(self, adapter),
                adapter_hidden=None if adapter_x is None else adapter_x.reshape(-1, adapter_x.shape[-1]),
            )
            if adapter_x is None:
                return deferred(loss_call, loss, self, plain_forward, x)
            # Logits that are read later must have the dropout of the loss.
            logits = partial(_logits, adapter=adapter, adapter_x=adapter_x)
            return deferred(loss_call, loss, self, logits, x)

        return {**attributes, "forward": forward}


def _logits(module: LoraLayer, x: Tensor, *, adapter: str, adapter_x: Tensor) -> Tensor:
    return adapted_from(module, x, adapter, module.base_layer.weight, adapter_x)
