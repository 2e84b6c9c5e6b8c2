"""The row for a family without one: it lists every seam, and each module gets the first whose numbers agree."""

from __future__ import annotations

from typing import Any

from torch import nn

from tigon.models.seams.head.logits import LogitAttributes
from tigon.models.seams.mlp import ExpertsSeam, GatedMlpSeam
from tigon.models.seams.norm import GatedNormSeam, LayerNormSeam, NormSeam
from tigon.models.seams.rope import RopeSeam
from tigon.models.spec import PatchSpec
from tigon.ops.norms.rms_norm import Casting

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_CASTINGS: tuple[tuple[Casting, float], ...] = (("llama", 0.0), ("fp32", 0.0), ("gemma", 1.0))

RMS_NORMS = tuple(NormSeam(eps=_EPS, casting=casting, offset=offset) for casting, offset in _CASTINGS)
GATED_NORMS = tuple(GatedNormSeam(eps=_EPS, gate_first=first) for first in (False, True))
# The last one is for norms that hard-code eps instead of reading an attribute.
LAYER_NORMS = (LayerNormSeam(eps=_EPS), LayerNormSeam(eps=_EPS, offset=1.0), LayerNormSeam(eps=1e-5))
GATED_MLPS = (
    *(GatedMlpSeam(act=act) for act in ("act_fn", "activation_fn", "act", "activation")),
    *(GatedMlpSeam(packed="gate_up_proj", act=act) for act in ("activation_fn", "act_fn", "act")),
    GatedMlpSeam(gate_scale="gate_multiplier", down_scale="down_multiplier"),
    GatedMlpSeam(packed="input_linear", down="output_linear", act="activation"),
    GatedMlpSeam(packed="Wi", down="Wo", act="act"),
    GatedMlpSeam(gate="w1", up="w3", down="w2", act=None),
    GatedMlpSeam(gate="w1", up="w3", down="w2", act="act_fn"),
)


_LOGIT_ATTRIBUTES = {
    "multiply": ("logit_scale", "lm_head_multiplier"),
    "divide": ("logits_scaling",),
    "softcap": ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
}


def structural_row(model: nn.Module) -> PatchSpec:
    """A row for a model whose family has none; a flag that matches no module is then not an error."""
    config: Any = model.config
    text = config.get_text_config()
    logits = {
        use: next((name for name in names if hasattr(text, name)), None) for use, names in _LOGIT_ATTRIBUTES.items()
    }
    return PatchSpec(
        model_type=config.model_type,
        norm=RMS_NORMS + LAYER_NORMS + GATED_NORMS,
        mlp=(*GATED_MLPS, ExpertsSeam()),
        rope=RopeSeam(),
        head=None,
        logits=LogitAttributes(**logits),
        claims=False,
    )
