"""Writes GGUF files with the package `gguf`, for the families whose files transformers reads back.

A family is a row: the name of its architecture, and how llama.cpp stores what transformers stores otherwise. Each
weight is quantised by `gguf` and then replaced in memory by what `gguf` reads from the quantised bytes, so that the
model in memory is what a reader of the file must compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from tigon._install import install_command
from tigon.errors import OptionError, UsageError
from tigon.trained import gguf_k_quants, gguf_tokenizer
from tigon.trainer.guards.nan_guard import first_overflow

FAITHFUL = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
QUANTISED = {"q8_0": "Q8_0", "q4_k_m": "Q4_K", "q4_0": "Q4_0"}
TYPES = {**FAITHFUL, **QUANTISED}
"""The value of `--gguf` -> gguf's name of the type of weight matrices."""
_FILE_TYPES = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "q4_k_m": "MOSTLY_Q4_K_M",
    "q4_0": "MOSTLY_Q4_0",
}
_ENDS = ("token_embd.weight", "output.weight")
"""Stored in 8 bits if the other matrices are Q4_0; llama.cpp stores them in more bits than the rest too."""
_SENSITIVE = re.compile(r"blk\.(\d+)\.(attn_v|ffn_down)\.weight")
"""Q6_K in some layers of a Q4_K_M file, by llama.cpp's rule."""
_UNEVEN = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""What llama.cpp stores instead if rows are no multiple of 256."""


@dataclass(frozen=True)
class Family:
    """How a family's model is stored."""

    architecture: str
    """llama.cpp's name."""
    permutes_heads: bool = False
    """Whether rows of the query and key projections alternate between the halves that the rotary embedding turns."""
    checks: Callable[[Any], str | None] = lambda config: None
    """Why a config of this family cannot be written; None if it can."""


def _no_window(config: Any) -> str | None:
    return "a sliding window, which llama.cpp ignores" if config.use_sliding_window else None


def _no_bias(config: Any) -> str | None:
    return "biases of a llama, which transformers does not read" if config.attention_bias or config.mlp_bias else None


FAMILIES = {
    "llama": Family("llama", permutes_heads=True, checks=_no_bias),
    "qwen2": Family("qwen2", checks=_no_window),
    "qwen3": Family("qwen3", checks=_no_window),
}
"""transformers' model type -> how llama.cpp stores it."""


def covers(config: Any) -> str | None:
    """Why this module cannot write a model; None if it can. config: The model's config."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"the family {config.model_type} (tigon writes {', '.join(FAMILIES)})"
    scaling = _rope(config).get("rope_type", "default")
    if scaling not in ("default", "llama3"):
        return f"the rotary scaling {scaling}"
    return family.checks(config)


def check_package() -> None:
    """Raise OptionError if the package `gguf` is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise OptionError(f"--gguf needs the package gguf, which is not installed: {install_command('gguf')}") from None


@dataclass(frozen=True)
class Stored:
    """What a GGUF file holds that its type does not say."""

    tokenizer: gguf_tokenizer.Vocabulary
    wider: tuple[str, ...]
    """Matrices that are stored as F16, because their rows are not a multiple of 32."""
    uneven: tuple[str, ...]
    """Matrices that are stored as Q5_0 or Q8_0, because their rows are not a multiple of 256."""


