"""The shape of the heads and their training objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Schedule name -> the heads' weight in the loss at a fraction x of the ramp.
SCHEDULES: Mapping[str, Any] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: x,
    "sine": lambda x: math.sin(math.pi / 2 * x),
}


@dataclass(frozen=True, kw_only=True)
class HeadsSpec:
    """The shape of the heads.

    kind: `medusa`, independent heads on the model's last hidden state; or `mtp`, a sequence of modules with one
        transformer layer each.
    count: number of heads; head k (1, 2, ...) predicts the token k + 1 ahead.
    layers: residual blocks per medusa head.
    shared: whether the heads use the model's lm_head instead of an output weight per head.
    """

    kind: str = "medusa"
    count: int = 3
    layers: int = 1
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The training objective: Σ_k decay^k · coefficient · schedule · loss_k, and in stage 2 also the model's own loss.

    In stage 1 the model is frozen and only the heads are trained.
    """

    stage: int = 1
    decay: float = 0.8
    coefficient: float = 0.2

    def factors(self, count: int, scheduled: float) -> list[float]:
        """The weights of the losses, in stage 2 with the model's first. scheduled: the current schedule value."""
        heads = [self.decay**k * self.coefficient * scheduled for k in range(1, count + 1)]
        return [1.0, *heads] if self.stage == 2 else heads

    def shifts(self, count: int) -> list[int]:
        """The shift of each loss, in the same order."""
        return list(range(1 if self.stage == 2 else 2, count + 2))


def scheduled(schedule: str, step: int, steps: int, ramp: float) -> float:
    """The schedule's value at optimizer step `step` of `steps`. It rises to 1 over the fraction `ramp` of the steps.

    The formulas are those of the Medusa authors' trainer: sin(π/2 · x) and x, where x is the fraction of the ramp
    (arXiv 2401.10774, §2.2.2: the heads' weight grows during joint training).
    """
    x = min(1.0, step / max(1.0, ramp * steps))
    return float(SCHEDULES[schedule](x))


def shares_head(output: str, kind: str, count: int, model_numel: int, head_numel: int) -> bool:
    """Whether heads use the model's lm_head. `auto` does if separate output weights would be larger than the model."""
    if kind == "mtp" or output != "auto":
        return kind == "mtp" or output == "shared"
    return count * head_numel > model_numel
