"""A small Llama with techniques, and the loss and the gradients of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.short_names import settings_of
from tigon import patch
from tigon.techniques import TECHNIQUES
from tigon.techniques.technique import RunInfo

transformers = pytest.importorskip("transformers")


def small_llama(
    keys: Mapping[str, Any] | None = None, *, width: int = 32, kernels: bool = True, device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32, **changes: Any,
) -> Any:  # fmt: skip
    """The model in training mode, with the techniques that recipe keys choose. changes: keys of its config."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 64, "attn_implementation": "sdpa", "use_cache": False,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, **changes})).to(device, dtype).train()
    if kernels:
        patch(model)
    settings = settings_of(keys or {})
    for technique in TECHNIQUES.values():
        if technique.used_by(settings):
            model = technique.model(model, settings, RunInfo())
    return model


def loss_and_gradients(
    model: Any, tokens: int = 40, *, documents: bool = False, backwards: int = 1
) -> dict[str, Tensor]:
    """documents: several in a row. backwards: passes over the graph."""
    vocab = model.config.vocab_size
    ids = torch.randint(0, vocab, (2, tokens), generator=torch.Generator().manual_seed(1)).to(model.device)
    positions = torch.arange(tokens, device=ids.device) % (13 if documents else tokens)
    loss = model(input_ids=ids, labels=ids, position_ids=positions[None].expand(2, -1)).loss
    for number in range(backwards):
        loss.backward(retain_graph=number < backwards - 1)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}
