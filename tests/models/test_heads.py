"""The head as it occurs: wrapped, hooked, sharded, quantised. Right, or refused; never silently something else."""

from __future__ import annotations

import copy

import pytest
import torch
from models_helpers import HEADS, VOCAB, assert_close, batch, call, llama, loss_and_gradients, twins
from torch import nn

from tigon.errors import PatchError
from tigon.models import DeferredLogits, MaterializedLogitsWarning, patch
from tigon.models.seams.base import PatchedModule

INPUTS = batch()
TRUNK = ("q_proj", "gate_proj")
each_head = pytest.mark.parametrize("family", HEADS)


def lora(model, targets, kind="lora", **options):
    peft = pytest.importorskip("peft")
    adapter = options.pop("adapter_name", "default")
    torch.manual_seed(3)
    configs = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, use_dora=True, **options),
        "ia3": lambda: peft.IA3Config(
            target_modules=targets, feedforward_modules=[], init_ia3_weights=False, **options
        ),
    }
    return peft.get_peft_model(model, configs[kind](), adapter_name=adapter)


@each_head
def test_full_backward_hook_on_the_head_fires_with_the_gradient_of_hidden(family):
    patched, original = twins(family)
    patch(patched)
    seen = []
    for model in (original, patched):
        model.lm_head.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_in[0]))
    want = loss_and_gradients(original, call(**INPUTS))
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)
    torch.testing.assert_close(seen[1].view_as(seen[0]), seen[0], rtol=1e-4, atol=1e-7)
    assert type(patched(**INPUTS).logits) is DeferredLogits


def test_hook_with_its_own_autograd_function_is_refused():
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    model = llama()
    patch(model)
    model.lm_head.register_forward_hook(lambda m, args, logits: Gather.apply(logits))
    with pytest.warns(MaterializedLogitsWarning):
        loss = model(**INPUTS).loss
    with pytest.raises(PatchError, match="custom autograd function"):
        loss.backward()
    model.zero_grad(set_to_none=True)
    model(**INPUTS, skip_logits=False).loss.backward()
    assert model.lm_head.weight.grad is not None


@each_head
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("order", ["patch-then-wrap", "wrap-then-patch"])
def test_adapter_on_the_head_is_trained_and_without_logits_if_it_is_lora(kind, order, family):
    plain, model = twins(family)
    want = loss_and_gradients(original := lora(plain, [*TRUNK, "lm_head"], kind), call(**INPUTS))
    assert any("lm_head" in name for name in want)
    if order == "patch-then-wrap":
        patch(model)
        wrapped = lora(model, [*TRUNK, "lm_head"], kind)
        with pytest.warns(UserWarning, match="full logits.*lm_head became"):
            got = loss_and_gradients(wrapped, call(**INPUTS))
    else:
        wrapped = lora(model, [*TRUNK, "lm_head"], kind)
        report = patch(wrapped)
        assert report.counts["cross_entropy"] == 1 and ("linear_cross_entropy" in report.counts) == (kind == "lora")
        assert any(row.paths == ("lm_head",) for row in report.left_alone) == (kind != "lora")
        got = loss_and_gradients(wrapped, call(**INPUTS))
    assert_close(got, want, 2e-5)
    fused = kind == "lora" and order == "wrap-then-patch"
    assert type(wrapped(**INPUTS).logits) is (DeferredLogits if fused else torch.Tensor)
    assert original is not wrapped


@each_head
@pytest.mark.parametrize("adapter", ["default", "foo"])
@pytest.mark.parametrize("order", ["patch-then-wrap", "wrap-then-patch"])
def test_modules_to_save_on_the_head_trains_its_copy_with_the_fused_loss(adapter, order, family):
    plain, model = twins(family)
    options = {"modules_to_save": ["lm_head"], "adapter_name": adapter}
    original = lora(plain, list(TRUNK), **options)
    if order == "patch-then-wrap":
        patch(model)
        wrapped = lora(model, list(TRUNK), **options)
    else:
        wrapped = lora(model, list(TRUNK), **options)
        assert patch(wrapped).counts["linear_cross_entropy"] == 2
    # The copy differs from the original head, so that using the wrong one shows.
    for m in (original, wrapped):
        with torch.no_grad():
            m.get_base_model().lm_head.modules_to_save[adapter].weight.mul_(1.5)
    want = loss_and_gradients(original, call(**INPUTS))
    assert f"base_model.model.lm_head.modules_to_save.{adapter}.weight" in want
    assert_close(loss_and_gradients(wrapped, call(**INPUTS)), want, 2e-5)
    assert type(wrapped(**INPUTS).logits) is DeferredLogits
    with original.disable_adapter(), wrapped.disable_adapter():
        torch.testing.assert_close(wrapped(**INPUTS).loss, original(**INPUTS).loss)


