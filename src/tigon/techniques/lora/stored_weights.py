"""Checkpoints whose files hold quantised weights, as `quantization_config` in their config.json says.

Those in `AS_DENSE` are read in 16 bits or fp32: their own layers need kernels of the hub or round their inputs, and the
weights get no gradient.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tigon._install import install_command
from tigon.techniques.lora.mxfp4_experts import quant_method_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BITSANDBYTES, MXFP4 = "bitsandbytes", "mxfp4"
FP8, COMPRESSED = "fp8", "compressed-tensors"
AS_DENSE: Mapping[str, str] = {FP8: "in FP8", COMPRESSED: "in the format of compressed-tensors"}
"""`quant_method` -> words for a checkpoint that is read as dense weights."""
KNOWN = (BITSANDBYTES, MXFP4, *AS_DENSE)
"""Values of `quant_method` in the config of a checkpoint that tigon trains."""


def of(config: PreTrainedConfig) -> dict[str, Any]:
    """`quantization_config` as a mapping; empty if the weights are not quantised."""
    stored = getattr(config, "quantization_config", None) or {}
    return dict(stored) if isinstance(stored, Mapping) else dict(stored.to_dict())


def unreadable(method: str) -> str | None:
    """What is missing here to make dense weights of a checkpoint; None if nothing is."""
    if method != COMPRESSED:
        return None
    if importlib.util.find_spec("compressed_tensors") is None:
        return f"compressed-tensors is not installed here: {install_command('compressed')}"
    from transformers import CompressedTensorsConfig  # loads transformers

    if "dequantize" not in inspect.signature(CompressedTensorsConfig.__init__).parameters:
        installed = importlib.metadata.version("transformers")
        return f"transformers {installed} makes no dense weights of it; install a newer one"
    return None


def dense_reading(config: PreTrainedConfig) -> dict[str, Any]:
    """Options of from_pretrained that read such a checkpoint as dense weights; empty for any other."""
    from transformers import FineGrainedFP8Config  # loads transformers

    method = quant_method_of(config)
    if method == FP8:
        return {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    if method == COMPRESSED:  # transformers lets the checkpoint's config decide
        changed = copy.deepcopy(config)
        changed.quantization_config = {**of(config), "dequantize": True}
        return {"config": changed}
    return {}
