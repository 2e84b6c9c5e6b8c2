"""What may differ between model families, as fields of one row. Nothing else in this package knows a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tigon.models.seams.base import Seam
from tigon.models.seams.logits import LogitAttributes
from tigon.models.seams.rope import RopeSeam

LAYER_FLAGS = ("rms_norm", "layer_norm", "mlp", "rope")
LOSS_FLAGS = ("linear_cross_entropy", "cross_entropy")


@dataclass(frozen=True, kw_only=True)
class PatchSpec:
    """A claim about a family: which seams its modules have. `patch` checks it against the model it gets, `verify`
    proves it on a small random one.

    Where a flag has several seams, a module gets the first that computes what it computes.
    """

    model_type: str
    """`config.model_type`."""
    norm: tuple[Seam, ...] = ()
    mlp: tuple[Seam, ...] = ()
    rope: RopeSeam | None = None
    head: str | None = "lm_head"
    """Path of the output head below the model; None if it is to be asked for its output embeddings."""
    logits: LogitAttributes = field(default_factory=LogitAttributes)
    keep: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What is left alone in this family -> why. A flag among the keys is not an error where it matches nothing."""
    tiny: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What `verify` sets in the config of its small model beyond the sizes all families share."""
    claims: bool = True
    """Whether a flag whose seams match nothing is an error. False where the seams are guesses from structure."""
    towers_of_any_family: bool = False
    """Whether the layers belong to towers of any family. Then a flag that is None and matches nothing is no error."""

    @property
    def seams(self) -> Mapping[str, tuple[Seam, ...]]:
        """Flag -> its seams in the order they are tried; flags without a seam are not there."""
        by_flag: dict[str, tuple[Seam, ...]] = {}
        for seam in (*self.norm, *self.mlp, *(() if self.rope is None else (self.rope,))):
            by_flag[seam.flag] = (*by_flag.get(seam.flag, ()), seam)
        return MappingProxyType({flag: by_flag[flag] for flag in LAYER_FLAGS if flag in by_flag})

    @property
    def flags(self) -> frozenset[str]:
        """The flags of `tigon.patch` that do something in this family."""
        return frozenset(self.seams) | frozenset(LOSS_FLAGS if self.head else ())
