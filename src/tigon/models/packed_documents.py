"""Keeps the documents of a packed sample apart in families whose own code does not.

A packed batch has positions that restart at each document. With them, transformers makes a mask of blocks for sdpa and
eager attention. Five kinds of families do something else (transformers 5.24):

- Some make their mask without the positions (Falcon before 5.24). They get the mask ready made.
- Models of text and images have three positions per token, and read documents from a fourth row only.
- Some number the tokens of the whole sample themselves. They are refused.
- Linear attention, state-space layers and convolutions carry a state from one document to the next, which no mask
  stops. The layers of `STATES_APART` begin anew at each document (`seams/documents.py`). The others are refused.
- Decoders of translation models, and encoders such as BERT that serve as decoders, read no documents from the
  positions. They are refused too.

trainer/guards/document_mixing.py compares losses in each run, and refuses the families that this file does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tigon._trunk import language_model, trunk_of
from tigon.models import hybrid_layers
from tigon.models.hybrid_layers import LayerKind
from tigon.models.kv_cache import cache_in
from tigon.models.seams.base import Change
from tigon.models.seams.documents import SEQ_IDX, DocumentsSeam, document_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MASK_WITHOUT_POSITIONS = frozenset({"afmoe", "biogpt", "falcon", "gpt_oss", "granitemoehybrid", "xglm"})
COUNT_THEIR_OWN_POSITIONS = frozenset({"bloom", "mpt", "opt"})
_MIXING = (
    "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert cpmant data2vec-text "
    "electra ernie marian mbart megatron-bert mvp openai-gpt pegasus plbart prophetnet rembert roc_bert roberta "
    "roberta-prelayernorm roformer trocr xlm-roberta xlm-roberta-xl xlnet xmod"
)
MIX_DOCUMENTS = frozenset(_MIXING.split())
RECURRENT = frozenset({"rwkv", "xlstm"})
_STATES_APART = (
    "bailing_hybrid bamba falcon_h1 granitemoehybrid kimi_linear lara_mini lfm2 lfm2_moe lfm3 nemotron_h olmo_hybrid "
    "qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text zamba zamba2"
)
STATES_APART = frozenset(_STATES_APART.split())
"""Hybrid families whose code hands its arguments to the layers with a state."""
FIRST_RELEASE = "5.17"
"""The first transformers whose code does so in each of these families."""
FOUR_ROWS = frozenset({"qwen2_vl", "qwen2_5_vl"})
_LAYERS_THAT_FORGET = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_STATE_KEYS = ("mamba_d_state", "mamba_d_conv", "state_size", "ssm_state_size", "conv_kernel_size", "lru_width")
WINDOW = "sliding_attention"


def objection(config: PreTrainedConfig) -> str | None:
    """Why a model of this config mixes the documents of a packed sample, or None."""
    text = config.get_text_config()
    if text.model_type in COUNT_THEIR_OWN_POSITIONS:
        return f"{text.model_type} numbers the tokens of a whole sample itself"
    if text.model_type in MIX_DOCUMENTS:
        return f"the attention of {text.model_type} does not read where documents begin"
    if text.model_type in RECURRENT:
        return f"the recurrent layers of {text.model_type} carry a state from one document to the next"
    if text.model_type in STATES_APART:
        return None if _hands_arguments_down() else f"keeping its documents apart needs transformers {FIRST_RELEASE}"
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _LAYERS_THAT_FORGET:
            return f"its layers of type {kind} carry a state from one document to the next"
    if any(getattr(text, key, None) for key in _STATE_KEYS):
        return "its state-space layers carry a state from one document to the next"
    return None


def has_states(config: PreTrainedConfig) -> bool:
    """Whether a model of this config keeps documents apart in layers with a state."""
    return config.get_text_config().model_type in STATES_APART and _hands_arguments_down()


def keep_apart(model: PreTrainedModel) -> Callable[[], None]:
    """Let the model's forward keep the documents of packed samples apart. Returns a function that undoes it.

    model: a transformers model, before wrappers, with sdpa or eager attention.
    """
    undo = [states_apart(model)]
    if model.config.model_type in FOUR_ROWS:
        trunk = trunk_of(model)
        undo.append(_hooked(getattr(trunk, "language_model", trunk), _with_four_rows))
    if model.config.model_type in MASK_WITHOUT_POSITIONS:
        undo.append(_hooked(trunk_of(model), _with_mask))

    def undo_all() -> None:
        for each in undo:
            each()

    return undo_all


def states_apart(model: PreTrainedModel) -> Callable[[], None]:
    """Let the layers with a state begin anew at each document, if the family can; with any attention."""
    if not has_states(model.config):
        return lambda: None
    changes = [Change(path, module, _documents_seam(runs)) for path, module, runs in hybrid_layers.runs_of(model)]
    for change in changes:
        change.apply()
    remove = _hooked(language_model(model), _with_document_numbers)

    def undo() -> None:
        remove()
        for change in changes:
            change.revert()

    return undo


def _documents_seam(runs: Mapping[LayerKind, str]) -> DocumentsSeam:
    """The seam of a layer whose parts of each kind are run by a library or by PyTorch."""
    once = hybrid_layers.takes_documents({kind.name: what for kind, what in runs.items()})
    bounds = next((kind.bounds for kind in runs if once and kind.bounds), "")
    convolves = once and runs.get(hybrid_layers.CONVOLUTION) == hybrid_layers.PYTORCH
    return DocumentsSeam(once, bounds, convolves)


def _hands_arguments_down() -> bool:
    import transformers
    from packaging.version import Version

    return Version(transformers.__version__) >= Version(FIRST_RELEASE)


def _hooked(module: nn.Module, hook: Callable[..., Any]) -> Callable[[], None]:
    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def _with_four_rows(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions_BT = kwargs.get("position_ids")
    if positions_BT is None or positions_BT.ndim != 2:
        return args, kwargs
    return args, {**kwargs, "position_ids": positions_BT[None].expand(4, -1, -1)}


def _with_document_numbers(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions_BT = kwargs.get("position_ids")
    if positions_BT is None or positions_BT.ndim != 2 or cache_in(kwargs) is not None:
        return args, kwargs
    seq_idx = document_numbers(positions_BT.expand(_shape(kwargs)))
    return args, kwargs if seq_idx is None else {**kwargs, SEQ_IDX: seq_idx}


def _with_mask(module: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions_BT = kwargs.get("position_ids")
    if positions_BT is None or kwargs.get("attention_mask") is not None or cache_in(kwargs) is not None:
        return args, kwargs
    config = module.config.get_text_config()
    if (rows_of := getattr(module, "_tigon_causal_rows", None)) is not None:  # seams/attention_sinks.py
        rows = rows_of(positions_BT.expand(_shape(kwargs)))
        layers = getattr(config, "layer_types", None) or ("full_attention",)
        return args, {**kwargs, "attention_mask": dict.fromkeys(layers, rows)}
    masks = _masks(positions_BT, getattr(config, "sliding_window", None), module.dtype)
    kinds = {*(getattr(config, "layer_types", None) or ())}
    mask = {kind: masks.get(kind) for kind in kinds} if kinds - {"full_attention"} else masks["full_attention"]
    return args, {**kwargs, "attention_mask": mask}


def _shape(kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """(B, T) of a forward's tokens."""
    tokens = kwargs.get("input_ids")
    shape = (kwargs["inputs_embeds"] if tokens is None else tokens).shape
    return int(shape[0]), int(shape[1])


def _masks(positions_BT: Tensor, window: int | None, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Masks (B, 1, T, T) that are added to the scores, for layers with and without a window."""
    T = positions_BT.shape[1]
    document_BT = (positions_BT.diff(dim=1, prepend=positions_BT[:, :1] - 1) != 1).cumsum(dim=1)
    place = torch.arange(T, device=positions_BT.device)
    behind_TT = place[:, None] - place[None, :]
    sees_BTT = (document_BT[:, :, None] == document_BT[:, None, :]) & (behind_TT >= 0)
    masks = {"full_attention": sees_BTT}
    if window is not None:
        masks[WINDOW] = sees_BTT & (behind_TT < window)
    lowest = torch.finfo(dtype).min
    return {
        kind: torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, lowest)[:, None]
        for kind, sees in masks.items()
    }
