"""Weights in 4 and 8 bits: the grids, and how a weight is rounded to them. Training and export both round here.

The grids are those of compressed-tensors, whose files vLLM and transformers read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon._trunk import language_model

# R rows, G groups of a row, E elements of a group.

GROUPS = (128, 64, 32)
"""Elements that share a scale in int4, best for speed first. vLLM's kernels have these."""
FP8_MAX = 448.0
_MXFP4_GROUP, _MXFP4_MAX = 32, 6.0
_IN_LAYER = re.compile(r"\.\d+\.")
_LEAST_EXPONENT = -126  # a scale of 2**-127 would be subnormal in bf16 and fp32


@dataclass(frozen=True)
class Codes:
    """A weight on a grid: values times scales."""

    values_RGE: Tensor
    """The numbers that the format stores, in fp32."""
    scales_RG: Tensor
    """In the weight's dtype, as the format stores them."""

    def weight(self) -> Tensor:
        """The weight that a reader computes with, in the dtype of the scales."""
        scales = self.scales_RG.float().unsqueeze(-1)
        return (self.values_RGE * scales).flatten(1).to(self.scales_RG.dtype)


@dataclass(frozen=True)
class WeightFormat:
    """A format of `train.qat` and `tigon export --format`."""

    name: str
    groups: tuple[int, ...]
    """Elements of a row that may share a scale, best first; empty: the row has one scale."""
    scale: Callable[[Tensor], Tensor]
    """The largest magnitude of each group in fp32 -> its scale."""
    grid: Callable[[Tensor], Tensor]
    """Rounds a weight that is divided by its scale."""
    pack: Callable[[Codes], dict[str, Tensor]]
    """The tensors of one layer in a file, by the ends of their names."""
    scheme: Mapping[str, Any]
    """The `weights` of compressed-tensors' config."""
    file_format: str
    """compressed-tensors' name of the way in which a file stores it."""
    rounds_inputs: bool = False
    """Whether a layer's input is rounded to FP8 too, with one scale per token."""

    def codes(self, weight: Tensor, group: int | None) -> Codes:
        """The weight on the grid.

        Args:
            weight: (rows, columns), fp32, bf16 or fp16.
            group: Elements that share a scale; None: a row.
        """
        w_RGE = weight.float().unflatten(1, (-1, group or weight.shape[1]))
        scales_RG = self.scale(w_RGE.abs().amax(-1)).to(weight.dtype)
        tiny = torch.finfo(weight.dtype).tiny
        scales_RG = torch.where(scales_RG < tiny, tiny, scales_RG)
        return Codes(self.grid(w_RGE / scales_RG.float().unsqueeze(-1)), scales_RG)

    def config(self, group: int | None, ignored: list[str]) -> dict[str, Any]:
        """The `quantization_config` of a model's config.json. ignored: the linear layers that are not rounded."""
        weights = {"dynamic": False, "symmetric": True, **self.scheme, **({"group_size": group} if group else {})}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": self.file_format,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": inputs if self.rounds_inputs else None,
                }
            },
            "ignore": ignored,
        }


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Path -> the linear layers that are rounded: those of the text's decoder layers, so no tower, head or adapter."""
    trunk = language_model(_without_adapters(model))
    in_text = {id(module) for path, module in trunk.named_modules() if _IN_LAYER.search(f".{path}")}
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in in_text and ".lora_" not in path
    }


