"""Gradient accumulation fusion inside CUDA graphs: each product writes or adds to the buffer that becomes `.grad`.

On the CPU a replay runs the work again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphed_layers import graphed, graphs_of, ids_of, model_of, on_each_device, recomputed_or_not, train
from torch import Tensor, nn

import tigon
from helpers import relative_error
from tigon.ops import products
from tigon.ops.accumulation_fusion import GradientBuffers, accumulation_fusion, gradients_into
from tigon.techniques import TECHNIQUES
from tigon.techniques.accumulation import fused_linear
from tigon.techniques.accumulation.fused_linear import fuse_linears
from tigon.techniques.keys.settings import Settings

LINEARS_OF_A_LAYER = 7


@pytest.fixture
def written_gradients(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The address of each gradient that a product wrote to, and whether the product added to it."""
    found: list[tuple[int, bool]] = []

    def watched(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
        found.append((out.data_ptr(), accumulate))
        products.product_into(a, b, out, accumulate)

    monkeypatch.setattr(fused_linear, "product_into", watched)
    return found


def micro_batches(model: Any, count: int, *, device: str = "cpu", autocast: bool = False) -> None:
    for number in range(count):
        ids = ids_of(2, 16, number, device)
        with accumulation_fusion():
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()


def gradients(model: Any, count: int = 3, **options: Any) -> dict[str, Tensor]:
    micro_batches(model, count, **options)
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@recomputed_or_not
@pytest.mark.parametrize(("dtype", "set_to_none"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_steps_equal_those_of_fused_layers_without_graphs_bit_for_bit(
    recomputes: bool, dtype: torch.dtype, set_to_none: bool
) -> None:
    options: dict[str, Any] = {"micro_batches": 3, "set_to_none": set_to_none}
    got = train(graphed("cpu", recomputes, fused=True)[0].to(dtype), "cpu", **options)
    want = train(model_of("cpu", recomputes, fused=True).to(dtype), "cpu", **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_one_micro_batch_has_the_gradients_of_unfused_layers() -> None:
    got, want = gradients(graphed(fused=True)[0], 1), gradients(model_of(), 1)
    assert got.keys() == want.keys()
    for name, expected in want.items():
        # layers that share an input round their sums of its gradient once less
        assert relative_error(got[name], expected) <= 1e-6, name


@on_each_device
@pytest.mark.parametrize(("precision", "recomputes"), [("fp32", True), ("bf16", False), ("autocast", True)])
def test_gradients_err_at_most_twice_the_usual_error(device: str, precision: str, recomputes: bool) -> None:
    dtype, autocast = torch.bfloat16 if precision == "bf16" else torch.float32, precision == "autocast"
    models = [model_of(device, recomputes), graphed(device, recomputes, fused=True)[0]]
    usual, got = (gradients(model.to(dtype), device=device, autocast=autocast) for model in models)
    # the weights of the exact model are those that the others have rounded
    want = gradients(model_of(device).to(dtype).double(), device=device)
    assert got.keys() == want.keys()
    for name, expected in want.items():
        error, before = relative_error(got[name], expected), relative_error(usual[name], expected)
        assert error <= 2 * before + 1e-7, f"{name}: {error:.2e}, usually {before:.2e}"


@recomputed_or_not
def test_first_micro_batch_writes_to_grad_in_the_products_and_later_ones_add(
    recomputes: bool, written_gradients: list[tuple[int, bool]]
) -> None:
    model, graphs = graphed(recomputes=recomputes, fused=True)
    of_layers = LINEARS_OF_A_LAYER * len(graphs.layers)
    layers = nn.ModuleList(model.model.layers)
    micro_batches(model, 1)
    for adds in (True, True, False):
        if not adds:
            model.zero_grad()
        written_gradients.clear()
        micro_batches(model, 1)
        addresses = {p.grad.data_ptr() for p in layers.parameters() if p.ndim == 2 and p.grad is not None}
        in_layers = [(address, added) for address, added in written_gradients if address in addresses]
        assert len(addresses) == len(in_layers) == of_layers
        assert {added for _, added in in_layers} == {adds}


def test_only_the_other_gradients_are_added_after_a_layers_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, graphs = graphed(fused=True, attention_bias=True)
    micro_batches(model, 1)
    added: list[int] = []
    plain = torch._foreach_add_

    def watched(own: list[Tensor], fresh: list[Tensor]) -> None:
        added.append(len(own))
        plain(own, fresh)

    monkeypatch.setattr(torch, "_foreach_add_", watched)
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *_: pytest.fail("a later micro-batch copies no gradient"))
    micro_batches(model, 1)
    assert added == [2 + 4] * len(graphs.layers)  # two norms and four biases


def test_autocast_sums_unrounded_products_in_fp32(written_gradients: list[tuple[int, bool]]) -> None:
    model, _ = graphed(fused=True)
    errors = []
    for one in (model, model_of(fused=True)):
        written_gradients.clear()
        got = gradients(one, autocast=True)
        assert written_gradients
        want = gradients(model_of().double())
        name = "model.layers.2.mlp.down_proj.weight"
        errors.append(relative_error(got[name], want[name]))
    assert model.model.layers[2].mlp.down_proj.weight.grad.dtype == torch.float32
    assert errors[0] <= 1.05 * errors[1]


@on_each_device
def test_autograd_grad_leaves_grad_alone_and_returns_the_share_of_its_pass(device: str) -> None:
    model, other = graphed(device, fused=True)[0], model_of(device, fused=True)
    for one in (model, other):
        micro_batches(one, 2, device=device)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    ids = ids_of(2, 16, 3, device)
    with accumulation_fusion():
        shares = [
            torch.autograd.grad(one(input_ids=ids, labels=ids).loss, [*one.parameters()]) for one in (model, other)
        ]
    for got, want in zip(*shares, strict=True):
        torch.testing.assert_close(got, want)
    assert_equal({name: p.grad for name, p in model.named_parameters()}, before)


@on_each_device
def test_hooks_see_each_micro_batchs_share_and_sum(device: str) -> None:
    seen: list[list[Tensor]] = []
    for model in (model_of(device, fused=True), graphed(device, fused=True)[0]):
        micro_batches(model, 1, device=device)  # a hook before the capture is refused
        model.zero_grad()
        seen.append([])
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.register_post_accumulate_grad_hook(lambda p, into=seen[-1]: into.append(p.grad.clone()))
        if device == "cuda":  # on the CPU the replay calls it too
            weight.register_hook(lambda grad, into=seen[-1]: into.append(grad.clone()))
        micro_batches(model, 3, device=device)
    assert len(seen[0]) == (6 if device == "cuda" else 3)
    for got, want in zip(*seen, strict=True):
        torch.testing.assert_close(got, want)


def test_weight_with_several_products_gets_their_sum(written_gradients: list[tuple[int, bool]]) -> None:
    def shared(model: Any) -> Any:
        """One weight for two fused layers, and one for a fused layer and an ordinary product."""
        for layer in model.model.layers:
            layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
            layer.self_attn.k_proj.weight = layer.self_attn.v_proj.weight
            layer.self_attn.v_proj.forward = nn.Linear.forward.__get__(layer.self_attn.v_proj)
        return model

    got, want = shared(graphed(fused=True)[0]), shared(model_of())
    pairs = zip(gradients(got).items(), gradients(want).items(), strict=True)
    assert written_gradients
    for (name, grad), (_, expected) in pairs:
        assert relative_error(grad, expected) <= 1e-6, name


def test_frozen_weights_and_adapters_train_as_without_fusion(written_gradients: list[tuple[int, bool]]) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: Any) -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))

    def partly(model: Any) -> Any:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[1].mlp.requires_grad_(False)
        return model

    for change, fuses in ((adapted, False), (partly, True)):
        plain, fused = change(model_of()), change(model_of())
        fuse_linears(fused)
        graphs_of(fused.get_base_model() if change is adapted else fused)
        if change is adapted:
            fused.enable_input_require_grads()
            plain.enable_input_require_grads()
        written_gradients.clear()
        got, want = gradients(fused), gradients(plain)
        assert bool(written_gradients) == fuses and got.keys() == want.keys()
        for name, expected in want.items():
            assert relative_error(got[name], expected) <= 1e-6, name


