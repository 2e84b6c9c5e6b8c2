"""The engine: what it changes, what it refuses, how it is undone; nothing outside the one instance."""

from __future__ import annotations

import copy
import inspect
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from models_helpers import SIZES, assert_close, batch, call, llama, loss_and_gradients
from torch import nn

import forks
import tigon
from tigon.errors import OptionError, PatchError
from tigon.models import MODELS, AutoModelForCausalLM, patch
from tigon.models.patch import patch_like
from tigon.models.seams.base import PatchedModule

INPUTS = batch()


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def instance_state(model: nn.Module) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


def test_report_counts_every_replaced_module_and_prints_them():
    report = patch(llama())
    assert report.counts == {"rms_norm": 5, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1, "cross_entropy": 1}
    text = str(report)
    assert "LlamaForCausalLM (model_type llama)" in text
    assert "model.layers.*.input_layernorm" in text and "left alone" not in text
    assert json.loads(json.dumps(report.to_dict()))["counts"] == report.counts


def test_equal_model_is_patched_from_the_first_ones_report(monkeypatch):
    first, second = llama(), llama()
    report = patch(first)
    monkeypatch.setattr(sys.modules["tigon.models.patch"], "_judge", lambda *_: pytest.fail("numbers were compared"))
    patch_like(second, report.seams)
    assert [type(m) for m in second.modules()] == [type(m) for m in first.modules()]


def test_undo_restores_the_unpatched_model_bit_for_bit():
    model = llama()
    before, state = classes(model), instance_state(model)
    want = loss_and_gradients(model, call(**INPUTS))
    model.zero_grad(set_to_none=True)
    report = patch(model)
    loss_and_gradients(model, call(**INPUTS))
    model.zero_grad(set_to_none=True)
    report.undo()
    assert classes(model) == before and instance_state(model) == state
    got = loss_and_gradients(model, call(**INPUTS))
    assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    report.undo()  # a second time does nothing


def test_patching_twice_changes_nothing_and_adds_a_note():
    model = llama()
    first = patch(model)
    patched = classes(model)
    second = patch(model)
    assert classes(model) == patched and not second.replaced
    assert any("already patched" in note for note in second.notes)
    second.undo()  # it changed nothing, so it takes nothing back
    assert classes(model) == patched
    first.undo()
    assert not any(isinstance(m, PatchedModule) for m in model.modules())


def test_patching_again_with_other_flags_says_that_it_did_not_apply_them():
    model = llama()
    patch(model)
    assert any("rope=False" in note for note in patch(model, rope=False).notes)
    assert any("other flags" in note for note in patch(model, cross_entropy=False).notes)
    assert loss_and_gradients(model, call(**INPUTS))["loss"].isfinite()


def test_patching_again_adds_what_was_left_out():
    model = llama()
    patch(model, rms_norm=False)
    report = patch(model)
    assert report.counts == {"rms_norm": 5} and any("partly" in note for note in report.notes)


def test_a_flag_that_is_off_leaves_its_modules_alone():
    for flag, kind in (("rms_norm", "LlamaRMSNorm"), ("rope", "LlamaAttention"), ("mlp", "LlamaMLP")):
        model = llama()
        report = patch(model, **{flag: False})
        untouched = [m for m in model.modules() if type(m).__name__ == kind]
        assert untouched and not any(isinstance(m, PatchedModule) for m in untouched)
        assert f"switched off: {flag}" in report.notes


def test_removed_flag_is_an_option_error_that_says_what_to_do_without_it():
    model = llama()
    before = classes(model)
    with pytest.raises(OptionError, match=r"add_rms_norm is not a flag of tigon.patch any more; .* Leave it out"):
        patch(model, add_rms_norm=True)
    assert classes(model) == before


def test_unknown_flag_is_an_option_error_that_names_the_nearest():
    model = llama()
    with pytest.raises(OptionError, match=r"rmsnorm is not a flag of tigon.patch; the nearest is rms_norm"):
        patch(model, rmsnorm=True)
    with pytest.raises(OptionError, match=r"swiglu is not a flag of tigon.patch; the flags are rms_norm, "):
        patch(model, swiglu=True)
    with pytest.raises(OptionError, match="rope='no'"):
        patch(model, rope="no")
    assert not any(isinstance(m, PatchedModule) for m in model.modules())


