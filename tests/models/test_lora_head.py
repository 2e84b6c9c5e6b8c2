"""A head with a LoRA adapter under `tigon.patch`: the fused loss counts the adapter, and no logits are computed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers

import tigon
from helpers import assert_within
from tigon.models.patch import ALL_FLAGS
from tigon.models.seams.head.deferred_logits import DeferredLogits
from tigon.ops import linear_cross_entropy

peft = pytest.importorskip("peft")

IDS = torch.arange(24).view(2, 12) % 64


def adapted(dtype: torch.dtype = torch.float32, *, tied: bool = False, **options: Any) -> Any:
    """A tiny Llama whose head and query projections have adapters that change the results."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights, which concern merging
        return peft.get_peft_model(transformers.LlamaForCausalLM(config).to(dtype), peft.LoraConfig(**settings))


def step(model: Any, autocast: bool = False, labels: torch.Tensor = IDS) -> tuple[Any, dict[str, torch.Tensor]]:
    """Outputs and gradients of one training step, with the same dropout at every call."""
    torch.manual_seed(3)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        outputs = model.train()(input_ids=IDS, labels=labels)
    outputs.loss.backward()
    return outputs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def replaced(report: Any) -> dict[str, tuple[str, ...]]:
    return {path: entry.op for entry in report.replaced for path in entry.paths}


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_loss_gradients_and_later_logits_are_those_of_peft(tied: bool, dropout: float) -> None:
    options = {"tied": tied, "lora_dropout": dropout}
    model, twin = adapted(**options), adapted(**options)
    assert replaced(tigon.patch(model))["lm_head"] == "linear_cross_entropy"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, gradients = step(model)
    want, expected = step(twin)
    assert type(got.logits) is DeferredLogits
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
    assert gradients.keys() == expected.keys() and any("lm_head.lora_B" in name for name in gradients)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)
    with pytest.warns(UserWarning, match="were read"):
        torch.testing.assert_close(got.logits + 0, want.logits)


def test_bf16_head_with_fp32_adapter_is_no_farther_from_fp32_than_pefts() -> None:
    truth, unfused = step(adapted(torch.bfloat16).float())[1], step(adapted(torch.bfloat16), autocast=True)[1]
    model = adapted(torch.bfloat16)
    tigon.patch(model, rms_norm=False, mlp=False, rope=False)
    fused = step(model, autocast=True)[1]
    assert all(gradient.dtype == torch.float32 for gradient in fused.values())
    for name in truth:
        if "lm_head" in name:
            assert_within(fused[name], truth[name].double(), unfused[name], 2.0, name)


@pytest.mark.parametrize("flag", ["lora", "linear_cross_entropy"])
def test_flag_alone_gives_the_head_its_op_and_undo_gives_back_pefts_bits(flag: str) -> None:
    model = adapted()
    before = step(model)
    report = tigon.patch(model, **{**dict.fromkeys(ALL_FLAGS, False), flag: True})
    assert replaced(report)["lm_head"] == ("lora_linear" if flag == "lora" else "linear_cross_entropy")
    assert (type(step(model)[0].logits) is DeferredLogits) == (flag == "linear_cross_entropy")
    report.undo()
    after = step(model)
    assert torch.equal(after[0].loss, before[0].loss)
    assert all(torch.equal(after[1][name], gradient) for name, gradient in before[1].items())


def test_adapter_that_the_op_cannot_compute_costs_the_logits_and_one_warning() -> None:
    """Without autocast PEFT computes an fp32 adapter of a bf16 head in fp32."""
    model, twin = adapted(torch.bfloat16), adapted(torch.bfloat16)
    tigon.patch(model, rms_norm=False, mlp=False, rope=False, lora=False)
    with pytest.warns(UserWarning, match="full logits in this step: PEFT computes the head"):
        got = step(model)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)
    assert torch.equal(got.logits, step(twin)[0].logits)


