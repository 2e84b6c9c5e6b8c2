"""The model families, one row each. No other file of this package contains model names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tigon.models.seams.head.logits import LogitAttributes
from tigon.models.seams.mlp import ExpertsSeam, GatedMlpSeam
from tigon.models.seams.norm import GatedNormSeam, LayerNormSeam, NormSeam
from tigon.models.seams.rope import RopeSeam
from tigon.models.spec import PatchSpec
from tigon.models.structure import GATED_MLPS, LAYER_NORMS, RMS_NORMS

# --- norms: rounding, offset of the weight, and the name of eps
LLAMA = (NormSeam(),)
FP32_WEIGHT = (NormSeam(casting="fp32"),)
LLAMA4 = (NormSeam(eps="eps"),)
GEMMA = (NormSeam(casting="gemma", offset=1.0, eps="eps"),)
GATED_NORM = (GatedNormSeam(),)
LAYER = (LayerNormSeam(),)
COHERE = (LayerNormSeam(eps="variance_epsilon"),)
NEMOTRON = (LayerNormSeam(offset=1.0),)
# --- MLPs: the names of the projections and of the activation
GATED = (GatedMlpSeam(),)
PACKED = (GatedMlpSeam(packed="gate_up_proj", act="activation_fn"),)
ACTIVATION_FN = (GatedMlpSeam(act="activation_fn"),)
MULTIPLIED = (GatedMlpSeam(gate_scale="gate_multiplier", down_scale="down_multiplier"),)
EXPERTS = (ExpertsSeam(),)
# --- rotary embedding
HALF = RopeSeam(styles=("half-split",))
PAIRS = RopeSeam(styles=("interleaved",))
GLM = RopeSeam(styles=("interleaved-from-halves",))
HALF_TABLES = RopeSeam(styles=("half-tables",))
DEEPSEEK = RopeSeam(styles=("half-split", "pairs-to-halves", "pairs-to-halves-whole-tables"))
COMPLEX = RopeSeam(styles=("interleaved-half-tables",))
# --- scaling and capping of the logits
CAPPED = LogitAttributes(softcap="final_logit_softcapping")
DIVIDED = LogitAttributes(divide="logits_scaling")

_NO_GATE = MappingProxyType({"mlp": "it has no gate; an activation alone is not worth a kernel"})
_VISION = MappingProxyType({"vision MLP": "it has no gate"})

_ROWS = (
    # Llama 2 to 3.2. The rope scaling types (llama3, linear, dynamic, yarn) only change cos and sin.
    PatchSpec(model_type="llama", norm=LLAMA, mlp=GATED, rope=HALF),
    PatchSpec(model_type="mistral", norm=LLAMA, mlp=GATED, rope=HALF, tiny={"sliding_window": 8}),
    PatchSpec(model_type="ministral", norm=LLAMA, mlp=GATED, rope=HALF),
    PatchSpec(model_type="ministral3", norm=LLAMA, mlp=GATED, rope=HALF),
    PatchSpec(model_type="mixtral", norm=LLAMA, mlp=EXPERTS, rope=HALF),
    PatchSpec(model_type="gemma", norm=GEMMA, mlp=GATED, rope=HALF),
    PatchSpec(
        model_type="gemma2", norm=GEMMA, mlp=GATED, rope=HALF, logits=CAPPED,
        tiny={"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "sliding_window": 8},
    ),
    PatchSpec(
        model_type="gemma3_text", norm=GEMMA, mlp=GATED, rope=HALF, logits=CAPPED,
        tiny={"layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 3.0},
    ),
    PatchSpec(model_type="qwen2", norm=LLAMA, mlp=GATED, rope=HALF),
    PatchSpec(
        model_type="qwen2_moe", norm=LLAMA, mlp=GATED + EXPERTS, rope=HALF,
        tiny={"mlp_only_layers": [0]},
    ),
    PatchSpec(model_type="qwen3", norm=LLAMA, mlp=GATED, rope=HALF),
    PatchSpec(
        model_type="qwen3_moe", norm=LLAMA, mlp=GATED + EXPERTS, rope=HALF,
        tiny={"mlp_only_layers": [0]},
    ),
    PatchSpec(
        model_type="qwen3_next", norm=GEMMA + GATED_NORM, mlp=GATED + EXPERTS, rope=HALF,
        tiny={"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 32},
    ),
    PatchSpec(model_type="phi3", norm=LLAMA, mlp=PACKED, rope=HALF),
    PatchSpec(
        model_type="granite", norm=LLAMA, mlp=GATED, rope=HALF, logits=DIVIDED,
        tiny={"logits_scaling": 3.0, "residual_multiplier": 0.7, "embedding_multiplier": 2.0},
    ),
    PatchSpec(
        model_type="granitemoe", norm=LLAMA, mlp=EXPERTS, rope=HALF, logits=DIVIDED,
        tiny={"logits_scaling": 3.0},
    ),
    PatchSpec(model_type="olmo2", norm=FP32_WEIGHT, mlp=GATED, rope=HALF),
    PatchSpec(model_type="olmo3", norm=FP32_WEIGHT, mlp=GATED, rope=HALF),
    PatchSpec(model_type="glm4", norm=LLAMA, mlp=PACKED, rope=GLM),
    PatchSpec(model_type="smollm3", norm=LLAMA, mlp=GATED, rope=HALF),
    PatchSpec(model_type="exaone4", norm=LLAMA, mlp=GATED, rope=HALF),
    PatchSpec(
        model_type="cohere", norm=COHERE, mlp=GATED, rope=PAIRS, logits=LogitAttributes(multiply="logit_scale"),
        tiny={"logit_scale": 0.5},
    ),
    PatchSpec(
        model_type="cohere2", norm=COHERE, mlp=GATED, rope=PAIRS, logits=LogitAttributes(multiply="logit_scale"),
        tiny={"logit_scale": 0.5, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    ),
    PatchSpec(model_type="starcoder2", norm=LAYER, rope=HALF, keep=_NO_GATE),
    PatchSpec(model_type="stablelm", norm=LAYER, mlp=GATED, rope=HALF),
    PatchSpec(model_type="gpt2", norm=LAYER, keep=_NO_GATE),
    PatchSpec(model_type="gpt_neox", norm=LAYER, rope=HALF, keep=_NO_GATE),
    PatchSpec(model_type="nemotron", norm=NEMOTRON, rope=HALF, keep=_NO_GATE),
    PatchSpec(
        model_type="gpt_oss", norm=FP32_WEIGHT, rope=HALF_TABLES,
        keep={"mlp": "its experts clamp gate and up, alternate them by column and add 1 to up; experts runs them"},
    ),
    PatchSpec(model_type="llama4_text", norm=LLAMA4, mlp=ACTIVATION_FN, rope=COMPLEX),
    PatchSpec(model_type="deepseek_v2", norm=LLAMA, mlp=GATED + EXPERTS, rope=COMPLEX, tiny={"num_key_value_heads": 4}),
    PatchSpec(
        model_type="deepseek_v3", norm=LLAMA, mlp=GATED + EXPERTS, rope=DEEPSEEK, tiny={"num_key_value_heads": 4},
    ),
    PatchSpec(
        model_type="falcon_h1", norm=LLAMA + GATED_NORM, mlp=MULTIPLIED, rope=HALF,
        logits=LogitAttributes(multiply="lm_head_multiplier"),
        tiny={"lm_head_multiplier": 0.7, "mlp_multipliers": [0.8, 0.6], "key_multiplier": 0.9},
    ),
    PatchSpec(model_type="hunyuan_v1_dense", norm=LLAMA, mlp=GATED, rope=HALF),
    # Vision and text. The towers of llava may be of any family, so its row lists every seam.
    PatchSpec(
        model_type="llava", norm=RMS_NORMS + LAYER_NORMS, mlp=GATED_MLPS, rope=RopeSeam(),
        keep=MappingProxyType({"MLP of a CLIP tower": "it has no gate"}), towers_of_any_family=True,
    ),
    PatchSpec(
        model_type="qwen2_5_vl", norm=LLAMA, mlp=GATED, rope=HALF,
        tiny={
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
        },
    ),
    PatchSpec(model_type="gemma3", norm=GEMMA + LAYER, mlp=GATED, rope=HALF, keep=_VISION),
    PatchSpec(model_type="mllama", norm=LLAMA + LAYER, mlp=GATED, rope=HALF, keep=_VISION),
)  # fmt: skip

MODELS: Mapping[str, PatchSpec] = MappingProxyType({row.model_type: row for row in _ROWS})