def refuses_the_probe(self, *tensors):
    raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")


refuses_the_probe.__module__ = "liger_kernel.transformers.rms_norm"  # as a function of that package says


def test_modules_that_run_another_packages_kernels_are_named_with_the_way_on():
    """As Liger Kernel leaves them: other classes, forwards on the instances, and a model forward with its own loss."""
    model = llama()
    liger = "runs liger_kernel's code already"
    norm = type("LigerRMSNorm", (type(model.model.norm),), {"forward": refuses_the_probe})
    for module in [m for m in model.modules() if "RMSNorm" in type(m).__name__]:
        module.__class__ = norm
    before = classes(model)
    with pytest.raises(PatchError, match=rf"{liger} \(LigerRMSNorm\); load the model without liger_kernel's patch"):
        patch(model)
    assert classes(model) == before
    model = llama()
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(refuses_the_probe, layer.mlp)
    with pytest.raises(PatchError, match=rf"{liger} \(set on the instance\)"):
        patch(model)


def test_another_packages_loss_keeps_the_model_forward(monkeypatch):
    model = llama()

    def forward(self, *args, **kwargs):
        raise AssertionError

    forward.__module__ = "liger_kernel.transformers.model.llama"
    monkeypatch.setattr(type(model), "forward", forward)
    report = patch(model)
    assert "runs liger_kernel's code already" in str(report)
    assert not isinstance(model, PatchedModule)


def test_module_that_is_no_transformers_model_is_refused():
    with pytest.raises(PatchError, match="not a transformers model"):
        patch(nn.Linear(2, 2))


def test_a_flag_that_matches_nothing_is_an_error_and_changes_nothing():
    model = llama(hidden_act="relu")
    before = classes(model)
    with pytest.raises(PatchError, match=r"mlp: .*ReLU.*mlp=False"):
        patch(model)
    assert classes(model) == before
    assert "swiglu" not in patch(model, mlp=False).counts


def test_failure_half_way_through_takes_everything_back(monkeypatch):
    from tigon.models.seams import base

    model = llama()
    before = classes(model)
    calls = iter(range(100))
    original = base._set_class

    def fails_on_the_fifth(module, cls):
        if next(calls) == 4:
            raise PatchError("no")
        original(module, cls)

    monkeypatch.setattr(base, "_set_class", fails_on_the_fifth)
    with pytest.raises(PatchError, match="no"):
        patch(model)
    assert classes(model) == before


def test_gelu_llama_gets_geglu():
    for act in ("gelu", "gelu_pytorch_tanh"):
        model, original = llama(hidden_act=act), llama(hidden_act=act)
        assert patch(model).counts["geglu"] == 2
        torch.testing.assert_close(model(**INPUTS).loss, original(**INPUTS).loss)


def test_an_activation_exchanged_after_the_patch_is_used():
    model, original = llama(), llama()
    patch(model)
    for m in (model, original):
        m.model.layers[0].mlp.act_fn = nn.GELU(approximate="tanh")
        m.model.layers[1].mlp.act_fn = nn.ReLU()
    torch.testing.assert_close(model(**INPUTS).loss, original(**INPUTS).loss)


