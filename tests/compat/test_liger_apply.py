"""`apply_liger_kernel_to_<family>`, the auto class and the construction hook: right model and flags, nothing else."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.models.llama import modeling_llama

from tigon.compat import liger
from tigon.compat.liger import apply, hooks
from tigon.compat.liger.families import FAMILIES, SIGNATURES
from tigon.errors import OptionError, PatchError
from tigon.models import MODELS, PatchReport, unpatch
from tigon.models.seam import PatchedModule
from tigon.models.tiny import tiny_batch, tiny_model

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_hook_stays() -> Iterator[None]:
    yield
    liger.remove_hooks()


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **changes))


def patched_ops(model: nn.Module) -> dict[str, int]:
    counts: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, PatchedModule):
            op = module._tigon_seam.op_for(module)
            counts[op] = counts.get(op, 0) + 1
    return counts


ALL_OPS = {"rms_norm": 5, "swiglu": 2, "rope": 2, "linear_cross_entropy": 1}


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(step(a), step(b), rtol=1e-4, atol=1e-5)


# --- the per-model functions ------------------------------------------------------------------------------------------


def test_per_model_function_patches_another_model_or_computes_otherwise() -> None:
    """Liger's second quick-start, with a model."""
    plain, model, bystander = llama(), llama(), llama()
    report = liger.apply_liger_kernel_to_llama(
        rope=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=False, model=model
    )
    assert isinstance(report, PatchReport)
    assert patched_ops(model) == {"swiglu": 2, "rope": 2, "linear_cross_entropy": 2}
    assert not patched_ops(bystander)
    assert_same_step(model, plain)
    report.undo()
    assert not patched_ops(model)


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_family_of_a_row_cannot_be_patched_by_its_function(model_type: str) -> None:
    row = MODELS[model_type]
    plain = tiny_model(model_type, row.tiny)
    model = copy.deepcopy(plain)
    function = getattr(liger, f"apply_liger_kernel_to_{model_type}")
    report = function(model=model)
    assert report.counts
    batch = tiny_batch(torch.device("cpu"))
    losses = [m(**batch).loss for m in (plain, model)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)


def test_row_or_model_type_of_ligers_has_no_function() -> None:
    assert set(MODELS) <= set(FAMILIES)
    assert set(apply.MODEL_TYPE_TO_APPLY_LIGER_FN) == set(FAMILIES)
    assert set(apply.MODEL_TYPE_TO_APPLY_LIGER_FN.values()) == {getattr(liger, name) for name in apply.FUNCTIONS}
    assert {f"apply_liger_kernel_to_{family}" for family in SIGNATURES} == set(apply.FUNCTIONS)
    for function in apply.FUNCTIONS.values():
        assert "model" in inspect.signature(function).parameters


def test_both_losses_at_once_are_accepted() -> None:
    for keywords in ({"model": llama()}, {}):
        with pytest.raises(AssertionError, match="cannot both be True"):
            liger.apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=True, **keywords)
    assert "__init__" not in {name for cls in hooks._inits for name in vars(cls)}


