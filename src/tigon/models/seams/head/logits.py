"""`LogitMap`: the scaling and tanh cap that a model applies to the output of its head before the loss.

The head computes the loss, so it must know the map in advance; the family's row names the config attributes that hold
it. The object that stands for the logits records what the model actually does. The fused loss is used only if the two
agree (`loss.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Step = tuple[Any, ...]
"""The name of a method of torch.Tensor, then its arguments: ("div", 30.0), ("tanh",), ("to", torch.float32)."""


@dataclass(frozen=True)
class LogitMap:
    """x -> softcap · tanh(scale · x / softcap), or scale · x without a cap, as in `tigon.linear_cross_entropy`."""

    scale: float = 1.0
    softcap: float | None = None

    def agrees(self, other: LogitMap) -> bool:
        """Whether the two maps are equal up to rounding, such as that of 30 · (1 / 30)."""
        if (self.softcap is None) != (other.softcap is None):
            return False
        pairs = [(self.scale, other.scale), (self.softcap or 0.0, other.softcap or 0.0)]
        return all(math.isclose(a, b, rel_tol=1e-6) for a, b in pairs)


def map_of(steps: tuple[Step, ...]) -> LogitMap | None:
    """The `LogitMap` of these steps, or None if they do not form one. Casts and copies are ignored."""
    before, after, capped = 1.0, 1.0, False
    for name, *args in steps:
        if name == "tanh":
            if capped:
                return None
            capped = True
        elif name in ("mul", "div"):
            factor = args[0] if name == "mul" else 1.0 / args[0] if args[0] else math.nan
            before, after = (before, after * factor) if capped else (before * factor, after)
    if not capped:
        return LogitMap(before)
    return LogitMap(before * after, after) if after > 0 else None


@dataclass(frozen=True, kw_only=True)
class LogitAttributes:
    """The names of the (text) config attributes that hold a family's `LogitMap`; None if there is no such attribute."""

    multiply: str | None = None
    divide: str | None = None
    softcap: str | None = None

    def read(self, config: PreTrainedConfig) -> LogitMap:
        """The map of the config's current values. An attribute that is None or absent is ignored."""
        multiply, divide, softcap = (
            None if name is None else getattr(config, name, None) for name in (self.multiply, self.divide, self.softcap)
        )
        scale = (1.0 if multiply is None else multiply) / (1.0 if divide is None else divide)
        return LogitMap(float(scale), None if softcap is None else float(softcap))
