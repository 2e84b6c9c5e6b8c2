"""PEFT's LoRA layers under `tigon.patch`: the fused op where it computes the same, PEFT's own forward elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tigon
from tigon.models.seams import lora

peft = pytest.importorskip("peft")


def adapted(**options: Any) -> Any:
    """A tiny Llama in bf16 with fp32 adapters that change its results."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return peft.get_peft_model(transformers.LlamaForCausalLM(config).bfloat16(), peft.LoraConfig(**settings))


def only_lora(model: Any) -> Any:
    """Patch nothing but the adapters."""
    flags = dict.fromkeys(("rms_norm", "layer_norm", "rope", "mlp", "cross_entropy", "linear_cross_entropy"), False)
    return tigon.patch(model, **flags)


@contextmanager
def calls_of_the_op(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments of every layer that a patched layer computes, alone or with its siblings."""
    seen: list[Any] = []
    real, real_together = lora.ops.lora_linear, lora.ops.lora_linears

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return real(*args, **kwargs)

    def spy_together(x: Any, layers: Any) -> Any:
        seen.extend({"adapter_x": None, "together": len(layers)} for _ in layers)
        return real_together(x, layers)

    with monkeypatch.context() as patched:
        patched.setattr(lora.ops, "lora_linear", spy)
        patched.setattr(lora.ops, "lora_linears", spy_together)
        yield seen


def step(model: nn.Module, autocast: bool = True) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one forward and backward pass."""
    ids = torch.arange(24).view(2, 12) % 64
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative Frobenius distance of all gradients together."""
    error = sum(float((got[n] - expected[n]).double().square().sum()) for n in expected)
    return float((error / sum(float(t.double().square().sum()) for t in expected.values())) ** 0.5)


def test_patched_adapters_are_no_farther_from_fp32_than_pefts(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = step(adapted().float(), autocast=False)
    unfused = step(adapted())
    model = adapted()
    assert only_lora(model).replaced[0].op == "lora_linear"
    with calls_of_the_op(monkeypatch) as seen:
        fused = step(model)
    assert sorted(kwargs.get("together", 1) for kwargs in seen) == [1, 1, 2, 2, 3, 3, 3]
    assert fused[1].keys() == unfused[1].keys()
    assert all(t.dtype == torch.float32 for t in fused[1].values())
    assert abs(fused[0] - truth[0]) <= 2 * abs(unfused[0] - truth[0]) + 2**-8 * truth[0]
    assert distance(fused[1], truth[1]) <= 2 * distance(unfused[1], truth[1])


def test_undo_gives_back_pefts_results_to_the_bit() -> None:
    model = adapted()
    before = step(model)
    report = only_lora(model)
    assert step(model)[0] != before[0]
    report.undo()
    after = step(model)
    assert after[0] == before[0] and all(torch.equal(after[1][n], t) for n, t in before[1].items())


def _merged(model: Any) -> None:
    model.merge_adapter()


def _two_active(model: Any) -> None:
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])


def _hooked(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.base_layer.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize("change", [_merged, _two_active, _hooked])
def test_layer_that_the_op_cannot_compute_now_runs_pefts_forward(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, same = adapted(), adapted()
    only_lora(model)
    for each in (model, same):
        torch.manual_seed(3)
        change(each)
    ids = torch.arange(12).view(1, 12)
    with calls_of_the_op(monkeypatch) as seen, torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(input_ids=ids).logits, same(input_ids=ids).logits)
    assert not seen


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits: torch.Tensor = model(input_ids=torch.arange(24).view(2, 12)).logits
    return logits


def test_reference_without_its_adapters_equals_a_policy_with_new_ones_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both take the same products, so that the rewards of the first step are 0."""
    model = adapted(init_lora_weights=True).train()
    only_lora(model)
    policy = logits_of(model)
    with model.disable_adapter(), calls_of_the_op(monkeypatch) as seen:
        assert torch.equal(logits_of(model), policy)
    assert seen


def test_disabled_adapters_change_nothing_and_draw_no_dropout() -> None:
    model, plain = adapted(lora_dropout=0.5).train(), adapted(lora_dropout=0.5).train()
    only_lora(model)
    with model.disable_adapter(), plain.disable_adapter():
        torch.manual_seed(5)
        got = logits_of(model)
        drawn = torch.rand(3)
        torch.manual_seed(5)
        expected = logits_of(plain)
        assert torch.equal(drawn, torch.rand(3))
    assert (got - expected).abs().max() <= 2**-6 * expected.abs().max()


def test_disabled_adapters_under_gradients_run_pefts_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, same = adapted(), adapted()
    only_lora(model)
    ids = torch.arange(12).view(1, 12)
    with model.disable_adapter(), same.disable_adapter(), calls_of_the_op(monkeypatch) as seen:
        assert torch.equal(model(input_ids=ids).logits, same(input_ids=ids).logits)
    assert not seen


def test_fp32_adapter_of_a_bf16_layer_without_autocast_runs_pefts_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    only_lora(model)
    with calls_of_the_op(monkeypatch) as seen:
        step(model, autocast=False)
    assert not seen


def test_dropout_reaches_the_adapter_alone_and_only_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(lora_dropout=0.5)
    only_lora(model)
    with calls_of_the_op(monkeypatch) as seen:
        step(model.train())
        assert all(kwargs["adapter_x"] is not None for kwargs in seen)
        seen.clear()
        step(model.eval())
        assert seen and all(kwargs["adapter_x"] is None for kwargs in seen)


def moved(model: Any) -> Any:
    """A model whose trained lengths of rows are not the initial ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.linspace(0.5, 1.5, parameter.numel()))
    return model


@contextmanager
def calls_of_dora(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    seen: list[Any] = []
    real = lora.dora_linear
    with monkeypatch.context() as patched:
        patched.setattr(lora, "dora_linear", lambda *a, **k: seen.append(k) or real(*a, **k))
        yield seen


def test_dora_equals_pefts_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"use_dora": True, "bias": "lora_only"}
    model, plain = (moved(adapted(**options).double()) for _ in range(2))
    only_lora(model)
    with calls_of_dora(monkeypatch) as seen:
        got = step(model, autocast=False)
    expected = step(plain, autocast=False)
    assert len(seen) == 7 and got[0] == pytest.approx(expected[0], abs=1e-12)
    assert sum("magnitude" in name for name in expected[1]) == 7 and got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-9, atol=1e-12)


def test_dora_is_no_farther_from_fp32_than_pefts() -> None:
    fused, unfused = 0.0, 0.0
    for seed in range(3):

        def dora(seed: int = seed) -> Any:
            model = moved(adapted(use_dora=True))
            torch.manual_seed(seed)
            for name, parameter in model.named_parameters():
                if "lora_A" in name or "lora_B" in name:
                    nn.init.normal_(parameter, std=0.2)
            return model

        truth, peft_step, model = step(dora().float(), autocast=False), step(dora()), dora()
        only_lora(model)
        got = step(model)
        assert abs(got[0] - truth[0]) <= 2**-8 * truth[0]
        fused, unfused = fused + distance(got[1], truth[1]), unfused + distance(peft_step[1], truth[1])
    assert fused <= 1.5 * unfused


def test_new_dora_adapters_change_nothing_and_disabled_ones_are_left_out() -> None:
    model, plain = adapted(use_dora=True, init_lora_weights=True), adapted(use_dora=True, init_lora_weights=True)
    only_lora(model)
    base = logits_of(plain.unload())
    for context in (nullcontext, model.disable_adapter):
        with context():
            assert (logits_of(model) - base).abs().max() <= 2**-6 * base.abs().max()
    moved(model)
    assert (logits_of(model) - base).abs().max() > 2**-4 * base.abs().max()
    with model.disable_adapter():
        assert (logits_of(model) - base).abs().max() <= 2**-6 * base.abs().max()


def test_dora_with_dropout_runs_pefts_forward_in_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(use_dora=True, lora_dropout=0.5)
    only_lora(model)
    with calls_of_dora(monkeypatch) as seen:
        step(model.train())
        assert not seen
        step(model.eval())
        assert len(seen) == 7


def test_model_without_adapters_is_refused_if_they_are_asked_for() -> None:
    model = adapted().unload()
    with pytest.raises(tigon.errors.PatchError, match="lora: nothing in this LlamaForCausalLM can run it"):
        tigon.patch(model, lora=True)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_4_bit_layer_is_no_farther_from_fp32_than_pefts(dora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model, whole = adapted(use_dora=dora), adapted(use_dora=dora).float()
    twins = dict(whole.named_modules())
    for path, module in list(model.named_modules()):
        if isinstance(module, peft.tuners.lora.Linear):
            dense = module.base_layer
            layer = bitsandbytes.nn.Linear4bit(
                dense.in_features, dense.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            layer.weight = bitsandbytes.nn.Params4bit(dense.weight.data.float(), requires_grad=False, quant_type="nf4")
            module.base_layer = layer.to("cpu")
            stored = module.base_layer.weight
            with torch.no_grad():
                twins[path].base_layer.weight.copy_(
                    bitsandbytes.functional.dequantize_4bit(stored.data, stored.quant_state)
                )
    truth, unfused = step(whole, autocast=False), step(model)
    only_lora(model)
    with (calls_of_dora if dora else calls_of_the_op)(monkeypatch) as seen:
        fused = step(model)
    assert len(seen) == 7
    assert fused[1].keys() == unfused[1].keys()
    assert abs(fused[0] - truth[0]) <= 2 * abs(unfused[0] - truth[0]) + 2**-8 * truth[0]
    assert distance(fused[1], truth[1]) <= (3 if dora else 2) * distance(unfused[1], truth[1])


def test_weight_that_a_function_makes_gives_the_result_of_the_weight() -> None:
    torch.manual_seed(1)
    x, w, a, b = (torch.randn(*shape, requires_grad=True) for shape in ((5, 8), (6, 8), (2, 8), (6, 2)))
    made: list[int] = []

    def weight() -> torch.Tensor:
        made.append(1)
        return w.detach().clone()

    results = []
    for each in (w.detach(), weight):
        y = tigon.lora_linear(x, each, a, b, scaling=0.5)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, a, b))))
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))
    assert len(made) == 2, "once in the forward, once in the backward"


def linear_of_8() -> tuple[torch.Tensor, list[int], Any]:
    """x, a list that grows with each product of the frozen weight, and a layer that squares its result's input."""
    torch.manual_seed(1)
    x, w, a, b = (torch.randn(*shape) for shape in ((2, 5, 8), (6, 8), (2, 8), (6, 2)))
    made: list[int] = []

    def weight() -> torch.Tensor:
        made.append(1)
        return w

    a.requires_grad_()
    return x.requires_grad_(), made, lambda x: tigon.lora_linear(x * 1.5, weight, a, b)


def test_recomputation_leaves_out_the_product_of_a_last_layer() -> None:
    """One product forward and one for the gradient of x, as without a checkpoint."""
    x, made, layer = linear_of_8()
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert len(made) == 2
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    assert len(made) == 4 and torch.equal(got, expected)


def test_tensors_that_hooks_hold_are_kept_for_as_long_as_the_graph() -> None:
    x, _, layer = linear_of_8()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = layer(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=keep)[0] for keep in (True, False))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="freed by an earlier backward"):
        torch.autograd.grad(y, x)