def test_model_is_patched_under_another_default_dtype():
    """from_pretrained builds under the checkpoint's dtype, and a patch may run there too."""
    model = llama(dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        report = patch(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.counts == patch(llama()).counts


def test_norm_with_another_formula_is_left_alone_and_reported():
    class OffsetRMSNorm(type(llama().model.norm)):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + self.weight

    model = llama()
    model.model.norm.__class__ = OffsetRMSNorm
    original = copy.deepcopy(model)
    report = patch(model)
    assert report.counts["rms_norm"] == 4
    (left,) = report.left_alone
    assert left.paths == ("model.norm",) and left.cls == "OffsetRMSNorm" and "differs" in left.reason
    torch.testing.assert_close(model(**INPUTS).loss, original(**INPUTS).loss)


def test_norm_without_its_eps_attribute_is_left_alone_and_reported():
    model = llama()
    norm = model.model.norm
    norm.epsilon = norm.variance_epsilon
    del norm.variance_epsilon
    (left,) = patch(model).left_alone
    assert "variance_epsilon" in left.reason


def test_eps_zero_and_an_edited_eps_are_used_as_they_are():
    for eps in (0.0, 1e-2):
        model, original = llama(rms_norm_eps=eps), llama(rms_norm_eps=eps)
        patch(model)
        torch.testing.assert_close(model(**INPUTS).loss, original(**INPUTS).loss, rtol=1e-6, atol=0)
    model.model.norm.variance_epsilon = original.model.norm.variance_epsilon = 0.5
    torch.testing.assert_close(model(**INPUTS).loss, original(**INPUTS).loss, rtol=1e-6, atol=0)


def test_module_whose_forward_is_set_on_the_instance_is_left_alone_and_reported():
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: x * 0
    report = patch(model)
    (left,) = report.left_alone
    assert left.paths == ("model.layers.0.mlp",) and "set on the instance" in left.reason
    assert not isinstance(mlp, PatchedModule)


def test_subclass_that_calls_super_is_patched_and_one_that_does_not_is_reported():
    base = type(llama())

    class Logged(base):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Own(base):
        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model = llama()
    model.__class__ = Logged
    original = copy.deepcopy(model)
    assert patch(model).counts["linear_cross_entropy"] == 1
    torch.testing.assert_close(model(**INPUTS).loss, original(**INPUTS).loss)

    model = llama()
    model.__class__ = Own
    want = model(**INPUTS)
    (left,) = patch(model).left_alone
    assert "does not call" in left.reason
    torch.testing.assert_close(model(**INPUTS), want)


@pytest.mark.filterwarnings("ignore::tigon.models.MaterializedLogitsWarning")
def test_subclass_that_passes_other_labels_or_logits_gets_the_loss_of_those():
    from transformers.modeling_outputs import CausalLMOutput

    base = type(llama())

    class Own(base):
        """Calls the head twice; `choose` says which logits and labels make the loss."""

        def forward(self, input_ids=None, labels=None, choose=None, **kwargs):
            hidden = self.model(input_ids).last_hidden_state
            first, second = self.lm_head(hidden), self.lm_head(hidden * 0.5)
            logits, labels, *count = choose(first, second, labels)
            count = {"num_items_in_batch": count[0]} if count else {}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **count)
            return CausalLMOutput(loss=loss, logits=second)

    patched, original = llama(), llama()
    for model in (patched, original):
        model.__class__ = Own
    assert patch(patched).counts["linear_cross_entropy"] == 1
    before = {
        model: model(**batch(seed=9), choose=lambda a, b, labels: (b, labels)).logits for model in (patched, original)
    }

    choices = {
        "first": lambda model: lambda a, b, labels: (a, labels),
        "second": lambda model: lambda a, b, labels: (b, labels),
        "equal labels, another object": lambda model: lambda a, b, labels: (a, labels.clone()),
        "other labels": lambda model: lambda a, b, labels: (a, labels.flip(0)),
        "logits of an earlier step": lambda model: lambda a, b, labels: (before[model], labels),
        "a sum": lambda model: lambda a, b, labels: (a + b, labels),
        "another count than the caller's": lambda model: lambda a, b, labels: (a, labels, 8),
    }
    for name, choose in choices.items():
        inputs = {**INPUTS, "num_items_in_batch": 5} if "count" in name else INPUTS
        if "earlier" in name:  # a graph that has no gradient left
            got, want = (model(**inputs, choose=choose(model)).loss for model in (patched, original))
            torch.testing.assert_close(got, want)
        else:
            want = loss_and_gradients(original, call(**inputs, choose=choose(original)))
            assert_close(loss_and_gradients(patched, call(**inputs, choose=choose(patched))), want)


def test_models_without_a_head_get_the_layers_and_say_so():
    from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaModel

    for cls in (LlamaModel, LlamaForSequenceClassification):
        model = cls(LlamaConfig(**SIZES))
        report = patch(model)
        assert report.counts["rms_norm"] == 5 and "cross_entropy" not in report.counts
        assert any("no lm_head" in row.reason for row in report.left_alone)


def test_modules_of_tigon_in_a_model_stay_and_satisfy_their_flag():
    model = llama()
    for layer in model.model.layers:
        layer.input_layernorm = layer.post_attention_layernorm = tigon.nn.RMSNorm(SIZES["hidden_size"])
    model.model.norm = tigon.nn.RMSNorm(SIZES["hidden_size"])
    report = patch(model, rms_norm=True)
    assert "rms_norm" not in report.counts and report.counts["swiglu"] == 2
    assert type(model.model.norm) is tigon.nn.RMSNorm
    assert "partly patched before" in str(report)


def test_custom_loss_function_is_respected_and_reported():
    def half(logits, labels, vocab_size, **kwargs):
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1)) / 2

    model, original = llama(), llama()
    original.loss_function = half
    want = original(**INPUTS).loss

    model.loss_function = half  # before
    (left,) = patch(model).left_alone
    assert "half" in left.reason
    torch.testing.assert_close(model(**INPUTS).loss, want)

    model = llama()
    report = patch(model)
    model.loss_function = half  # after
    assert model.loss_function is half
    torch.testing.assert_close(model(**INPUTS).loss, want)
    report.undo()
    assert model.loss_function is half


