"""Hybrid families with tigon's short convolution and gated norm: a step equals that of the model's own code."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from models_helpers import too_old

import tigon
from tigon.errors import PatchError, ShapeError
from tigon.models import hybrid_layers
from tigon.models.seams import convolution, delta_rule
from tigon.models.seams.rebind import owner_of
from tigon.models.verification.tiny import tiny_model

IDS = torch.randint(3, 60, (2, 21), generator=torch.Generator().manual_seed(0))
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3_5_text": ({}, ("causal_conv1d", "gated_delta_rule", "gated_rms_norm")),
    "kimi_linear": ({}, ("causal_conv1d", "gated_rms_norm")),
    "olmo_hybrid": ({}, ("causal_conv1d", "gated_delta_rule", "gated_rms_norm")),
    "granitemoehybrid": ({}, ("causal_conv1d", "gated_rms_norm")),
    "bamba": ({}, ("causal_conv1d", "gated_rms_norm")),
    "falcon_h1": ({"mamba_rms_norm": True, "mamba_norm_before_gate": False}, ("causal_conv1d", "gated_rms_norm")),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, ("causal_conv1d",)),
}
pytestmark = pytest.mark.skipif(too_old("5.17"), reason="the layers call other functions there")


def step(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("family", FAMILIES)
def test_patched_hybrid_family_has_the_loss_and_gradients_of_its_own_code(family: str) -> None:
    config, ops = FAMILIES[family]
    torch.manual_seed(0)
    model = tiny_model(family, config).float().train()
    want = step(model)
    report = tigon.patch(model)
    assert set(ops) <= report.counts.keys(), str(report)
    got = step(model)
    assert got.keys() == want.keys()
    for name, value in want.items():
        difference = float((got[name] - value).abs().max())
        assert difference <= 1e-5 + 1e-3 * float(value.abs().max()), (name, difference)
    report.undo()
    assert {path.runs for path in hybrid_layers.paths_of(model)} == {hybrid_layers.PYTORCH}


def test_convolution_of_a_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_5_text", {})
    monkeypatch.setattr(convolution, "runs_in", lambda kind, layer: kind.library)
    report = tigon.patch(model)
    assert "causal_conv1d" not in report.counts
    assert any(entry.reason == "causal-conv1d runs its convolution" for entry in report.left_alone)


def test_gated_delta_rule_is_replaced_beside_a_library_with_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan says so too, and a Hopper GPU cannot train by the library's rule."""
    name = hybrid_layers.CONVOLUTION.module
    library = ModuleType(name)
    monkeypatch.setattr(library, hybrid_layers.CONVOLUTION.function, lambda: None, raising=False)
    monkeypatch.setitem(sys.modules, name, library)
    model = tiny_model("qwen3_5_text", {})
    planned = hybrid_layers.paths_of(model, fused=True)
    report = tigon.patch(model)
    assert [path.runs for path in planned] == [hybrid_layers.TIGON, "causal-conv1d"]
    assert report.layer_paths == planned, str(report)
    assert "gated_delta_rule" in report.counts and "causal_conv1d" not in report.counts
    layer = type(next(m for m in model.modules() if hasattr(m, "head_k_dim")))
    seen = owner_of(layer.forward, convolution.NAME).__globals__
    assert seen[delta_rule.NAME].func is delta_rule.delta_rule
    assert seen[convolution.NAME] is convolution.function_of(layer._tigon_base)
    report.undo()
    assert [path.runs for path in hybrid_layers.paths_of(model)] == [hybrid_layers.PYTORCH, "causal-conv1d"]


def test_convolution_keeps_its_code_if_it_is_switched_off() -> None:
    model = tiny_model("qwen3_5_text", {})
    assert "causal_conv1d" not in tigon.patch(model, convolution=False).counts


def test_flag_is_an_error_for_a_model_without_a_convolution() -> None:
    with pytest.raises(PatchError, match="convolution: nothing in this"):
        tigon.patch(tiny_model("llama", {}), convolution=True)


def test_filter_of_five_taps_and_an_unknown_activation_run_the_original() -> None:
    calls = []

    def original(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None) -> torch.Tensor:
        calls.append((weight.shape[1], activation))
        return x

    x = torch.randn(1, 6, 9)
    for taps, activation in ((5, None), (4, "gelu")):
        assert convolution.fused(original)(x, torch.randn(6, taps), None, activation) is x
    assert calls == [(5, None), (4, "gelu")]


def test_gated_delta_rule_that_would_mix_documents_is_refused() -> None:
    wide = torch.randn(1, 6, 1, 256)
    g = torch.zeros(1, 6, 1)
    called: list[bool] = []
    original = lambda *given, **options: called.append(True)  # noqa: E731
    with pytest.raises(ShapeError, match="would mix packed documents"):
        delta_rule.delta_rule(original, wide, wide, wide, g, g, cu_seqlens=torch.tensor([0, 3, 6]))
    delta_rule.delta_rule(original, wide, wide, wide, g, g)
    assert called == [True]


def test_gated_delta_rule_of_two_dtypes_has_the_dtype_of_the_queries() -> None:
    q, k, v = (torch.randn(1, 6, 1, 8) for _ in range(3))
    g = torch.zeros(1, 6, 1)
    mixed, _ = delta_rule.delta_rule(print, q.bfloat16(), k.bfloat16().float(), v, g, g + 0.5)
    same, _ = delta_rule.delta_rule(print, q.bfloat16().float(), k.bfloat16().float(), v, g, g + 0.5)
    assert mixed.dtype is torch.bfloat16
    torch.testing.assert_close(mixed.float(), same, rtol=0.01, atol=0.01)
