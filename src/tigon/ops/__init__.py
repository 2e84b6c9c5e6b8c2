"""The fused ops as public functions, and `OPS`, which maps each op's name to its record.

The records are found in the files of this folder: a file that holds an `Op` adds it.
"""

from __future__ import annotations

import importlib
import pkgutil

from tigon.ops._op import Case, Cost, Op
from tigon.ops.attention_with_sinks import attention_with_sinks
from tigon.ops.causal_conv1d import causal_conv1d
from tigon.ops.expert_operators import ExpertUnit
from tigon.ops.experts import experts
from tigon.ops.gated_delta_rule import gated_delta_rule
from tigon.ops.glu import geglu, swiglu
from tigon.ops.head.cross_entropy import linear_cross_entropy
from tigon.ops.head.divergence import linear_kl
from tigon.ops.head.logprobs import linear_logprobs
from tigon.ops.head.multi_head import multi_head_linear_cross_entropy
from tigon.ops.linear.fp8_linear import fp8_linear
from tigon.ops.linear.lora_linear import lora_linear
from tigon.ops.linear.lora_linears import LoraLayer, lora_linears
from tigon.ops.load_balancing import load_balancing_loss
from tigon.ops.losses.cross_entropy import cross_entropy
from tigon.ops.losses.logprobs import logprobs
from tigon.ops.losses.prepared_targets import prepare_targets
from tigon.ops.losses.results import Logprobs
from tigon.ops.norms.gated_norm import gated_rms_norm
from tigon.ops.norms.layer_norm import layer_norm
from tigon.ops.norms.rms_norm import add_rms_norm, rms_norm
from tigon.ops.rope import rope
from tigon.ops.shared_prefix_attention import PrefixGroup, PrefixRow, shared_prefix_attention
from tigon.ops.topk_sigmoid import topk_sigmoid
from tigon.ops.topk_softmax import topk_softmax
from tigon.ops.vocab_parallel import VocabParallelOptions

# The order of tables and pages. Any other op follows these in alphabetical order.
_ORDER = ("rms_norm", "add_rms_norm", "layer_norm", "rope", "swiglu", "geglu", "cross_entropy", "linear_cross_entropy")
_READS_THE_REGISTRY = "self_test"  # imported after it


def _records() -> list[Op]:
    """The `Op` records of this folder's files, in order."""
    names = [info.name for info in pkgutil.walk_packages(__path__, f"{__name__}.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith(f".{_READS_THE_REGISTRY}")]
    ops = {value.name: value for module in modules for value in vars(module).values() if isinstance(value, Op)}
    places = {name: place for place, name in enumerate(_ORDER)}
    return sorted(ops.values(), key=lambda op: (places.get(op.name, len(places)), op.name))


OPS: dict[str, Op] = {op.name: op for op in _records()}

__all__ = [
    "OPS",
    "Case",
    "Cost",
    "ExpertUnit",
    "Logprobs",
    "LoraLayer",
    "Op",
    "PrefixGroup",
    "PrefixRow",
    "VocabParallelOptions",
    "add_rms_norm",
    "attention_with_sinks",
    "causal_conv1d",
    "cross_entropy",
    "experts",
    "fp8_linear",
    "gated_delta_rule",
    "gated_rms_norm",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_kl",
    "linear_logprobs",
    "load_balancing_loss",
    "logprobs",
    "lora_linear",
    "lora_linears",
    "multi_head_linear_cross_entropy",
    "prepare_targets",
    "rms_norm",
    "rope",
    "shared_prefix_attention",
    "swiglu",
    "topk_sigmoid",
    "topk_softmax",
]
