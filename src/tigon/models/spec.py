"""What may differ between model families, as fields of one row. Nothing else in this package knows a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tigon.models.layers import GatedMlpSeam, NormSeam, RopeSeam
from tigon.models.seam import Seam


@dataclass(frozen=True, kw_only=True)
class PatchSpec:
    """A claim about a family: which seams its modules have. `patch` checks it against the model it gets.

    A seam that is None does not exist in the family; one whose flag is in `keep` exists and is left alone.
    """

    model_type: str
    """`config.model_type`."""
    norm: NormSeam | None
    mlp: GatedMlpSeam | None
    rope: RopeSeam | None
    head: str = "lm_head"
    """Path of the output head below the model."""
    keep: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Flag -> why it is left alone in this family."""

    @property
    def layer_seams(self) -> tuple[Seam, ...]:
        """The seams inside the decoder layers."""
        return tuple(seam for seam in (self.norm, self.mlp, self.rope) if seam is not None)
