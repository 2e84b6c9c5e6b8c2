"""The experts of a mixture as one op: transformers' experts interface and `tigon.patch`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models_helpers import assert_agree

import tigon
from tigon.errors import PatchError
from tigon.integrations import experts
from tigon.models.verification.tiny import tiny_model

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe",
    "glm4_moe", "hunyuan_v1_moe", "phimoe",
)  # fmt: skip


def results(model: Any) -> dict[str, torch.Tensor]:
    """The logits and every gradient of a fixed input."""
    model.zero_grad()
    torch.manual_seed(3)  # the jitter of some routers
    logits = model(input_ids=torch.arange(14).view(2, 7), use_cache=False).logits
    logits.square().sum().backward()
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("family", FAMILIES)
def test_interface_and_patch_agree_with_transformers_eager_experts(family: str) -> None:
    experts.register()
    model: Any = tiny_model(family, {"num_key_value_heads": 4} if family.startswith("deepseek") else {})
    model.set_experts_implementation("eager")
    want = results(model)
    model.set_experts_implementation("tigon")
    assert_agree(results(model), want)
    model.set_experts_implementation("eager")
    keys = list(model.state_dict())
    others = dict.fromkeys(("rms_norm", "mlp", "rope", "cross_entropy", "linear_cross_entropy"), False)
    report = tigon.patch(model, experts=True, **others)
    assert any(entry.op == "experts" for entry in report.replaced)
    assert list(model.state_dict()) == keys
    assert_agree(results(model), want)
    report.undo()
    assert_agree(results(model), want)


def test_experts_run_the_op_unless_switched_off() -> None:
    assert tigon.patch(tiny_model("mixtral")).counts["experts"] == 2
    assert "experts" not in tigon.patch(tiny_model("mixtral"), experts=False).counts
    assert "experts" not in tigon.patch(tiny_model("llama")).counts


def test_experts_that_the_op_does_not_serve_are_left_alone_with_the_reason() -> None:
    model: Any = tiny_model("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts.has_gate = False
    report = tigon.patch(model, mlp=False)
    assert "experts" not in report.counts
    assert any(entry.op == "experts" and "no gate" in entry.reason for entry in report.left_alone)


def test_patch_with_every_flag_can_be_undone() -> None:
    model = tiny_model("mixtral")
    classes = [type(m) for m in model.modules()]
    tigon.patch(model, experts=True, mlp=True).undo()
    assert [type(m) for m in model.modules()] == classes


def test_dense_model_refuses_the_flag() -> None:
    with pytest.raises(PatchError, match="experts: nothing in this"):
        tigon.patch(tiny_model("llama"), experts=True)


def test_experts_without_a_gate_are_refused_with_the_way_on() -> None:
    experts.register()
    module = tiny_model("mixtral").model.layers[0].mlp.experts  # type: ignore[union-attr]
    module.has_gate = False
    with pytest.raises(PatchError, match=r"no gate.*grouped_mm"):
        experts.experts_forward(module, torch.randn(2, 32), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))