def test_fp8_layers_return_their_gradients(written_gradients: list[tuple[int, bool]]) -> None:
    results: list[dict[str, Tensor]] = []
    for model in (graphed()[0], graphed()[0]):
        tigon.patch_fp8(model.bfloat16(), bf16_layers=0)
        if results:
            fuse_linears(model.model)
        results.append(gradients(model))
    assert not written_gradients
    assert_equal(*results)


def test_batches_beyond_the_graphs_add_to_the_same_gradients() -> None:
    models = model_of(recomputes=False, fused=True), graphed(recomputes=False, fused=True)[0]
    for model in models:
        for _ in range(2):
            losses = [model(input_ids=ids, labels=ids).loss for ids in (ids_of(2, 16, n, "cpu") for n in range(2))]
            with accumulation_fusion():
                losses[0].backward()
                losses[1].backward()
    for got, want in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_buffer_of_another_layout_or_dtype_is_left_alone() -> None:
    layer = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    fuse_linears(nn.ModuleList([layer]))
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    for buffer in (torch.zeros(4, 3).t(), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 5), None):
        with gradients_into(GradientBuffers([(layer.weight, buffer)])):
            (grad,) = torch.autograd.grad(layer(x).sum(), [layer.weight])
        assert torch.equal(grad, torch.full_like(grad, 2.0)) and (buffer is None or not buffer.any())
    wide = torch.ones(3, 4)
    with gradients_into(GradientBuffers([(layer.weight, wide)], adds=True)):
        (grad,) = torch.autograd.grad(layer(x).sum(), [layer.weight], allow_unused=True)
    assert grad is None and torch.equal(wide, torch.full_like(wide, 3.0))


@pytest.mark.parametrize("recomputes", [False, True])
def test_all_fusions_together_err_at_most_twice_the_usual_error(recomputes: bool) -> None:
    together = model_of(recomputes=recomputes).bfloat16()
    tigon.patch(together)
    fuse_linears(together)
    graphs_of(together, recomputes)
    usual, got = gradients(model_of(recomputes=recomputes).bfloat16()), gradients(together)
    want = gradients(model_of().bfloat16().double())
    assert got.keys() == want.keys()
    for name, expected in want.items():
        error, before = relative_error(got[name], expected), relative_error(usual[name], expected)
        assert error <= 2 * before + 1e-7, f"{name}: {error:.2e}, usually {before:.2e}"


def test_a_recipe_may_choose_both() -> None:
    both = Settings.of(
        {
            "train.gradient_accumulation_fusion": True,
            "train.cuda_graphs": True,
            "train.gradient_accumulation": 2,
            "train.precision": "bf16",
            "train.checkpointing": "none",
        }
    )
    for name in ("accumulation-fusion", "cuda-graphs"):
        assert TECHNIQUES[name].used_by(both)