def test_layer_that_is_called_with_another_input_than_its_sibling_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the keys of cross-attention, which read another sequence than the queries."""
    model = adapted()
    only_lora(model)
    attention = model.base_model.model.model.layers[0].self_attn
    x, other = torch.randn(1, 3, 32).bfloat16(), torch.randn(1, 3, 32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        expected = [attention.q_proj(x), attention.k_proj(other)]
        with calls_of_the_op(monkeypatch) as seen:
            got = [attention.q_proj(x), attention.k_proj(other)]
    assert all(torch.equal(p, q) for p, q in zip(got, expected, strict=True))
    assert not any("together" in kwargs for kwargs in seen), "after the first miss"


def test_result_that_a_sibling_left_is_not_used_after_a_weight_has_changed() -> None:
    model = adapted()
    only_lora(model)
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.randn(1, 3, 32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        attention.q_proj(x)
        attention.k_proj.lora_B["default"].weight.mul_(3)
        stale = attention.k_proj(x)
        attention.v_proj(x)
        assert torch.equal(stale, attention.k_proj(x.clone()))


def test_results_that_siblings_left_do_not_outlive_their_use() -> None:
    model = adapted()
    only_lora(model)
    step(model)
    assert not any(siblings.results or siblings.x is not None for siblings in lora._SIBLINGS.values())


def test_kernel_of_4_bit_weights_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    layer = pytest.importorskip("bitsandbytes").nn.Linear4bit(64, 8, bias=False, quant_type="nf4").to("cpu")
    right = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    for offset, made_by_ours in ((0.0, True), (0.1, False)):
        monkeypatch.setattr(lora, "_AGREES", {})
        monkeypatch.setattr(lora, "dequantiser", lambda *_, offset=offset: lambda dtype: (right + offset).to(dtype))
        if made_by_ours:
            lora._dequantise(layer)
        else:
            with pytest.warns(UserWarning, match="differs from bitsandbytes'"):
                made = lora._dequantise(layer)
            assert torch.equal(made(), right)
        assert {torch.device("cpu"): made_by_ours} == lora._AGREES
