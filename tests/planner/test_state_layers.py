"""A plan of a hybrid model beside a library with fused kernels counts what those kernels allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from planner_helpers import H200

from tigon.models import hybrid_layers
from tigon.planner.estimate import estimate
from tigon.planner.request import Request
from tigon.planner.trace import state_layers
from tigon.planner.trace.dispatch_recorder import TraceRecorder
from tigon.planner.trace.tape import Where
from tigon.techniques.keys.settings import Settings

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "head_dim": 16,
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 16, "linear_num_heads": 4,
        "num_key_value_heads": 4, "pad_token_id": 0,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip


def request_of(family: str, seq: int, kernels: str = "tigon") -> Request:
    try:
        config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    settings = Settings.of({"train.precision": "bf16", "model.kernels": kernels})
    return Request(model=family, config=config, batch=1, seq=seq, settings=settings)


@pytest.mark.skipif(
    not hasattr(transformers.integrations, "use_kernel_func_from_hub_with_fallback"),
    reason="before 5.16 the file of a model decides once, when it is imported",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_plan_counts_the_kernels_of_the_installed_library(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = estimate(request_of(family, 500, "none"), gpu=H200, evaluation=False)
    monkeypatch.setattr(hybrid_layers, "_installed", lambda kind: kind.library)
    monkeypatch.setattr("tigon.planner.trace.cache.trace_key.found_libraries", lambda: ("all",))
    fast = estimate(request_of(family, 500, "none"), gpu=H200, evaluation=False)
    assert fast.peak_allocated_bytes < slow.peak_allocated_bytes and fast.step_s < slow.step_s
    assert any("no GPU has measured" in note for note in fast.notes)


def test_plan_counts_tigons_convolution_as_no_more_than_that_of_causal_conv1d(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = estimate(request_of("lfm2", 500), gpu=H200, evaluation=False)
    assert any("short convolution (1 layer): tigon" in note for note in fused.notes)
    monkeypatch.setattr(hybrid_layers, "_installed", lambda kind: kind.library)
    monkeypatch.setattr("tigon.planner.trace.cache.trace_key.found_libraries", lambda: ("all",))
    library = estimate(request_of("lfm2", 500), gpu=H200, evaluation=False)
    assert any("causal-conv1d" in note for note in library.notes)
    assert fused.peak_allocated_bytes <= library.peak_allocated_bytes + 512  # a block of the allocator


def saved_bytes(gate_width: int | None) -> int:
    """Bytes that the planned delta rule keeps for its backward pass; the gate has this width, or is a scalar."""
    shape, kept = (2, 100, 3), {}
    q, k, v = (torch.zeros(*shape, width, dtype=torch.bfloat16, requires_grad=True) for width in (16, 16, 32))
    g = torch.zeros(shape if gate_width is None else (*shape, gate_width), requires_grad=True)
    beta = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), TraceRecorder({}, {}) as recorder:
        recorder.mark(Where("forward"), "activations")
        out, _ = state_layers.FUNCTIONS["chunk_gated_delta_rule"](recorder, q, k, v, g=g, beta=beta)
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v, g, beta)] == [x.shape for x in (q, k, v, g, beta)]
    return sum(kept.values())


def test_delta_rule_keeps_what_the_library_keeps() -> None:
    tokens = 2 * 100 * 3
    scalar = tokens * (2 * 16 * 2 + 32 * 2 + 2 * 4 + 4 + 2 + state_layers.C * 2)  # q, k, v, their norms, g, beta, A
    assert saved_bytes(None) == scalar
    gate = tokens * (16 * 4 * 2 - 4)  # the gate and its sums, for each channel
    assert saved_bytes(16) == scalar + gate + tokens * state_layers.C * 2