def write(model: Any, tokenizer: Any, path: Path, kind: str, *, name: str) -> Stored:
    """Write a model to a GGUF file, and round its weights in memory as the file has them.

    Args:
        model: A model of a family that `covers` accepts.
        tokenizer: Its tokenizer.
        path: The new file.
        kind: A key of `TYPES`.
        name: The name of the model in the file.

    Raises:
        UsageError: The tokenizer has a form that llama.cpp does not know, or a value is too large for the type.
    """
    import gguf

    config, family = model.config, FAMILIES[model.config.model_type]
    vocabulary = gguf_tokenizer.of(tokenizer, config.vocab_size, tuple(_end_ids(model)))
    writer = gguf.GGUFWriter(path, family.architecture)
    writer.add_name(name)
    _add_config(writer, config, gguf)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
    if kind in QUANTISED:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary.add_to(writer)
    tensors = [*_tensors(model, family, gguf), *_rope_factors(model)]
    wanted = {name: _wanted(name, kind, config) for name, weight, _ in tensors if weight.ndim > 1}
    types = {name: _type_of(weight, wanted.get(name, "F32"), gguf) for name, weight, _ in tensors}
    for stored_name, weight, _ in tensors:
        block, block_bytes = gguf.GGML_QUANT_SIZES[types[stored_name]]
        n_bytes, shape = weight.numel() // block * block_bytes, tuple(weight.shape)
        writer.add_tensor_info(stored_name, shape, numpy.dtype(numpy.float32), n_bytes, raw_dtype=types[stored_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for stored_name, weight, convert in tensors:
        writer.write_tensor_data(_rounded(stored_name, weight, convert, types[stored_name], gguf))
    writer.close()
    others = [name for name, first in wanted.items() if types[name].name != first]
    wider = tuple(name for name in others if types[name].name == "F16")
    return Stored(vocabulary, wider, tuple(name for name in others if name not in wider))


# --- config -----------------------------------------------------------------------------------------------------------


def _add_config(writer: Any, config: Any, gguf: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(_rope(config)["rope_theta"]))


def _rope(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _end_ids(model: Any) -> Iterator[int]:
    declared = getattr(model.generation_config, "eos_token_id", None)
    yield from declared if isinstance(declared, list) else [declared] if declared is not None else []


# --- tensors ----------------------------------------------------------------------------------------------------------

_Convert = Callable[[Tensor], Tensor]


def _tensors(model: Any, family: Family, gguf: Any) -> Iterator[tuple[str, Tensor, _Convert]]:
    """(name in the file, parameter, what the file holds of its values) of each weight."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.architecture.upper()], config.num_hidden_layers)
    for name, parameter in model.named_parameters():  # a head tied to the embeddings is left out
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored_name is None:
            raise UsageError(f"--gguf: llama.cpp has no place for {name} in the architecture {family.architecture}")
        yield stored_name, parameter, _conversion(stored_name, config, family)


def _conversion(stored_name: str, config: Any, family: Family) -> _Convert:
    if family.permutes_heads and (".attn_q." in stored_name or ".attn_k." in stored_name):
        heads = config.num_attention_heads if ".attn_q." in stored_name else config.num_key_value_heads
        return lambda weight: weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return lambda weight: weight


def _rope_factors(model: Any) -> Iterator[tuple[str, Tensor, _Convert]]:
    """The factors by which Llama 3's scaling divides the rotary frequencies, which llama.cpp reads as a tensor."""
    rope = _rope(model.config)
    if rope.get("rope_type", "default") == "llama3":
        scaled = model.base_model.rotary_emb.inv_freq.float()
        plain = rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
        yield "rope_freqs.weight", plain / scaled, lambda factors: factors


def _wanted(stored_name: str, kind: str, config: Any) -> str:
    """gguf's name of the type of a matrix, if its rows are a multiple of the type's block."""
    if kind == "q4_0" and stored_name in _ENDS:
        return "Q8_0"
    if kind == "q4_k_m" and _has_6_bits(stored_name, config):
        return "Q6_K"
    return TYPES[kind]


def _has_6_bits(stored_name: str, config: Any) -> bool:
    """Whether a Q4_K_M file of llama.cpp has a matrix in Q6_K."""
    if (sensitive := _SENSITIVE.fullmatch(stored_name)) is None:
        head = "token_embd.weight" if config.tie_word_embeddings else "output.weight"
        return stored_name == head
    layer, n_layers = int(sensitive[1]), int(config.num_hidden_layers)
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def _type_of(weight: Tensor, wanted: str, gguf: Any) -> Any:
    types = gguf.GGMLQuantizationType
    for name in (wanted, _UNEVEN.get(wanted, wanted)):
        if not weight.shape[-1] % gguf.GGML_QUANT_SIZES[types[name]][0]:
            return types[name]
    return types.F16


def _quantised(values: Tensor, chosen: Any, gguf: Any) -> Any:
    """The bytes of values (..., columns) in fp32."""
    if chosen.name in gguf_k_quants.QUANTISERS:
        return gguf_k_quants.quantize(values.numpy(), chosen.name)
    return gguf.quantize(values.numpy(), chosen)


def _rounded(name: str, weight: Tensor, convert: _Convert, chosen: Any, gguf: Any) -> Any:
    """The bytes of a weight in the file. The weight becomes fp32, with the values that a reader finds in them."""
    is_half = chosen == gguf.GGMLQuantizationType.F16
    if is_half and (overflow := first_overflow([(name, weight)], torch.float16)) is not None:
        raise UsageError(f"--gguf: {overflow}; use --gguf bf16 or f32")
    values = weight.detach().float()
    # Blocks lie along rows, so the order of rows and the rounding do not depend on each other.
    bytes_ = _quantised(convert(values).contiguous(), chosen, gguf)
    plain = bytes_ if convert(values) is values else _quantised(values, chosen, gguf)
    weight.data = values
    if chosen != gguf.GGMLQuantizationType.F32:
        weight.data = torch.from_numpy(gguf.dequantize(plain, chosen)).reshape(values.shape)
        if not bool(torch.isfinite(weight.data).all()):
            raise UsageError(f"--gguf: {name} holds values too large for {chosen.name}; use --gguf bf16 or f32")
    return bytes_
