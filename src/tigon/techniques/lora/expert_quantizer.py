"""4-bit weights of experts: the quantiser of transformers and bitsandbytes, extended to three-dimensional weights.

transformers converts linear layers alone, so that nearly all of a mixture would stay in 16 bits. bitsandbytes has a
parametrization for other weights. Here each weight of experts is quantised when it has been read, before the next one
is, so that the experts are never whole in 16 bits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from tigon.techniques.lora.adapter_targets import expert_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_METHOD = "tigon_bitsandbytes_4bit"


def config(compute_dtype: torch.dtype, through: str | None = None) -> BitsAndBytesConfig:
    """The quantisation config for `from_pretrained`: NF4 with double quantisation, experts included.

    through: the device that quantises weights which stay on the CPU; None: their own device.
    """
    AUTO_QUANTIZER_MAPPING.setdefault(_METHOD, ExpertsQuantizer)
    made = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )
    made.quant_method = _METHOD
    made.through = through
    return made


class ExpertsQuantizer(Bnb4BitHfQuantizer):  # type: ignore[misc]
    """Quantises experts too, and leaves a model behind that looks like one of `Bnb4BitHfQuantizer`."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, device_map: object, **kwargs: object
    ) -> None:
        self.expert_states: dict[str, Any] = dict.fromkeys(expert_parameters(model))
        self.through: str | None = self.quantization_config.through
        del self.quantization_config.through  # it is no part of the model's config
        super()._process_model_before_weight_loading(model, device_map, **kwargs)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.expert_states or super().param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self) -> Any:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> PreTrainedModel:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit_prequantized  # type: ignore[import-not-found]

        for path, state in self.expert_states.items():
            module_path, _, name = path.rpartition(".")
            module = model.get_submodule(module_path)
            stored = getattr(module, name)
            replace_parameter_4bit_prequantized(module, name, state.as_dict(packed=True), stored.device)
            module.register_state_dict_post_hook(partial(_name_as_parameter, name))
        self.quantization_config.quant_method = BitsAndBytesConfig(load_in_4bit=True).quant_method
        model.quantization_method = self.quantization_config.quant_method
        return super()._process_model_after_weight_loading(model, **kwargs)


class _Quantize(Bnb4bitQuantize):  # type: ignore[misc]
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        from bitsandbytes.functional import quantize_4bit  # type: ignore[import-not-found]

        quantizer, linear, experts = self.hf_quantizer, {}, {}
        settings = quantizer.quantization_config
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            home = weight.device
            if quantizer.through is not None:
                weight = weight.to(quantizer.through)
            if name not in quantizer.expert_states:
                linear[name] = weight
                continue
            packed, state = quantize_4bit(
                weight.contiguous(),
                compress_statistics=settings.bnb_4bit_use_double_quant,
                quant_type=settings.bnb_4bit_quant_type,
            )
            state.dtype = settings.bnb_4bit_compute_dtype  # that of the products; a checkpoint may be in fp32
            state.to(home)
            quantizer.expert_states[name] = state
            experts[name] = nn.Parameter(packed.to(home), requires_grad=False)
        made: dict[str, Any] = super().convert(linear, **kwargs) if linear else {}
        if quantizer.through is not None:
            made = {name: one.to(home) for name, one in made.items()}
        return {**experts, **made}


def _name_as_parameter(name: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Undo bitsandbytes' renaming in a state dict: PyTorch looks each name up, which would dequantise the weight."""
    renamed = f"{prefix}{name}"
    if renamed in state:
        state[f"{prefix}parametrizations.{name}.original"] = state.pop(renamed)
        for key in [key for key in state if key.startswith(f"{renamed}.")]:
            del state[key]
