"""Heads in 16 bits on a GPU: no farther from fp32 than PyTorch's own ops, in a fraction of their memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from heads_helpers import SPECS, gradients, with_heads

from tigon.medusa import HeadsSpec, Objective, attach
from tigon.models import patch
from tigon.models.verification.tiny import tiny_batch

pytest.importorskip("transformers")


def off(got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """The distance of all gradients from fp32's, as one vector."""
    apart = sum(float((got[name].float() - t).norm()) ** 2 for name, t in truth.items())
    return float((apart / sum(float(t.norm()) ** 2 for t in truth.values())) ** 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_fused_heads_are_as_accurate_as_plain_losses(kind: str, stage: int, dtype: torch.dtype) -> None:
    objective = Objective(stage=stage)
    inputs = {name: t.cuda() for name, t in tiny_batch(torch.device("cpu"), rows=4, tokens=48).items()}
    found = {}
    for name, fused, of in (("truth", False, torch.float32), ("plain", False, dtype), ("fused", True, dtype)):
        model = with_heads(SPECS[kind], objective, fused=fused).to(device="cuda", dtype=of)
        found[name] = gradients(model, model(**inputs).loss)
    truth = {name: t.float() for name, t in found["truth"].items()}
    assert off(found["fused"], truth) < 2 * off(found["plain"], truth) + 1e-3


@pytest.mark.gpu
def test_heads_on_a_gpu_never_hold_their_logits() -> None:
    """5 heads over 16384 tokens of 32000 words: their logits in fp32 would be 10 GiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
        max_position_embeddings=16384,
    )  # fmt: skip
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM._from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    patch(model)
    attach(model, HeadsSpec(count=5, shared=True), Objective(stage=1))
    ids = torch.randint(0, 32000, (1, 16384), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 2**30
