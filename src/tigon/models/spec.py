"""`PatchSpec`: one table row per model family. Its fields are everything that may differ between families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tigon.models.seams.base import Seam
from tigon.models.seams.convolution import ConvolutionSeam
from tigon.models.seams.experts import ExpertsOpSeam
from tigon.models.seams.experts_lora import ExpertsLoraSeam
from tigon.models.seams.head.logits import LogitAttributes
from tigon.models.seams.lora import LoraSeam
from tigon.models.seams.rope import RopeSeam
from tigon.models.seams.router import ROUTERS

LAYER_FLAGS = ("rms_norm", "layer_norm", "mlp", "rope")
ADAPTER_FLAGS = ("lora",)
EXPERT_FLAGS = ("experts", "router")
CONVOLUTION_FLAG = "convolution"
SINKS_FLAG = "attention_sinks"
# Models need no module for them.
OPTIONAL_FLAGS = (*EXPERT_FLAGS, CONVOLUTION_FLAG, SINKS_FLAG)
LOSS_FLAGS = ("linear_cross_entropy", "cross_entropy")

# Adapters are PEFT's modules, whatever the family.
ADAPTER_SEAMS: Mapping[str, tuple[Seam, ...]] = MappingProxyType({"lora": (LoraSeam(),)})
OPTIONAL_SEAMS: Mapping[str, tuple[Seam, ...]] = MappingProxyType(
    {
        "experts": (ExpertsOpSeam(), ExpertsLoraSeam()),
        "router": ROUTERS,
        CONVOLUTION_FLAG: (
            ConvolutionSeam(rule=True),
            ConvolutionSeam(rule=True, convolves=False),
            ConvolutionSeam(),
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class PatchSpec:
    """The seams that a family's modules should have. `patch` checks them against the model that it gets, and `verify`
    tests them on a small random model.

    If a flag has several seams, each module gets the first one that computes the same as the module.
    """

    model_type: str
    """`config.model_type`."""
    norm: tuple[Seam, ...] = ()
    mlp: tuple[Seam, ...] = ()
    rope: RopeSeam | None = None
    head: str | None = "lm_head"
    """Path of the output head in the model; None to use the model's `get_output_embeddings()`."""
    logits: LogitAttributes = field(default_factory=LogitAttributes)
    keep: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Parts that stay unpatched in this family -> the reason. A flag listed here may match no module without error."""
    tiny: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Config fields that `verify` sets for its small model in addition to the sizes shared by all families."""
    claims: bool = True
    """Whether a flag whose seams match no module is an error. False if the seams are guesses from structure."""
    towers_of_any_family: bool = False
    """Whether the layers belong to towers of any family. If so, a flag that is None may match no module."""

    @property
    def seams(self) -> Mapping[str, tuple[Seam, ...]]:
        """Flag -> its seams in the order in which they are tried; flags without a seam are left out."""
        by_flag: dict[str, tuple[Seam, ...]] = {}
        for seam in (*self.norm, *self.mlp, *(() if self.rope is None else (self.rope,))):
            by_flag[seam.flag] = (*by_flag.get(seam.flag, ()), seam)
        return MappingProxyType({flag: by_flag[flag] for flag in LAYER_FLAGS if flag in by_flag})

    @property
    def flags(self) -> frozenset[str]:
        """The flags of `tigon.patch` that have an effect in this family."""
        return frozenset(self.seams) | frozenset(LOSS_FLAGS if self.head else ())
