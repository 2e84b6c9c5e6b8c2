"""Small random models of every causal language model of transformers, also of families that are not in the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tigon.models.table import MODELS
from tigon.models.verification.tiny import VOCAB, tiny_batch, tiny_model
from tigon.models.verification.verify import short


def families_without_a_row() -> list[str]:
    """Model types of transformers' causal language models that are not in `MODELS`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(MODELS))


MAX_ELEMENTS = 6_000_000
# Config fields that some families need in addition to the shared sizes, or instead of them; tried in this order.
_TWO_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    _TWO_KINDS,
    {"text_config": _TWO_KINDS},
    {"layer_types": ["full_attention", "linear_attention"]},
    {"layer_types": ["mamba", "attention"]},
    {"layer_types": ["full_attention", "full_attention"]},
    {"layer_types": ["sliding_attention", "full_attention"]},
    {"layers_block_type": ["mamba", "attention"]},
    {"num_hidden_layers": 3},
    {"attn_layer_indices": [1]},
    {"attn_layer_period": 2, "attn_layer_offset": 1},
    {"attention_types": [[["global", "local"], 1]]},
    {"rotary_dim": 4},
    {"num_experts_per_tok": 1},
    {"d_head": 8},
    {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 1},
    {"head_dim": 32},
    {"is_decoder": True},
    {"default_language": "en_XX"},
)
_KDA = {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4}
# The fields of families whose small model needs more of its own; tried before all others.
_SHAPES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _KDA,
    "blenderbot": {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
                   "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": None, "sliding_attention": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}},
    "dbrx": {"d_model": 32, "n_heads": 4, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots3_note": {
        "text_config": {"num_key_value_heads": 4}, "vision_config": {
            "adapter_in_dim": 32, "adapter_out_dim": 32, "num_hidden_layers": 42, "num_local_experts": 4},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8}},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 1,
                     "layer_types": ["sliding_attention", "full_attention"] * 2},
    "inkling2_text": {
        "unpadded_vocab_size": VOCAB, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        "sliding_window_size": 8, "layer_types": ["hybrid_sliding", "hybrid"], "n_layers_per_attn_res_block": 1,
        "rel_extent": 16, "d_rel": 8},
    "kimi_linear": {**_KDA, "linear_head_dim": 8, "linear_num_heads": 4},
    "longcat_flash": {"num_layers": 1, "num_key_value_heads": 4, "zero_expert_num": 2},
    "mpt": {"attn_pdrop": 0, "emb_pdrop": 0, "resid_pdrop": 0, "attn_config": {"attn_pdrop": 0}},
    "phi4_multimodal": {"audio_config": {
        "nemo_conv_channels": 8, "num_blocks": 1, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32}},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 4, "hc_lowrank": 8},
    "roc_bert": {"is_decoder": True, "pronunciation_embed_dim": 8, "pronunciation_vocab_size": VOCAB,
                 "shape_embed_dim": 8, "shape_vocab_size": VOCAB},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
}  # fmt: skip
_LOOP = {"loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2, "loop_gate_rank": 8}
_THREE = {"num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid"]}
_SHAPES["inkling2_loop_text"] = _SHAPES["inkling2_text"] | _THREE | _LOOP
_SHAPES["qwen4_exp"] = {"text_config": _SHAPES["qwen4_exp_text"]}


class NotBuilt(Exception):
    """No small model of a family could be built. The message is the reason."""


def small_model(model_type: str) -> tuple[nn.Module, Mapping[str, Any]]:
    """A small model of a family that can be trained, and the config fields that it needs besides the shared sizes.

    Raises:
        NotBuilt: The shared sizes give no model, or a large one.
    """
    if model_type in MODELS:
        return tiny_model(model_type, MODELS[model_type].tiny), MODELS[model_type].tiny
    failure = ""
    for overrides in (*([_SHAPES[model_type]] if model_type in _SHAPES else []), *_ATTEMPTS):
        try:
            with torch.device("meta"):
                elements = sum(p.numel() for p in tiny_model(model_type, overrides).parameters())
            if elements > MAX_ELEMENTS:
                raise NotBuilt(f"the model of the shared sizes has {elements:,} parameters")
            model = tiny_model(model_type, overrides)
            model(**tiny_batch(torch.device("cpu"))).loss.backward()
            model.zero_grad()
            return model, overrides
        except NotBuilt:
            raise
        except Exception as error:  # a family may need fields that the shared sizes lack, and raise anything
            failure = failure or short(error)
    raise NotBuilt(failure)