def test_cross_entropy_flag_does_nothing_or_reaches_torch() -> None:
    before, model = F.cross_entropy, llama()
    liger.apply_liger_kernel_to_llama(model=model, cross_entropy=True, fused_linear_cross_entropy=False)
    assert patched_ops(model) == {"rms_norm": 5, "swiglu": 2, "rope": 2, "cross_entropy": 1}
    assert F.cross_entropy is before
    assert_same_step(model, llama())


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"geglu": True}, TypeError, "geglu"),
        ({"rope": 1}, OptionError, "rope=1"),
        ({"model": nn.Linear(2, 2)}, PatchError, "Linear"),
    ],
)
def test_wrong_keyword_is_accepted(keywords: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        liger.apply_liger_kernel_to_llama(**{"model": llama(), **keywords})


def test_function_of_another_family_is_accepted() -> None:
    model = llama()
    with pytest.raises(PatchError, match="Use apply_liger_kernel_to_llama"):
        liger.apply_liger_kernel_to_qwen2(model=model)
    assert not patched_ops(model)


def test_flag_without_a_kernel_is_ignored() -> None:
    with pytest.raises(OptionError, match="relu_squared"):
        liger.apply_liger_kernel_to_nemotron(relu_squared=True, model=tiny_model("nemotron", {}))
    gpt_oss = tiny_model("gpt_oss", MODELS["gpt_oss"].tiny)
    with pytest.raises(PatchError, match="mlp"):  # off by default: True is a demand
        liger.apply_liger_kernel_to_gpt_oss(swiglu=True, model=gpt_oss)
    assert not patched_ops(gpt_oss)


def test_flags_of_the_text_tower_are_not_passed_on() -> None:
    model = tiny_model("llava", MODELS["llava"].tiny)
    report = liger.apply_liger_kernel_to_llava(model=model, swiglu=False)
    assert report.counts and "swiglu" not in report.counts
    with pytest.raises(OptionError, match="swigul"):
        liger.apply_liger_kernel_to_llava(model=model, swigul=False)


# --- models built afterwards ------------------------------------------------------------------------------------------


def _snapshot() -> dict[str, Any]:
    names = ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb")
    return {
        **{name: getattr(modeling_llama, name) for name in names},
        "forward": LlamaForCausalLM.forward,
        "LayerNorm": nn.LayerNorm,
        "cross_entropy": F.cross_entropy,
        "CrossEntropyLoss": nn.CrossEntropyLoss,
    }


def test_models_built_afterwards_stay_plain_or_others_change() -> None:
    """Liger's second quick-start, without a model."""
    before, existing, init = _snapshot(), llama(), LlamaForCausalLM.__init__
    hook = liger.apply_liger_kernel_to_llama(swiglu=False)
    later = llama()
    assert patched_ops(later) == {"rms_norm": 5, "rope": 2, "linear_cross_entropy": 2}
    mistral = MistralForCausalLM(MistralConfig(**SIZES))
    for other in (existing, mistral, modeling_llama.LlamaModel(later.config)):
        assert not patched_ops(other)
    assert _snapshot() == before
    assert inspect.signature(LlamaForCausalLM.__init__) == inspect.signature(init)
    assert_same_step(later, existing)

    hook.remove()
    hook.remove()
    assert LlamaForCausalLM.__init__ is init
    assert not patched_ops(llama())
    assert patched_ops(later)  # stays as it was built
    unpatch(later)
    assert_same_step(later, existing)


def test_hook_breaks_loading_in_a_checkpoints_dtype(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    liger.apply_liger_kernel_to_llama()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert patched_ops(loaded)["rms_norm"] == 5 and loaded.dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32
    torch.testing.assert_close(loaded.lm_head.weight, llama().lm_head.weight.bfloat16())


def test_second_call_stacks_hooks_or_keeps_the_first_flags() -> None:
    init = LlamaForCausalLM.__init__
    first = liger.apply_liger_kernel_to_llama()
    liger.apply_liger_kernel_to_llama(rope=False)
    assert "rope" not in patched_ops(llama())
    first.remove()  # no longer on any class
    assert patched_ops(llama())
    assert liger.remove_hooks() == 1 and LlamaForCausalLM.__init__ is init


def test_subclass_of_a_hooked_class_is_left_out() -> None:
    class Mine(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.scale = 2.0

    liger.apply_liger_kernel_to_llama()
    assert patched_ops(Mine(LlamaConfig(**SIZES)))["rms_norm"] == 5


def test_hook_that_cannot_patch_builds_the_model_in_silence() -> None:
    liger.apply_liger_kernel_to_llama()
    with pytest.raises(PatchError, match="mlp"):
        llama(hidden_act="relu")
    liger.apply_liger_kernel_to_llama(swiglu=False)
    assert patched_ops(llama(hidden_act="relu"))


def test_hook_is_removed_from_under_another_wrapper() -> None:
    hook = liger.apply_liger_kernel_to_llama()
    ours = LlamaForCausalLM.__init__
    LlamaForCausalLM.__init__ = lambda self, config: ours(self, config)
    try:
        with pytest.raises(PatchError, match="replaced after the hook"):
            hook.remove()
    finally:
        LlamaForCausalLM.__init__ = ours
    hook.remove()


def test_family_without_a_class_is_hooked_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_headed", lambda model_type: iter(()))
    with pytest.raises(PatchError, match="pass model="):
        liger.apply_liger_kernel_to_llama()


# --- the contract of Trainer and of the auto class --------------------------------------------------------------------


def test_auto_class_loads_a_plain_model_or_patches_its_class(tmp_path: Path) -> None:
    """Liger's first quick-start."""
    plain = llama()
    plain.save_pretrained(tmp_path)
    model = liger.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, rms_norm=False)
    assert patched_ops(model) == {"swiglu": 2, "rope": 2, "linear_cross_entropy": 2}
    assert_same_step(model, plain)
    assert not patched_ops(AutoModelForCausalLM.from_pretrained(tmp_path))
    pair = liger.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert patched_ops(pair[0]) and not pair[1]["missing_keys"]
    assert patched_ops(liger.AutoLigerKernelForCausalLM.from_config(plain.config))
    assert issubclass(liger.AutoLigerKernelForCausalLM, AutoModelForCausalLM)


def test_instance_function_ignores_a_misspelt_flag() -> None:
    with pytest.raises(OptionError, match="swigul"):
        liger._apply_liger_kernel_to_instance(model=llama(), swigul=False)


def test_flag_of_another_family_is_dropped_without_a_word() -> None:
    model = llama()
    with pytest.warns(UserWarning, match="geglu"):
        liger._apply_liger_kernel_to_instance(model=model, geglu=True, rope=False)
    assert "rope" not in patched_ops(model) and "swiglu" in patched_ops(model)


def test_family_without_a_function_is_left_plain_without_a_word() -> None:
    from transformers import GPTJConfig, GPTJForCausalLM

    assert "gptj" not in FAMILIES
    model = GPTJForCausalLM(GPTJConfig(n_embd=32, n_layer=1, n_head=2, rotary_dim=8, vocab_size=97))
    liger._apply_liger_kernel_to_instance(model=model)  # matched by structure
    assert patched_ops(model)
    with pytest.warns(UserWarning, match="no kernel was applied"):
        liger._apply_liger_kernel_to_instance(model=nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="gptj"):
        liger._apply_liger_kernel("gptj")


def test_class_function_hooks_nothing_or_chokes_on_other_keywords() -> None:
    liger._apply_liger_kernel("llama", rope=False, dtype="bfloat16", model="path")
    assert patched_ops(llama())["rms_norm"] == 5 and "rope" not in patched_ops(llama())
