"""Routers and the load-balancing loss of mixtures: which families run the ops, and that their results are the same."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from models_helpers import too_old
from torch import nn

import tigon
from tigon import ops
from tigon.errors import PatchError
from tigon.models.seams.router import SigmoidRouterSeam
from tigon.models.table import MODELS
from tigon.models.verification.tiny import tiny_model

SERVED = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "granitemoe", "gpt_oss")
IDS = 1 + torch.arange(24).view(2, 12) % 60  # the embedding of 0 is 0, and all its experts would tie


def model_of(family: str, **config: Any) -> Any:
    torch.manual_seed(0)
    model = tiny_model(family, {**MODELS[family].tiny, **config}).float().train()
    for name, parameter in model.named_parameters():  # some routers begin with zeros, and all experts would tie
        if "router" in name or "gate.weight" in name:
            nn.init.normal_(parameter, std=0.5)
    return model


def step(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS, use_cache=False, **inputs)
    out.loss.backward()
    more = {"aux_loss": out.aux_loss.detach()} if getattr(out, "aux_loss", None) is not None else {}
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), **more, **grads}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        difference = float((got[name] - value).abs().max())
        assert difference <= 1e-4 + 1e-3 * float(value.abs().max()), (name, difference)


def calls_of(name: str) -> Any:
    return patch.object(ops, name, wraps=getattr(ops, name))


@pytest.mark.parametrize("family", SERVED)
def test_router_of_the_family_is_the_op_with_the_same_step(family: str) -> None:
    model = model_of(family)
    want = step(model)
    report = tigon.patch(model)
    assert report.counts["topk_softmax"] == report.counts["experts"]
    with calls_of("topk_softmax") as called:
        got = step(model)
    assert called.call_count == report.counts["topk_softmax"]
    assert got.keys() == want.keys()
    assert_close(got, want)


@pytest.mark.skipif(too_old("5.17"), reason="their routers are no modules of their own, or have other formulas there")
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "kimi_linear", "minimax_m2"])
def test_sigmoid_router_of_the_family_is_the_op_with_the_same_step(family: str) -> None:
    torch.manual_seed(0)
    groups = {} if family == "minimax_m2" else {"n_group": 2, "topk_group": 1}
    model = tiny_model(family, {**(MODELS[family].tiny if family in MODELS else {}), **groups}).float().train()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "gate.weight" in name or "e_score_correction_bias" in name:
            nn.init.normal_(tensor, std=0.5)
    want = step(model)
    report = tigon.patch(model)
    with calls_of("topk_sigmoid") as called:
        got = step(model)
    assert called.call_count == report.counts["topk_sigmoid"]
    if groups:
        assert called.call_args.kwargs["groups"] == 2
    assert_close(got, want)


def test_sigmoid_router_that_fills_other_groups_with_zero_keeps_its_forward() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    original = torch.Tensor.masked_fill

    class Other(DeepseekV3TopkRouter):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            with patch.object(torch.Tensor, "masked_fill", lambda self, mask, _: original(self, mask, 0.0)):
                return DeepseekV3TopkRouter.forward(self, hidden_states)

    module = model_of("deepseek_v3").model.layers[-1].mlp.gate
    assert SigmoidRouterSeam().objection(module) is None
    module.__class__ = Other
    assert "differs" in str(SigmoidRouterSeam().objection(module))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_balancing_loss_of_the_model_is_the_op_with_the_same_gradients(family: str, masked: bool) -> None:
    model = model_of(family, output_router_logits=True, router_aux_loss_coef=0.5)
    inputs = {"attention_mask": (IDS > 3).long()} if masked else {}
    want = step(model, **inputs)
    report = tigon.patch(model)
    with calls_of("load_balancing_loss") as called:
        got = step(model, **inputs)
    assert called.call_count == 1 and got.keys() == want.keys() and "aux_loss" in got
    assert_close(got, want)
    report.undo()
    with calls_of("load_balancing_loss") as called:
        step(model, **inputs)
    assert not called.called


def test_function_with_another_formula_stays() -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    original = modeling.load_balancing_loss_func

    def other(*args: Any, **options: Any) -> Any:
        return 2 * original(*args, **options)

    with patch.object(modeling, "load_balancing_loss_func", other):
        from tigon.models.seams.router import with_balancing_loss

        with_balancing_loss.cache_clear()
        forward = modeling.Qwen3MoeForCausalLM.forward
        assert with_balancing_loss(forward) is forward
    with_balancing_loss.cache_clear()


@pytest.mark.parametrize("family", ["deepseek_v2", "llama4_text"])
def test_router_with_another_formula_keeps_its_forward_with_the_reason_unless_the_op_was_asked_for(family: str) -> None:
    if family != "llama4_text" and too_old("5.15"):
        pytest.skip("DeepSeek's router is no module of its own there")
    model = model_of(family)
    with pytest.raises(PatchError, match=r"router: nothing in this .* can run it"):
        tigon.patch(model, router=True)
    report = tigon.patch(model)
    assert "topk_softmax" not in report.counts
    (left,) = (entry for entry in report.left_alone if entry.op == "topk_softmax")
    assert left.reason.startswith("the op's output")


def test_router_keeps_its_forward_if_it_is_switched_off() -> None:
    model = model_of("qwen3_moe", output_router_logits=True)
    assert "topk_softmax" not in tigon.patch(model, router=False).counts
    with calls_of("load_balancing_loss") as called:
        step(model)
    assert not called.called


def test_router_that_fails_on_the_stand_in_is_left_alone() -> None:
    model = model_of("mixtral")
    router = type(model.model.layers[0].mlp.gate)

    def failing(*_: Any) -> Any:
        raise RuntimeError("it needs a GPU")

    failing.__module__ = router.__module__
    with patch.object(router, "forward", failing):
        report = tigon.patch(model)
    assert "topk_softmax" not in report.counts and report.counts["experts"]
    assert any("it needs a GPU" in entry.reason for entry in report.left_alone if entry.op == "topk_softmax")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe", "gpt_oss"])
def test_router_under_autocast_returns_the_dtypes_of_its_own_forward(family: str) -> None:
    """The product is bf16 and the hidden states are fp32. Granite-MoE's weights have the dtype of the hidden states."""
    model = model_of(family)
    router = next(m for m in model.modules() if type(m).__name__.endswith("TopKRouter"))
    hidden = torch.randn(5, router.weight.shape[1])

    def dtypes() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            return [t.dtype for t in router(hidden)]

    want = dtypes()
    assert tigon.patch(model).counts["topk_softmax"] and dtypes() == want


