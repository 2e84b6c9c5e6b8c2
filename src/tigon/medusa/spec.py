"""Which heads a model gets, and what they are trained for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The heads' weight in the loss at a fraction x of its ramp.
SCHEDULES: Mapping[str, Any] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: x,
    "sine": lambda x: math.sin(math.pi / 2 * x),
}


@dataclass(frozen=True, kw_only=True)
class HeadsSpec:
    """The shape of the heads.

    kind: `medusa`, independent heads on the model's last hidden state; `mtp`, modules of a transformer layer each, one
    after the other. count: heads; head k (1, 2, ...) predicts the token k + 1 ahead. layers: residual blocks of a
    medusa head. shared: logits by the model's own lm_head instead of an output weight for each head.
    """

    kind: str = "medusa"
    count: int = 3
    layers: int = 1
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised: in stage 2 the model's own loss, and in both Σ_k decay^k · coefficient · schedule · loss_k.

    In stage 1 the model is frozen and only the heads learn.
    """

    stage: int = 1
    decay: float = 0.8
    coefficient: float = 0.2

    def factors(self, count: int, scheduled: float) -> list[float]:
        """The weights of the losses, the model's own first in stage 2. scheduled: the schedule's value now."""
        heads = [self.decay**k * self.coefficient * scheduled for k in range(1, count + 1)]
        return [1.0, *heads] if self.stage == 2 else heads

    def shifts(self, count: int) -> list[int]:
        """How far ahead each loss looks, in the same order."""
        return list(range(1 if self.stage == 2 else 2, count + 2))


def scheduled(schedule: str, step: int, steps: int, ramp: float) -> float:
    """The schedule's value at optimizer step `step` of `steps`; it rises over the first `ramp` of them, then stays 1.

    The values of the Medusa authors' trainer: sin(π/2 · x) and x, x the fraction of the ramp (arXiv 2401.10774, §2.2.2:
    the heads' weight grows during joint training).
    """
    x = min(1.0, step / max(1.0, ramp * steps))
    return float(SCHEDULES[schedule](x))


def shares_head(output: str, kind: str, count: int, model_numel: int, head_numel: int) -> bool:
    """Whether heads use the model's own lm_head; `auto`: where output weights of their own would outweigh the model."""
    if kind == "mtp" or output != "auto":
        return kind == "mtp" or output == "shared"
    return count * head_numel > model_numel
