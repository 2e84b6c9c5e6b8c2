"""tigon: fused training kernels, a reversible patcher and a trainer for Hugging Face language models.

Importing this package imports neither transformers nor triton; each comes with the first call that needs it.
"""

from __future__ import annotations

from tigon import errors, losses, nn
from tigon.models import AutoModelForCausalLM, PatchReport, patch
from tigon.ops import (
    add_rms_norm,
    cross_entropy,
    geglu,
    layer_norm,
    linear_cross_entropy,
    linear_kl,
    linear_logprobs,
    logprobs,
    lora_linear,
    multi_head_linear_cross_entropy,
    prepare_targets,
    rms_norm,
    rope,
    swiglu,
)

__version__ = "0.1.0"

__all__ = [
    "AutoModelForCausalLM",
    "PatchReport",
    "__version__",
    "add_rms_norm",
    "cross_entropy",
    "errors",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_kl",
    "linear_logprobs",
    "logprobs",
    "lora_linear",
    "losses",
    "multi_head_linear_cross_entropy",
    "nn",
    "patch",
    "prepare_targets",
    "rms_norm",
    "rope",
    "swiglu",
]