def test_equal_logits_choose_the_first_experts() -> None:
    weights, index = tigon.topk_softmax(torch.zeros(3, 5), 2, normalised=True)
    assert index.tolist() == [[0, 1]] * 3 and torch.equal(weights, torch.full((3, 2), 0.5))


@pytest.mark.parametrize("normalised", [False, True])
def test_row_with_nan_has_weights_and_a_gradient_of_nan_and_experts_that_exist(normalised: bool, backend: Any) -> None:
    """The largest of a row on a GPU passes NaN over."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(backend.device)
    logits[1, 2] = torch.nan
    logits.requires_grad_()
    weights, index = tigon.topk_softmax(logits, 2, normalised=normalised)
    (gradient,) = torch.autograd.grad(weights.nansum(), logits)
    for values in (weights, gradient):
        assert values[1].isnan().all() and not values[[0, 2, 3]].isnan().any()
    assert ((index >= 0) & (index < 6)).all()


def test_experts_that_cannot_be_chosen_get_no_weight() -> None:
    logits = torch.full((2, 4), -torch.inf)
    logits[:, 3] = 1.0
    weights, index = tigon.topk_softmax(logits, 2)
    assert weights.tolist() == [[1.0, 0.0]] * 2 and index[:, 0].tolist() == [3, 3]
