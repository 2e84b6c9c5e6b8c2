"""`tigon.patch_fp8`: which linear layers get FP8 matmuls, that the weights stay, and that a step runs through them."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tigon
from helpers import relative_error
from tigon.errors import OptionError, PatchError
from tigon.models.fp8 import fp8_options
from tigon.models.patch import unpatch
from tigon.models.seams.fp8 import fp8_scaling
from tigon.models.seams.norm import finds_amax
from tigon.models.verification.tiny import tiny_model
from tigon.ops.linear import fp8, fp8_linear
from tigon.ops.linear.fp8 import SCALINGS
from tigon.techniques.checkpointing.layer_function import enable, replace_function
from tigon.techniques.checkpointing.recompute import recomputed

IDS = torch.arange(24).view(2, 12) % 64


def llama(layers: int = 4, **shape: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, **shape}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=layers, **sizes)
    return transformers.LlamaForCausalLM(config).bfloat16()


def fp8_paths(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if fp8_scaling(module) is not None}


def step(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_first_and_last_layer_embeddings_and_head_keep_their_products() -> None:
    model = llama()
    report = tigon.patch_fp8(model)
    assert {path.split(".")[2] for path in fp8_paths(model)} == {"1", "2"}
    assert report.counts == {"fp8_linear": 14}
    assert [row.reason for row in report.left_alone] == ["the first and last 1 layers keep their products"]


def test_bf16_layers_0_runs_every_layer_in_fp8() -> None:
    model = llama(layers=2)
    tigon.patch_fp8(model, bf16_layers=0, scaling="rowwise")
    assert len(fp8_paths(model)) == 14
    assert fp8_options(model) == {"scaling": "rowwise", "bf16_layers": 0}


def test_undo_restores_classes_and_the_state_dict_never_changes() -> None:
    model = llama()
    classes = [type(m) for m in model.modules()]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    loss, _ = step(model)
    report = tigon.patch_fp8(model)
    assert step(model)[0] != loss
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert list(model.state_dict()) == list(before)
    report.undo()
    assert [type(m) for m in model.modules()] == classes
    assert step(model)[0] == loss


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("patched", [False, True], ids=["alone", "with-tigons-ops"])
def test_a_step_differs_from_bf16_by_the_rounding_of_fp8(scaling: str, patched: bool) -> None:
    model = llama()
    if patched:
        tigon.patch(model)
    loss, grads = step(model)
    tigon.patch_fp8(model, scaling=scaling)
    fp8_loss, fp8_grads = step(model)
    assert fp8_loss == pytest.approx(loss, rel=0.01)
    errors = {name: relative_error(fp8_grads[name], grads[name]) for name in grads}
    assert 0.001 < max(errors.values()) < 0.35, errors


def test_widths_that_are_no_multiple_of_16_are_left_alone_and_named() -> None:
    model = llama(intermediate_size=40)
    report = tigon.patch_fp8(model)
    assert {path.rpartition(".")[2] for path in fp8_paths(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert any(row.reason.endswith("multiples of 16, and it has 40") for row in report.left_alone)


def test_router_of_a_mixture_keeps_its_product() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.model.layers[0].mlp.router = nn.Linear(32, 16)
    report = tigon.patch_fp8(model, bf16_layers=0)
    assert "model.layers.0.mlp.router" not in fp8_paths(model)
    assert any(row.reason == "it chooses experts" for row in report.left_alone)


def test_recomputation_gives_the_same_gradients() -> None:
    model = llama()
    tigon.patch_fp8(model)
    _, plain = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    _, recomputed = step(model)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_last_layer_of_a_recomputation_casts_nothing_for_a_frozen_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_linear = importlib.import_module("tigon.ops.linear.fp8_linear")  # `tigon.ops.linear.fp8_linear` is the function
    model, casts = llama(layers=1), list[tuple[bool, bool]]()
    tigon.patch_fp8(model, bf16_layers=0)
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    _, plain = step(model)
    real = fp8_linear.operand

    def spy(x: Any, scaling: str, *, rows: bool, columns: bool, **kwargs: Any) -> Any:
        if not kwargs.get("gradient"):
            casts.append((rows, columns))
        return real(x, scaling, rows=rows, columns=columns, **kwargs)

    enable(model)
    replace_function(model, recomputed)
    monkeypatch.setattr(fp8_linear, "operand", spy)
    _, again = step(model)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    # Four inputs and seven weights in the first run; in the second one all but the last input.
    assert casts == [(True, False)] * 11 + [(True, True)] * 9 + [(False, True)]


@pytest.mark.parametrize("frozen", [False, True], ids=["both trained", "first frozen"])
def test_recomputation_that_ends_with_layers_of_one_input_gives_the_same_bits(frozen: bool) -> None:
    """The recomputation casts the input for the second layer again, and the first run has shared its cast."""
    torch.manual_seed(0)
    x = torch.randn(32, 16).bfloat16().requires_grad_()
    first = torch.randn(48, 16).bfloat16().requires_grad_(not frozen)
    second = (100 * torch.randn(48, 16)).bfloat16().requires_grad_()

    def product(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return tigon.fp8_linear(x, first) + tigon.fp8_linear(x, second)  # the sum saves nothing

    wanted = [t for t in (x, first, second) if t.requires_grad]
    plain = torch.autograd.grad(product(x, first, second).sum(), wanted)
    again = torch.autograd.grad(recomputed(product, x, first, second).sum(), wanted)
    assert all(torch.equal(got, want) for got, want in zip(again, plain, strict=True))


def test_projections_of_one_input_share_its_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_linear = importlib.import_module("tigon.ops.linear.fp8_linear")  # `tigon.ops.linear.fp8_linear` is the function
    model, casts = llama(layers=1), []
    tigon.patch_fp8(model, bf16_layers=0)
    real = fp8_linear.operand

    def spy(x: Any, *args: Any, **kwargs: Any) -> Any:
        casts.append(tuple(x.shape))
        return real(x, *args, **kwargs)

    monkeypatch.setattr(fp8_linear, "operand", spy)
    with torch.no_grad():
        model(input_ids=IDS)
    # Seven weights, and the inputs of q = k = v, o, gate = up, and down.
    assert len(casts) == 7 + 4


def test_input_that_was_written_to_is_cast_again() -> None:
    x, weight = torch.randn(4, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    first = tigon.fp8_linear(x, weight)
    x.mul_(2.0)
    assert torch.equal(tigon.fp8_linear(x, weight), tigon.fp8_linear(x.clone(), weight))
    assert not torch.equal(tigon.fp8_linear(x, weight), first)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_values_that_are_not_finite_reach_the_result_as_nan(scaling: str, value: float) -> None:
    x, weight = torch.randn(4, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    x[1, 3] = value
    y = tigon.fp8_linear(x, weight, scaling=scaling)
    assert y[1].isnan().all()


def test_model_without_a_fitting_layer_is_refused_unchanged() -> None:
    with pytest.raises(PatchError, match="nothing in this LlamaForCausalLM can run in FP8: the first and last 1"):
        tigon.patch_fp8(llama(layers=2))
    with pytest.raises(OptionError, match="choose one of tensorwise, rowwise"):
        tigon.patch_fp8(llama(), scaling="blockwise")
    with pytest.raises(OptionError, match="bf16_layers=-1"):
        tigon.patch_fp8(llama(), bf16_layers=-1)


@pytest.mark.parametrize("order", ["adapters first", "fp8 first"])
def test_adapters_products_stay_in_bf16_around_an_fp8_layer(order: str) -> None:
    peft = pytest.importorskip("peft")

    def adapted(fp8: bool) -> Any:
        model = llama(layers=1)
        if fp8 and order == "fp8 first":
            tigon.patch_fp8(model, bf16_layers=0)
        torch.manual_seed(1)
        settings = peft.LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
        wrapped = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
        tigon.patch(wrapped)
        if fp8 and order == "adapters first":
            tigon.patch_fp8(wrapped, bf16_layers=0)
        return wrapped

    loss, grads = step(adapted(False))
    model = adapted(True)
    assert len(fp8_paths(model)) == 7
    assert all(path.endswith("base_layer") for path in fp8_paths(model))
    fp8_loss, fp8_grads = step(model)
    assert fp8_loss == pytest.approx(loss, rel=0.03)
    assert fp8_grads.keys() == grads.keys()
    errors = {name: relative_error(fp8_grads[name], grads[name]) for name in grads}
    assert 0.001 < max(errors.values()) < 0.4, errors


@pytest.mark.parametrize("scaling", SCALINGS)
def test_recomputed_layer_takes_the_first_runs_magnitudes_and_casts_each_weight_once_for_both_products(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are those without recomputation, bit for bit.

    The last product is not computed again, and its two factors are cast by columns alone.
    """
    model, calls = llama(), Counter[str]()
    tigon.patch_fp8(model, scaling=scaling, bf16_layers=0)
    want_loss, want = step(model)
    enable(model)
    replace_function(model, recomputed)
    amax, cast, product = fp8_linear.fp8_amax, fp8.fp8_cast, fp8_linear.fp8_product

    def counted_amax(*args: Any) -> Any:
        calls["amax"] += 1
        return amax(*args)

    def counted_cast(x: Any, amax: Any, rowwise: bool, rows: bool, columns: bool, gradient: bool) -> Any:
        calls[f"cast {'rows' * rows}{'+' * (rows and columns)}{'columns' * columns}{' of dy' * gradient}"] += 1
        return cast(x, amax, rowwise, rows, columns, gradient)

    def counted_product(*args: Any) -> Any:
        calls["product"] += 1
        return product(*args)

    for module in (fp8, fp8_linear):
        monkeypatch.setattr(module, "fp8_amax", counted_amax)
    monkeypatch.setattr(fp8_linear, "fp8_product", counted_product)
    monkeypatch.setattr(fp8, "fp8_cast", counted_cast)
    loss, got = step(model)
    assert loss == want_loss and all(torch.equal(got[name], want[name]) for name in want)
    inputs, weights, layers = 4, 7, 4
    assert calls == {
        "amax": layers * (inputs + weights + weights), "cast rows": layers * (inputs + weights),
        "cast rows+columns": layers * (inputs + weights - 2), "cast columns": layers * 2,
        "cast rows+columns of dy": layers * weights,
        "product": layers * (4 * weights - 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("family", "marked"),
    [("llama", {"input_layernorm", "post_attention_layernorm"}),
     ("gemma3_text", {"input_layernorm", "pre_feedforward_layernorm"}), ("olmo2", set())],
)  # fmt: skip
def test_norms_that_fp8_layers_read_find_their_magnitudes(family: str, marked: set[str]) -> None:
    def finding() -> set[str]:
        return {path.rpartition(".")[2] for path, module in model.named_modules() if finds_amax(module)}

    model = tiny_model(family, {}).bfloat16()
    tigon.patch(model)
    report = tigon.patch_fp8(model, bf16_layers=0, scaling="rowwise")
    assert not finding()
    report.undo()
    report = tigon.patch_fp8(model, bf16_layers=0)
    assert finding() == marked
    report.undo()
    assert not finding()
    tigon.patch_fp8(model, bf16_layers=0)
    unpatch(model)
    assert not finding()
