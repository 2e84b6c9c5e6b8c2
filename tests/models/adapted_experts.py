"""A small mixture with adapters, and one of its steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tigon.techniques import TECHNIQUES
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo

IDS = torch.arange(24).view(2, 12) % 64


def adapted(model: Any, *targets: str) -> Any:
    """Adapters that change the results."""
    settings = Settings.of({"train.precision": "fp32", "lora.rank": 3, "lora.targets": targets})
    wrapped = TECHNIQUES["lora"].model(model, settings, RunInfo())
    torch.manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    return wrapped.train()


def step(model: Any) -> dict[str, torch.Tensor]:
    """The logits and all gradients."""
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.square().sum().backward()
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}
