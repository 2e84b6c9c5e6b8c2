"""A limit for the memory of the fused loss: it reaches the op and the plan, and the loss stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tigon
from tigon.models.verification.tiny import tiny_batch, tiny_model
from tigon.ops.head import chunks
from tigon.planner.estimate import estimate
from tigon.planner.gpus import find_gpu
from tigon.planner.request import Request
from tigon.techniques import TECHNIQUES
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo

pytest.importorskip("transformers")


def limited(memory_mib: int) -> Any:
    model = tiny_model("llama").train()
    tigon.patch(model)
    if memory_mib:
        TECHNIQUES["loss-memory"].model(model, Settings.of({"train.loss_memory_mib": memory_mib}), RunInfo())
    return model


def test_limit_reaches_the_loss_and_keeps_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    plain = chunks.plan_within

    def watched(memory_bytes: int, request: chunks.ChunkRequest) -> chunks.Plan:
        limits.append(memory_bytes)
        return plain(1, request)  # as if nothing fits: the smallest chunks

    monkeypatch.setattr(chunks, "plan_within", watched)
    results = []
    for memory_mib in (0, 3):
        model = limited(memory_mib)
        loss = model(**tiny_batch(torch.device("cpu"))).loss
        loss.backward()
        results.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    assert limits == [3 << 20]
    for name, want in results[0].items():
        torch.testing.assert_close(results[1][name], want, rtol=1e-5, atol=1e-6)


def test_plan_counts_the_smaller_buffers() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=128256
    )
    peaks = {}
    for memory_mib in (0, 256, 128):
        settings = Settings.of({"train.precision": "bf16", "train.loss_memory_mib": memory_mib})
        request = Request(model="llama", config=config, batch=4, seq=512, settings=settings)
        peaks[memory_mib] = estimate(request, gpu=find_gpu("h200"), evaluation=False).phases["loss"]
    # The usual plan keeps 501 MiB of logits. The smallest holds 74 MiB of them and 63 MiB of the head's gradient.
    assert peaks[0] > peaks[256] > peaks[128]
    assert peaks[0] - peaks[256] > 200 << 20