def test_merged_and_disabled_adapters_give_pefts_logits() -> None:
    for change in ("merge_adapter", "disable_adapter_layers"):
        model, twin = adapted(), adapted()
        tigon.patch(model, rms_norm=False, mlp=False, rope=False, lora=False)
        for each in (model, twin):
            getattr(each.base_model, change)()
            each.eval()
        torch.testing.assert_close(model(input_ids=IDS).logits, twin(input_ids=IDS).logits, rtol=0, atol=0)


def test_logits_that_are_read_after_a_step_of_the_adapter_are_refused() -> None:
    model = adapted()
    tigon.patch(model)
    outputs = step(model)[0]
    with torch.no_grad():
        model.base_model.model.lm_head.lora_B["default"].weight.add_(1)
    with pytest.raises(tigon.errors.PatchError, match="had changed"):
        outputs.logits + 0


def test_dora_head_is_left_to_peft_and_named() -> None:
    report = tigon.patch(adapted(use_dora=True))
    assert [entry.reason for entry in report.left_alone if "lm_head" in entry.paths and entry.op != "lora_linear"] == [
        "its adapter is a variant of LoRA (Dora)"
    ]


# --- the op -----------------------------------------------------------------------------------------------------------


def arguments() -> dict[str, Any]:
    torch.manual_seed(1)
    shapes = {"hidden": (6, 8), "weight": (20, 8), "lora_a": (2, 8), "lora_b": (20, 2)}
    return {name: torch.randn(*shape, requires_grad=True) for name, shape in shapes.items()}


def test_only_ignored_labels_give_an_adapter_no_gradient() -> None:
    given = arguments()
    for chunk_bytes in (1 << 20, 160):
        loss = linear_cross_entropy(
            **given, target=torch.full((6,), -100), reduction="sum", chunk_bytes=chunk_bytes, scaling=2.0
        )
        gradients = torch.autograd.grad(loss, tuple(given.values()))
        assert loss == 0 and not any(gradient.any() for gradient in gradients)


def test_adapter_of_a_frozen_head_computes_no_gradient_of_the_head() -> None:
    given = arguments()
    target = torch.arange(6)
    whole = linear_cross_entropy(**given, target=target)
    expected = torch.autograd.grad(whole, (given["lora_a"], given["lora_b"]))
    for name in ("hidden", "weight"):
        given[name] = given[name].detach()
    got = torch.autograd.grad(
        linear_cross_entropy(**given, target=target, chunk_bytes=160), (given["lora_a"], given["lora_b"])
    )
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lora_b": None}, tigon.errors.OptionError, "lora_a is given without lora_b"),
        ({"lora_a": None, "lora_b": None, "adapter_hidden": torch.ones(6, 8)}, tigon.errors.OptionError, "no adapter"),
        ({"scaling": float("nan")}, tigon.errors.OptionError, "must be finite"),
        ({"lora_a": torch.ones(3, 8)}, tigon.errors.ShapeError, r"they must be \(R, 8\) and \(20, R\)"),
        ({"adapter_hidden": torch.ones(5, 8)}, tigon.errors.ShapeError, "they must agree"),
        ({"lora_a": torch.ones(2, 8, dtype=torch.int64)}, tigon.errors.DtypeError, "int64"),
    ],
)
def test_adapter_that_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{**arguments(), **change}, target=torch.arange(6))


def test_adapter_that_was_added_after_the_patch_is_fused_by_a_second_patch() -> None:
    twin = adapted()
    model = adapted().unload()
    first = tigon.patch(model, rms_norm=False, mlp=False, rope=False)
    model = peft.get_peft_model(model, twin.peft_config["default"])
    model.load_state_dict(twin.state_dict())
    second = tigon.patch(model, rms_norm=False, mlp=False, rope=False)
    assert replaced(second)["lm_head"] == "linear_cross_entropy"
    got, gradients = step(model)
    want, expected = step(twin)
    assert type(got.logits) is DeferredLogits and got.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-7)
    second.undo()
    first.undo()
    assert torch.equal(step(model)[0].loss, want.loss)
