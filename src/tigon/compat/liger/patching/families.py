"""Names and signatures of Liger's `apply_liger_kernel_to_<family>` functions, as data.

A signature is a line of names in order. "-name" is off by default; "**" takes the flags of the text tower as keywords.
Families that only tigon knows get their signature from their row.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tigon.models import MODELS, PatchSpec

# Liger's flag -> the keyword of tigon.patch.
TIGON_FLAG: Mapping[str, str] = MappingProxyType(
    {
        "rope": "rope",
        "rms_norm": "rms_norm",
        "layer_norm": "layer_norm",
        "swiglu": "mlp",
        "geglu": "mlp",
        "cross_entropy": "cross_entropy",
        "fused_linear_cross_entropy": "linear_cross_entropy",
    }
)

LIGER_FLAGS = frozenset({*TIGON_FLAG, "relu_squared"})
"""Every flag of Liger's functions. tigon lacks a kernel for relu_squared."""

_LOSS = "-cross_entropy fused_linear_cross_entropy"
_STANDARD = f"rope {_LOSS} rms_norm swiglu model"
_NO_ROPE = f"-{_STANDARD}"
_TILL_NORM = f"rope {_LOSS} rms_norm"

# Families -> their signature in Liger 0.8.5 with its defaults, except nemotron's relu_squared. It is on in Liger, and
# tigon lacks a kernel for it.
_LIGER: Mapping[str, str] = MappingProxyType(
    {
        "llama smollm3 ministral mistral mixtral qwen2 qwen3 qwen3_moe qwen2_5_vl qwen3_vl_moe phi3 olmo2 olmo3 "
        "falcon_h1 hunyuan_v1_dense hunyuan_v1_moe exaone4": _STANDARD,
        "glm4 glm4v glm4v_moe qwen3_next qwen3_5 qwen3_5_moe deepseek_v2 deepseek_v3": _NO_ROPE,
        "gemma gemma2 gemma3_text": f"{_TILL_NORM} geglu model",
        "gemma3 paligemma": f"rope {_LOSS} layer_norm rms_norm geglu model",
        "mllama muse_glimmer": f"rope {_LOSS} layer_norm rms_norm swiglu model",
        "gpt_oss qwen3_vl": f"{_TILL_NORM} -swiglu model",
        "internvl smolvlm": f"{_LOSS} rms_norm layer_norm model **",
        "deepseek_v4": f"-{_TILL_NORM} -swiglu model",
        "gemma4_text": f"-{_TILL_NORM} geglu model",
        "gemma4": f"-rope {_LOSS} -layer_norm rms_norm geglu model",
        "granite": "rope cross_entropy -fused_linear_cross_entropy rms_norm swiglu model",
        "llama4": f"{_STANDARD} layer_norm",
        "llava": f"{_LOSS} model **",
        "nemotron": f"-relu_squared {_LOSS} model **",
        "pixtral": "rope rms_norm swiglu model",
        "qwen2_vl": f"{_TILL_NORM} layer_norm swiglu model",
    }
)
_WITH_TEXT_MODEL = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")

# Model types that another family's function accepts too.
_ALSO: Mapping[str, str] = MappingProxyType(
    {
        "llama4_text": "llama4",
        "mllama_text_model": "mllama",
        **{f"{family}_text": family for family in _WITH_TEXT_MODEL},
    }
)


def _of_row(row: PatchSpec) -> str:
    """A signature in Liger's style for a family that only has a row in tigon."""
    has = row.seams
    norms = [flag for flag in ("layer_norm", "rms_norm") if flag in has]
    return " ".join(
        [*(["rope"] if "rope" in has else []), _LOSS, *norms, *(["swiglu"] if "mlp" in has else []), "model"]
    )


SIGNATURES: Mapping[str, str] = MappingProxyType(
    {
        **{model_type: _of_row(row) for model_type, row in MODELS.items() if model_type not in _ALSO},
        **{family: line for families, line in _LIGER.items() for family in families.split()},
    }
)
"""Family -> the signature of its function."""

FAMILIES: Mapping[str, str] = MappingProxyType({**{family: family for family in SIGNATURES}, **_ALSO})
"""Model type -> family."""
