"""Experts that a checkpoint stores in MXFP4 and a run keeps so, as `openai/gpt-oss-20b` does.

transformers runs such experts with kernels without a backward, or makes them dense when it reads them. Here the stored
bytes become the parameters. torch makes a dense weight whenever one is read, and tigon's op reads one at a time.

    name_blocks (E, outputs, inputs / 32, 16)     two weights per byte
    name_scales (E, outputs, inputs / 32)         exponents of two
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config, QuantizationConfigMixin

from tigon.ops.linear.mxfp4 import BLOCK, CODE, mxfp4_weight
from tigon.techniques.lora.adapter_targets import expert_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_METHOD = "tigon_mxfp4"


class KeptMxfp4Config(QuantizationConfigMixin):  # type: ignore[misc]
    """The quantisation config of a model whose experts stay in MXFP4. compute_dtype: that of dense weights."""

    def __init__(self, compute_dtype: str = "bfloat16", **_: object) -> None:
        self.quant_method = _METHOD
        self.compute_dtype = compute_dtype


class Mxfp4Parametrization(nn.Module):
    """The dense weight of the layout (experts, inputs, outputs), from its bytes. It is a view of the stored layout."""

    code: Tensor
    scales: Tensor

    def __init__(self, scales: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("code", torch.tensor(CODE, device=scales.device))
        self.register_buffer("scales", scales)
        experts, outputs, blocks = scales.shape
        self.quant_state = SimpleNamespace(shape=(experts, BLOCK * blocks, outputs), dtype=dtype, absmax=scales)
        """The names are those of bitsandbytes' weights, which `four_bit_weights` reads."""

    def forward(self, packed: Tensor) -> Tensor:
        return mxfp4_weight(self.code, packed.view(torch.uint8), self.scales, self.quant_state.dtype).transpose(1, 2)  # type: ignore[no-any-return]


class KeepingQuantizer(HfQuantizer):  # type: ignore[misc]
    """Lets transformers read the stored bytes into parameters, and makes them weights of the experts."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> None:
        self.paths = list(expert_parameters(model))
        for path in self.paths:
            module_path, _, name = path.rpartition(".")
            module = model.get_submodule(module_path)
            experts, inputs, outputs = getattr(module, name).shape
            if inputs % BLOCK:
                raise ValueError(f"{path} has {inputs} inputs, and MXFP4 stores blocks of {BLOCK}")
            shape = (experts, outputs, inputs // BLOCK)
            delattr(module, name)
            module._is_hf_initialized = True  # transformers would draw the weight that is gone
            for part, of in (("blocks", (*shape, BLOCK // 2)), ("scales", shape)):
                empty = torch.empty(of, dtype=torch.uint8, device="meta")
                module.register_parameter(f"{name}_{part}", nn.Parameter(empty, requires_grad=False))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> PreTrainedModel:
        dtype: torch.dtype = getattr(torch, self.quantization_config.compute_dtype)
        for path in self.paths:
            module_path, _, name = path.rpartition(".")
            module = model.get_submodule(module_path)
            packed, scales = getattr(module, f"{name}_blocks"), getattr(module, f"{name}_scales")
            delattr(module, f"{name}_blocks")
            delattr(module, f"{name}_scales")
            module.register_parameter(name, packed)
            register_parametrization(module, name, Mxfp4Parametrization(scales.data, dtype), unsafe=True)
        return model

    @property
    def is_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return False


def quant_method_of(model_config: PreTrainedConfig) -> str | None:
    """The `quant_method` of the checkpoint of this config; None if its weights are not quantised."""
    stored = getattr(model_config, "quantization_config", None) or {}
    method = stored.get("quant_method") if isinstance(stored, Mapping) else getattr(stored, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def is_stored(model_config: PreTrainedConfig) -> bool:
    """Whether the checkpoint of this config stores its experts in MXFP4."""
    return quant_method_of(model_config) == "mxfp4"


def dense_reading() -> dict[str, Any]:
    """Options of from_pretrained that make such experts dense."""
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def forget_stored_names(model: PreTrainedModel) -> None:
    """Let a model that was made dense be saved by the names of dense weights.

    transformers 5.23 would save dense experts by the names of the stored bytes, which no program can read.
    """
    steps = getattr(model, "_weight_conversions", None)
    if steps:
        model._weight_conversions = [
            step for step in steps if not any("_blocks" in name for name in getattr(step, "source_patterns", ()))
        ]


def config(compute_dtype: torch.dtype) -> KeptMxfp4Config:
    """The quantisation config for `with_config`."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(_METHOD, KeptMxfp4Config)
    AUTO_QUANTIZER_MAPPING.setdefault(_METHOD, KeepingQuantizer)
    return KeptMxfp4Config(str(compute_dtype).removeprefix("torch."))


def with_config(model_config: PreTrainedConfig, kept: KeptMxfp4Config) -> Any:
    """A copy of the model's config that names this quantiser instead of the checkpoint's own.

    transformers lets the config of the checkpoint decide, so that an argument of `from_pretrained` would not count.
    """
    changed = copy.deepcopy(model_config)
    changed.quantization_config = kept.to_dict()
    return changed
