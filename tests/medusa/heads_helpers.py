"""Small models with heads, and the losses by the definition: logits of each head, sliced and compared by PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.medusa import HeadsSpec, Objective, attach
from tigon.models import MODELS, patch
from tigon.models.kv_cache import CACHE_ARGUMENTS
from tigon.models.verification.tiny import tiny_batch, tiny_model

CPU = torch.device("cpu")
MEDUSA, SHARED = HeadsSpec(count=3, layers=2), HeadsSpec(count=3, shared=True)
MTP = HeadsSpec(kind="mtp", count=2, shared=True)
SPECS = {"separate": MEDUSA, "shared": SHARED, "mtp": MTP}


def with_heads(spec: HeadsSpec, objective: Objective, *, family: str = "llama", fused: bool = True) -> Any:
    """A small model in training mode whose heads are away from their start, where blocks are the identity."""
    model: Any = tiny_model(family, MODELS[family].tiny)
    if fused:
        patch(model)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        heads = attach(model, spec, objective)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def batch(**more: Tensor) -> dict[str, Tensor]:
    return {**tiny_batch(CPU), **more}


def two_documents(tokens: int = 18, first: int = 7) -> Tensor:
    """Positions of rows that hold a document of `first` tokens and another."""
    return torch.cat([torch.arange(first), torch.arange(tokens - first)]).expand(2, -1).contiguous()


def by_definition(
    model: Any, inputs: dict[str, Tensor], objective: Objective, num_items: Tensor | None = None
) -> Tensor:
    """Σ_k c_k · cross entropy of head k's logits at t with the token at t + 1 + k, without tigon's losses."""
    heads, head = model.draft_heads, model.lm_head
    kept: dict[str, Any] = {}
    handle = model.model.layers[-1].register_forward_pre_hook(lambda m, a, k: kept.update(k), with_kwargs=True)
    trunk = {name: inputs[name] for name in ("input_ids", "position_ids") if name in inputs}
    hidden = model.model(**trunk, use_cache=False).last_hidden_state
    handle.remove()
    if objective.stage == 1:
        hidden = hidden.detach()
    logits = []
    if heads.spec.kind == "mtp":
        h = hidden
        for depth, module in enumerate(heads.mtp, start=1):
            ids = torch.cat([inputs["input_ids"][:, depth:], inputs["input_ids"][:, :depth]], dim=1)
            joined = torch.cat([module.enorm(model.model.embed_tokens(ids)), module.hnorm(h)], dim=-1)
            call = {name: value for name, value in kept.items() if name not in (*CACHE_ARGUMENTS, "use_cache")}
            h = module.norm(module.layer(module.eh_proj(joined), **call))
            logits.append(F.linear(h, head.weight))
    else:
        for k in range(heads.spec.count):
            x = hidden
            for block in heads.blocks[k].layers:
                x = x + F.silu(F.linear(x, block.weight, block.bias))
            logits.append(F.linear(x, head.weight if heads.spec.shared else heads.lm_heads[k].weight))
    wanted = [(k, objective.decay**k * objective.coefficient) for k in range(1, heads.spec.count + 1)]
    logits = ([F.linear(hidden, head.weight)] if objective.stage == 2 else []) + logits
    wanted = ([(0, 1.0)] if objective.stage == 2 else []) + wanted
    total = hidden.new_zeros(())
    for (k, factor), z in zip(wanted, logits, strict=True):
        labels = inputs["labels"].clone()
        positions = inputs.get("position_ids")
        for row in range(labels.shape[0]):
            for t in range(labels.shape[1]):
                if positions is not None and t > k and positions[row, t] <= k:  # its predictor is in another document
                    labels[row, t] = -100
        target = labels[:, 1 + k :].reshape(-1)
        if not (target != -100).any():
            continue
        summed = F.cross_entropy(z[:, : -(1 + k)].reshape(-1, z.shape[-1]), target, reduction="sum")
        total = total + factor * summed / ((target != -100).sum() if num_items is None else num_items)
    return total


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
