"""PEFT's adapters on the weights of experts under `tigon.patch`: one op, without a matrix of the weights' size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models_helpers import assert_agree
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from tigon.integrations import experts
from tigon.models.seams import experts as experts_seam
from tigon.models.verification.tiny import tiny_model

peft = pytest.importorskip("peft")

# One row per output, and GPT-OSS's transposed weights with biases; DeepSeek's first layer is dense.
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
OTHERS = dict.fromkeys(("rms_norm", "mlp", "rope", "lora", "cross_entropy", "linear_cross_entropy"), False)
IDS = torch.arange(24).view(2, 12) % 64


def adapted(
    family: str = "qwen3_moe", parameters: tuple[str, ...] = ("gate_up_proj", "down_proj"), every_expert: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """A small model with adapters that change its results."""
    torch.manual_seed(0)
    shape = {"num_key_value_heads": 4} if family.startswith("deepseek") else {}
    model: Any = tiny_model(family, shape, every_expert=every_expert)
    settings = {"r": 3, "lora_alpha": 6, "init_lora_weights": False, **options}
    targets = [f"experts.{name}" for name in parameters]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=[], target_parameters=targets, **settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:  # B as small as A, so that no gradient vanishes beside another
            torch.nn.init.normal_(parameter, std=0.2)
    return wrapped


def step(model: Any, autocast: bool = False) -> dict[str, torch.Tensor]:
    """The logits and every gradient of a fixed input."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(input_ids=IDS, use_cache=False).logits.float()
    logits.square().sum().backward()
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@contextmanager
def calls_of_the_op(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The options of every call of `experts` that a patched module makes."""
    seen: list[dict[str, Any]] = []
    real = experts_seam.ops.experts

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(experts_seam.ops, "experts", spy)
        yield seen


class NewShapes(TorchDispatchMode):
    """The shapes of all tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        owned = {t.data_ptr() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.data_ptr() not in owned:
                self.seen.add(tuple(t.shape))
        return result


@pytest.mark.parametrize("family", FAMILIES)
def test_patched_adapters_agree_with_pefts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(family)
    want = step(model)
    keys = list(model.state_dict())
    report = tigon.patch(model, experts=True, **OTHERS)
    assert {entry.cls for entry in report.replaced} >= {"ParamWrapper"}
    with calls_of_the_op(monkeypatch) as seen:
        got = step(model)
    assert seen and all("gate_up_lora_a" in options and "down_lora_b" in options for options in seen)
    assert_agree(got, want)
    assert list(model.state_dict()) == keys
    report.undo()
    after = step(model)
    assert all(torch.equal(after[name], value) for name, value in want.items())


@pytest.mark.parametrize("parameters", [("gate_up_proj",), ("down_proj",)])
def test_one_adapted_projection_agrees_with_pefts(parameters: tuple[str, ...]) -> None:
    model = adapted(parameters=parameters)
    want = step(model)
    tigon.patch(model, experts=True, **OTHERS)
    assert_agree(step(model), want)


def test_no_matrix_of_the_weights_size_is_made() -> None:
    model = adapted()
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    weights = {tuple(p.shape) for n, p in model.named_parameters() if p.ndim == 3 and "lora_" not in n}
    assert weights
    with NewShapes() as before:
        step(model)
    assert weights <= before.seen, "PEFT adds the adapters to the weights"
    tigon.patch(model, experts=True, **OTHERS)
    with NewShapes() as after:
        step(model)
    assert not weights & after.seen


def test_16_bit_results_are_no_farther_from_fp64_than_pefts() -> None:
    # Each token goes through every expert, because a rounding may change the choice between two.
    model, exact = (adapted(r=4, every_expert=True) for _ in range(2))
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    exact.double().get_base_model().set_experts_implementation("eager")
    exact.load_state_dict(model.state_dict())
    truth = step(exact)
    unfused = step(model, autocast=True)
    tigon.patch(model, experts=True, **OTHERS)
    fused = step(model, autocast=True)
    for name, value in truth.items():
        if "lora_" in name or name == "logits":
            theirs, ours = (float((found[name] - value).norm() / value.norm()) for found in (unfused, fused))
            assert fused[name].dtype == torch.float32
            assert ours <= 2 * theirs, f"{name}: {ours:.1e} instead of {theirs:.1e}"


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_interface_reads_pefts_factors(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts.register()
    model = adapted(family)
    want = step(model)
    model.get_base_model().set_experts_implementation("tigon")
    with calls_of_the_op(monkeypatch) as seen:
        got = step(model)
    assert seen and all("gate_up_lora_a" in options for options in seen)
    assert_agree(got, want)


def _disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def _merged(model: Any) -> None:
    model.merge_adapter()


def _two_active(model: Any) -> None:
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    second = peft.LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
    model.add_adapter("second", second)
    model.base_model.set_adapter(["default", "second"])


def _hooked(model: Any) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize("change", [_disabled, _merged, _two_active, _hooked])
def test_adapters_that_the_op_cannot_compute_now_run_pefts_forward(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, same = adapted(), adapted()
    for each in (model, same):
        torch.manual_seed(3)
        change(each)
    tigon.patch(model, experts=True, **OTHERS)
    with calls_of_the_op(monkeypatch) as seen, torch.no_grad():
        got, want = (each(input_ids=IDS, use_cache=False).logits for each in (model, same))
    assert change is _hooked or not any("gate_up_lora_a" in options for options in seen)
    assert float((got - want).norm() / want.norm()) <= 1e-5


def test_adapter_of_another_weight_is_left_alone_with_the_reason() -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj_bias"])
    model = peft.get_peft_model(tiny_model("gpt_oss"), config)
    report = tigon.patch(model, **OTHERS)
    assert any("adapter is that of gate_up_proj_bias" in entry.reason for entry in report.left_alone)