def _without_adapters(model: Any) -> Any:
    """The model inside PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def rounded_layers(model: nn.Module, chosen: WeightFormat) -> tuple[dict[str, nn.Linear], int | None]:
    """The `linear_layers`, and the elements that share a scale.

    Raises:
        ValueError: The model has experts, no linear layers, or rows that the format does not divide. The message is
            the end of a sentence.
    """
    layers, family = linear_layers(model), _without_adapters(model).config.model_type
    if not layers:
        raise ValueError(f"{family} has no linear layers in its decoder")
    if any(path.endswith(".experts") for path, _ in model.named_modules()):
        raise ValueError(f"{family} has experts, whose weights are no linear layers")
    return layers, group_of(layers, chosen)


def group_of(layers: Mapping[str, nn.Linear], chosen: WeightFormat) -> int | None:
    """The elements that share a scale: the first of the format's groups that divides the rows of all layers.

    Raises:
        ValueError: No group does. The message names the layer, as the end of a sentence.
    """
    widths = {name: layer.in_features for name, layer in layers.items()}
    for group in chosen.groups:
        if not any(width % group for width in widths.values()):
            return group
    if not chosen.groups:
        return None
    least = chosen.groups[-1]
    name, width = next((name, width) for name, width in widths.items() if width % least)
    raise ValueError(f"a row of {name} has {width} elements, and {chosen.name} needs a multiple of {least} (fp8 of 1)")


def rounded_input(x: Tensor) -> Tensor:
    """x in FP8 with one scale per token, as a server rounds the input of an FP8 layer."""
    scale = (x.float().abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (_fp8(x.float() / scale) * scale).to(x.dtype)


def _fp8(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def _int4(x: Tensor) -> Tensor:
    return x.round().clamp(-8, 7) + 0.0  # an integer has no -0


def _mxfp4(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with either sign; halves to the even code."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round() * step).clamp(max=_MXFP4_MAX).copysign(x)


def _power_of_two(largest: Tensor) -> Tensor:
    """The scale of a group in MXFP4. From 1.75 on, a mantissa counts as 2, so that 7 does not become 6."""
    mantissa, exponent = torch.frexp(largest)  # in [0.5, 1)
    exponent = exponent - 1 + (mantissa >= 0.875) - 2
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(min=_LEAST_EXPONENT))


def _pack_int4(codes: Codes) -> dict[str, Tensor]:
    """Eight numbers per int32, the first in the lowest bits, with 8 added."""
    q = codes.values_RGE.flatten(1)
    nibbles = (q.to(torch.int64) + 8).unflatten(1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8, device=q.device))).sum(-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {"weight_packed": packed, "weight_scale": codes.scales_RG, "weight_shape": torch.tensor(q.shape)}


def _pack_fp8(codes: Codes) -> dict[str, Tensor]:
    return {"weight": codes.values_RGE.flatten(1).to(torch.float8_e4m3fn), "weight_scale": codes.scales_RG}


def _pack_mxfp4(codes: Codes) -> dict[str, Tensor]:
    """Two numbers per byte, the first in the lower half; a scale as the exponent plus 127."""
    q = codes.values_RGE.flatten(1)
    size = q.abs()
    index = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4)).to(torch.uint8)
    index |= torch.signbit(q).to(torch.uint8) << 3
    exponents = torch.frexp(codes.scales_RG.float())[1] - 1 + 127
    return {"weight_packed": index[:, ::2] | index[:, 1::2] << 4, "weight_scale": exponents.to(torch.uint8)}


FORMATS: Mapping[str, WeightFormat] = {
    one.name: one
    for one in (
        WeightFormat(
            name="fp8",
            groups=(),
            scale=lambda largest: largest / FP8_MAX,
            grid=_fp8,
            pack=_pack_fp8,
            scheme={"num_bits": 8, "type": "float", "strategy": "channel"},
            file_format="float-quantized",
            rounds_inputs=True,
        ),
        WeightFormat(
            name="int4",
            groups=GROUPS,
            scale=lambda largest: largest / 7.5,
            grid=_int4,
            pack=_pack_int4,
            scheme={"num_bits": 4, "type": "int", "strategy": "group"},
            file_format="pack-quantized",
        ),
        WeightFormat(
            name="mxfp4",
            groups=(_MXFP4_GROUP,),
            scale=_power_of_two,
            grid=_mxfp4,
            pack=_pack_mxfp4,
            scheme={
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "scale_dtype": "torch.uint8",
                "zp_dtype": "torch.uint8",
            },
            file_format="mxfp4-pack-quantized",
        ),
    )
}