@forks.forks
def test_a_pickled_model_is_patched_in_another_process(tmp_path):
    model = llama()
    patch(model)
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch; m = torch.load(sys.argv[1], weights_only=False).train(); ids = torch.arange(3, 12)[None];"
        "from tigon.models import DeferredLogits;"
        "out = m(input_ids=ids, labels=ids); assert type(out.logits) is DeferredLogits; print(out.loss.item())"
    )
    done = forks.python(str(tmp_path / "model.pt"), code=code, source=Path(tigon.__file__).parents[1])
    assert done.returncode == 0, done.stderr[-3000:]
    ids = torch.arange(3, 12)[None]
    assert float(done.stdout) == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-6)


def test_save_pretrained_writes_an_ordinary_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM as HuggingFaceAuto

    for name in ("grouped-query", "tied-llama3-rope"):
        model = llama(name)
        keys = list(model.state_dict())
        patch(model)
        assert list(model.state_dict()) == keys
        model.save_pretrained(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"] and "tigon" not in json.dumps(config)
        loaded = HuggingFaceAuto.from_pretrained(tmp_path / name)
        assert not isinstance(loaded, PatchedModule)
        for key, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name, rope=False, dtype="float32")
        assert isinstance(again, PatchedModule) and not isinstance(again.model.layers[0].self_attn, PatchedModule)
        torch.testing.assert_close(again.train()(**INPUTS).loss, model(**INPUTS).loss)


def test_auto_model_from_config_patches_and_refuses_unsupported_flags():
    from transformers import GPT2Config, LlamaConfig

    gpt2 = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20)
    for config in (LlamaConfig(**SIZES), gpt2):
        assert isinstance(AutoModelForCausalLM.from_config(config), PatchedModule)
    with pytest.raises(PatchError, match="rope"):
        AutoModelForCausalLM.from_config(gpt2, rope=True)
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoModelForCausalLM()


def test_signature_of_forward_is_what_trainer_and_generate_expect():
    model, original = llama(), llama()
    patch(model)
    assert inspect.signature(model.forward) == inspect.signature(original.forward)
    assert not hasattr(type(model).forward, "__wrapped__")


def test_patching_keeps_the_random_state():
    model = llama()
    before = torch.get_rng_state()
    patch(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_without_weights_can_be_patched():
    with torch.device("meta"):
        model = llama()
        assert patch(model).counts["rms_norm"] == 5


def test_undo_refuses_once_the_model_was_wrapped_over_the_patch():
    model = llama()
    report = patch(model)
    model.lm_head.__class__ = type("Wrapped", (type(model.lm_head),), {})
    with pytest.raises(PatchError, match="lm_head was wrapped"):
        report.undo()
    assert isinstance(model.model.norm, PatchedModule)


def test_model_inside_a_wrapper_is_patched():
    model = llama()
    wrapper = nn.Module()
    wrapper.module = model
    assert patch(wrapper).counts["rms_norm"] == 5
    assert isinstance(model, PatchedModule)


def test_every_row_is_keyed_by_its_model_type():
    assert MODELS and all(key == row.model_type for key, row in MODELS.items())


def test_a_training_step_can_be_traced_with_fake_tensors():
    """As a memory planner does, without any memory."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from transformers import LlamaConfig, LlamaForCausalLM

    with FakeTensorMode() as mode:
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
        assert patch(model).counts["linear_cross_entropy"] == 1
        outputs = model(**{name: mode.from_tensor(t) for name, t in INPUTS.items()})
        outputs.loss.backward()
    assert isinstance(model.lm_head.weight.grad, FakeTensor) and outputs.loss.shape == ()