def test_merging_an_adapter_on_the_head_brings_the_fused_loss_back():
    peft = pytest.importorskip("peft")
    plain, model = twins()
    patch(model)
    merged = lora(model, ["lm_head"]).merge_and_unload()
    want = lora(plain, ["lm_head"]).merge_and_unload()
    assert not any(isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in merged.modules())
    merged.requires_grad_(True), want.requires_grad_(True)
    assert_close(loss_and_gradients(merged, call(**INPUTS)), loss_and_gradients(want, call(**INPUTS)), 2e-5)
    assert type(merged(**INPUTS).logits) is DeferredLogits


@each_head
def test_quantised_head_is_left_to_its_own_forward(family):
    """A stand-in for bitsandbytes: an nn.Linear subclass whose weight is not what it multiplies by."""

    class Linear8bit(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.detach() * 2)

    patched, original = twins(family)
    for model in (patched, original):
        model.lm_head.__class__ = Linear8bit
    report = patch(patched)
    (left,) = report.left_alone
    assert left.paths == ("lm_head",) and "Linear8bit" in left.reason
    want = loss_and_gradients(original, call(**INPUTS))
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)


@each_head
@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrized_head_trains_its_parametrization(when, family):
    patched, original = twins(family, tie_word_embeddings=False)
    if when == "after":
        patch(patched)
    for model in (patched, original):
        nn.utils.parametrizations.weight_norm(model.lm_head)
    if when == "before":
        assert any("parametrized" in row.reason for row in patch(patched).left_alone)
    want = loss_and_gradients(original, call(**INPUTS))
    assert sum("lm_head" in name for name in want) == 2
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want, 2e-5)


def test_resized_head_is_noticed_and_fused_after_patching_again():
    patched, original = twins()
    patch(patched)
    for model in (patched, original):
        torch.manual_seed(0)
        model.resize_token_embeddings(VOCAB + 6, mean_resizing=False)
    want = loss_and_gradients(original, call(**INPUTS))
    if not isinstance(patched.lm_head, PatchedModule):
        with pytest.warns(UserWarning, match=r"patch\(model\) again"):
            assert_close(loss_and_gradients(patched, call(**INPUTS)), want)
        assert patch(patched).counts == {"linear_cross_entropy": 1}
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)
    assert type(patched(**INPUTS).logits) is DeferredLogits


def test_accelerate_device_map_hooks_keep_working_and_are_kept_by_undo():
    accelerate = pytest.importorskip("accelerate")
    patched, original = twins()
    for model in (patched, original):
        for module in model.modules():
            if not list(module.children()):
                accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook(io_same_device=True))
    report = patch(patched)
    assert report.counts["rms_norm"] == 5 and report.counts["linear_cross_entropy"] == 1
    want = loss_and_gradients(original, call(**INPUTS))
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)
    assert type(patched(**INPUTS).logits) is DeferredLogits
    report.undo()
    got = loss_and_gradients(patched, call(**INPUTS))
    assert all(torch.equal(got[k], want[k]) for k in want)


# --- quantised bases, and heads of another dtype ----------------------------------------------------------------------


