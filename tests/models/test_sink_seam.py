"""Eager attention with a sink per head as an op: results, gradients, masks, and calls that keep the own function."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

import tigon
from tigon import ops
from tigon.errors import PatchError
from tigon.models.seams import sink_attention as seam
from tigon.models.table import MODELS
from tigon.models.verification.tiny import tiny_model
from tigon.ops.sink_attention import causal_mask

IDS = 1 + torch.arange(24).view(2, 12) % 60


def model_of(**config: Any) -> Any:
    torch.manual_seed(0)
    model = tiny_model("gpt_oss", {**MODELS["gpt_oss"].tiny, "sliding_window": 4, **config}).float().train()
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "router.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def step(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False, **inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        difference = float((got[name] - value).abs().max())
        assert difference <= 1e-5 + 1e-3 * float(value.abs().max()), (name, difference)


@pytest.mark.parametrize("padded", [False, True])
def test_step_is_the_same_and_a_causal_mask_is_not_passed_on(padded: bool) -> None:
    model = model_of()
    inputs = {"attention_mask": (torch.arange(12) >= torch.tensor([[0], [5]])).long()} if padded else {}
    want = step(model, **inputs)
    report = tigon.patch(model)
    assert report.counts["sink_attention"] == report.counts["rope"] == 2
    with patch.object(ops, "sink_attention", wraps=ops.sink_attention) as called:
        assert_close(step(model, **inputs), want)
    assert [call.kwargs["window"] for call in called.call_args_list] == [4, 0]
    assert [call.kwargs["mask"] is not None for call in called.call_args_list] == [padded] * 2


def test_undo_restores_both_seams_of_an_attention_and_not_one_below_another() -> None:
    model = model_of()
    classes = [type(m) for m in model.modules()]
    first = tigon.patch(model, sink_attention=False)
    second = tigon.patch(model, sink_attention=True)
    assert second.counts == {"sink_attention": 2}
    with pytest.raises(PatchError, match="patched again"):
        first.undo()
    second.undo()
    first.undo()
    assert [type(m) for m in model.modules()] == classes
    tigon.patch(model).undo()
    assert [type(m) for m in model.modules()] == classes


def test_generation_with_a_cache_keeps_the_function_of_the_model() -> None:
    model = model_of().eval()
    want = model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False)
    tigon.patch(model)
    assert torch.equal(model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False), want)


def test_model_without_sinks_or_without_eager_attention_refuses_the_flag() -> None:
    with pytest.raises(PatchError, match="no attention has sinks"):
        tigon.patch(tiny_model("llama"), sink_attention=True)
    model = model_of()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(PatchError, match="its attention is flex_attention"):
        tigon.patch(model, sink_attention=True)
    report = tigon.patch(model)
    assert "sink_attention" not in report.counts
    assert any("flex_attention" in entry.reason for entry in report.left_alone if entry.op == "sink_attention")


def test_mask_is_read_once_until_it_changes() -> None:
    mask = torch.zeros(1, 1, 5, 5).masked_fill_(~causal_mask(5, 0, torch.device("cpu")), -torch.inf)
    assert seam.is_causal(mask, 0) and not seam.is_causal(mask, 3) and seam.is_causal(mask, 5)
    with patch.object(torch, "equal", side_effect=AssertionError):
        assert seam.is_causal(mask, 5)
    mask[..., 0] = -torch.inf
    assert not seam.is_causal(mask, 5)
