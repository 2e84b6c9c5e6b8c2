"""What a model does to the output of its head before the loss: multiply it, cap it with a tanh, or both.

The head computes the loss, so it has to know beforehand what the model is going to do; a row says which attributes of
the config hold it. What the model then really does is noted down by the object that stands for the logits, and the loss
is used only if the two are the same (`loss_seam`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Step = tuple[Any, ...]
"""The name of a method of torch.Tensor, then its arguments: ("div", 30.0), ("tanh",), ("to", torch.float32)."""


@dataclass(frozen=True)
class LogitMap:
    """x -> softcap · tanh(scale · x / softcap), or scale · x without a cap, as in `tigon.linear_cross_entropy`."""

    scale: float = 1.0
    softcap: float | None = None

    def agrees(self, other: LogitMap) -> bool:
        """Whether the two are one, up to how 30 · (1 / 30) rounds."""
        if (self.softcap is None) != (other.softcap is None):
            return False
        pairs = [(self.scale, other.scale), (self.softcap or 0.0, other.softcap or 0.0)]
        return all(math.isclose(a, b, rel_tol=1e-6) for a, b in pairs)


def map_of(steps: tuple[Step, ...]) -> LogitMap | None:
    """The map that these steps make, or None if it is not of that form. Casts and copies do not matter."""
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
    """The attributes of a family's (text) config that hold its `LogitMap`; None where it has none."""

    multiply: str | None = None
    divide: str | None = None
    softcap: str | None = None

    def read(self, config: Any) -> LogitMap:
        """The map as the config has it now. An attribute that is None or absent does nothing."""
        multiply, divide, softcap = (
            None if name is None else getattr(config, name, None) for name in (self.multiply, self.divide, self.softcap)
        )
        scale = (1.0 if multiply is None else multiply) / (1.0 if divide is None else divide)
        return LogitMap(float(scale), None if softcap is None else float(softcap))
