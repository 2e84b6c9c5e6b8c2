"""The families, one row each. The only file of this package with model names in it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tigon.models.layers import GatedMlpSeam, NormSeam, RopeSeam
from tigon.models.spec import PatchSpec

_ROWS = (
    # Llama 2 to 3.2. The rope scaling types (llama3, linear, dynamic, yarn) only change cos and sin.
    PatchSpec(model_type="llama", norm=NormSeam(), mlp=GatedMlpSeam(), rope=RopeSeam()),
)

MODELS: Mapping[str, PatchSpec] = MappingProxyType({row.model_type: row for row in _ROWS})