class Linear8bit(nn.Linear):
    """A stand-in for a quantised projection: int8 weights and scales, expanded inside its forward, never trained."""

    def quantise(self):
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((self.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def quantised(model):
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            module.__class__ = Linear8bit
            module.quantise()
    return model


@pytest.mark.parametrize("order", ["patch-then-wrap", "wrap-then-patch"])
@pytest.mark.parametrize("base", [quantised, lambda model: model], ids=["quantised", "plain"])
@each_head
def test_adapters_in_the_trunk_keep_the_fused_loss(order, base, family):
    plain, model = (base(m) for m in twins(family))
    for m in (plain, model):
        m.requires_grad_(False)
    want = loss_and_gradients(lora(plain, list(TRUNK)), call(**INPUTS))
    if order == "patch-then-wrap":
        patch(model)
        wrapped = lora(model, list(TRUNK))
    else:
        wrapped = lora(model, list(TRUNK))
        assert patch(wrapped).counts["linear_cross_entropy"] == 1
    assert_close(loss_and_gradients(wrapped, call(**INPUTS)), want, 2e-5)
    assert all("lora" in name or name == "loss" for name in want)
    assert type(wrapped(**INPUTS).logits) is DeferredLogits


def test_qlora_with_bitsandbytes_trains_as_unpatched():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    plain, _ = twins(hidden_size=64, head_dim=16, intermediate_size=128)
    for parent in list(plain.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                linear = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                )
                linear.load_state_dict(child.state_dict())
                setattr(parent, name, linear.to("cpu"))
    model = copy.deepcopy(plain)
    want = loss_and_gradients(lora(plain, list(TRUNK)), call(**INPUTS))
    wrapped = lora(model, list(TRUNK))
    assert patch(wrapped).counts["swiglu"] == 2
    assert_close(loss_and_gradients(wrapped, call(**INPUTS)), want, 2e-5)


@each_head
def test_fp32_head_over_a_bf16_body_keeps_its_precision(family):
    """Hidden states are cast up before the head, as people do who keep the head in fp32."""
    original, patched = twins(family, tie_word_embeddings=False)
    for model in (original, patched):
        model.to(torch.bfloat16).lm_head.float()
        model.lm_head.register_forward_pre_hook(lambda m, args: (args[0].float(),))
    assert patch(patched).counts["linear_cross_entropy"] == 1
    got, want = (loss_and_gradients(model, call(**INPUTS)) for model in (patched, original))
    assert got["lm_head.weight"].dtype == torch.float32
    torch.testing.assert_close(got["loss"], want["loss"], rtol=5e-3, atol=0)
    # The trunks differ by bf16 roundings; from the same hidden states on, nothing does.
    hidden = torch.randn(2, 19, original.lm_head.in_features, generator=torch.Generator().manual_seed(1))
    for model in (original, patched):
        model.lm_head.register_forward_pre_hook(lambda m, args: (hidden,))
    got, want = (loss_and_gradients(model, call(**INPUTS)) for model in (patched, original))
    assert_close({k: got[k] for k in ("loss", "lm_head.weight")}, {k: want[k] for k in ("loss", "lm_head.weight")})


def test_head_of_another_dtype_is_computed_in_the_wider_dtype():
    """PyTorch refuses the product; the op promotes, as documented."""
    patched, original = twins()
    for model in (original, patched):
        model.to(torch.bfloat16).lm_head.float()
    with pytest.raises(RuntimeError, match="dtype"):
        original(**INPUTS)
    patch(patched)
    patched(**INPUTS).loss.backward()
    assert patched.lm_head.weight.grad.dtype == torch.float32


@each_head
@pytest.mark.parametrize("frozen", ["trunk", "head"])
def test_half_frozen_model_trains_its_other_half(family, frozen):
    patched, original = twins(family, tie_word_embeddings=False)
    patch(patched)
    for model in (patched, original):
        (model.model if frozen == "trunk" else model.lm_head).requires_grad_(False)
    want = loss_and_gradients(original, call(**INPUTS))
    assert ("lm_head.weight" in want) == (frozen == "trunk") and len(want) > 1
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)
    assert type(patched(**INPUTS).logits) is DeferredLogits


@pytest.mark.parametrize("family, attribute", [("gemma2", "final_logit_softcapping"), ("granite", "logits_scaling")])
def test_scale_or_cap_edited_after_the_patch_takes_effect(family, attribute):
    patched, original = twins(family)
    patch(patched)
    for value in (5.0, 1.5):
        for model in (patched, original):
            setattr(model.config, attribute, value)
        want = loss_and_gradients(original, call(**INPUTS))
        assert_close(loss_and_gradients(patched, call(**INPUTS)), want)
        assert type(patched(**INPUTS).logits) is DeferredLogits
