"""`apply_liger_kernel_to_<family>`, the auto class and the construction hook: right model and flags, nothing else."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    PixtralVisionConfig,
    PixtralVisionModel,
    Qwen3_5TextConfig,
    Qwen3_5TextModel,
    Qwen3Config,
    Qwen3Model,
)
from transformers.models.llama import modeling_llama

import tigon
from tigon.compat import liger
from tigon.compat.liger import modules
from tigon.compat.liger.patching import apply, hooks
from tigon.compat.liger.patching.families import FAMILIES, SIGNATURES
from tigon.errors import OptionError, PatchError
from tigon.models import MODELS, PatchReport, unpatch
from tigon.models.seams.base import PatchedModule
from tigon.models.verification.tiny import tiny_batch, tiny_model

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
        if isinstance(module, PatchedModule) and module._tigon_seam.reported:
            op = module._tigon_seam.op_for(module)
            counts[op] = counts.get(op, 0) + 1
    return counts


ALL_OPS = {"rms_norm": 5, "swiglu": 2, "rope": 2, "linear_cross_entropy": 2}


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(step(a), step(b), rtol=1e-4, atol=1e-5)


# --- the per-model functions ------------------------------------------------------------------------------------------


def test_per_model_function_patches_its_model_only_and_trains_as_before() -> None:
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
def test_family_of_every_row_is_patched_by_its_function(model_type: str) -> None:
    row = MODELS[model_type]
    plain = tiny_model(model_type, row.tiny)
    model = copy.deepcopy(plain)
    function = getattr(liger, f"apply_liger_kernel_to_{FAMILIES[model_type]}")
    report = function(model=model)
    assert report.counts
    batch = tiny_batch(torch.device("cpu"))
    losses = [m(**batch).loss for m in (plain, model)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)


def test_every_row_and_model_type_of_liger_has_a_function() -> None:
    assert set(MODELS) <= set(FAMILIES)
    assert set(apply.MODEL_TYPE_TO_APPLY_LIGER_FN) == set(FAMILIES)
    assert set(apply.MODEL_TYPE_TO_APPLY_LIGER_FN.values()) == {getattr(liger, name) for name in apply.FUNCTIONS}
    assert {f"apply_liger_kernel_to_{family}" for family in SIGNATURES} == set(apply.FUNCTIONS)
    for function in apply.FUNCTIONS.values():
        assert "model" in inspect.signature(function).parameters


def test_both_losses_at_once_are_refused() -> None:
    for keywords in ({"model": llama()}, {}):
        with pytest.raises(AssertionError, match="cannot both be True"):
            liger.apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=True, **keywords)
    assert "__init__" not in {name for cls in hooks._inits for name in vars(cls)}


def test_cross_entropy_flag_patches_the_model_and_not_torch() -> None:
    before, model = F.cross_entropy, llama()
    liger.apply_liger_kernel_to_llama(model=model, cross_entropy=True, fused_linear_cross_entropy=False)
    assert patched_ops(model) == {"rms_norm": 5, "swiglu": 2, "rope": 2, "cross_entropy": 1}
    assert F.cross_entropy is before
    assert_same_step(model, llama())


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"geglu": True}, TypeError, "geglu"),
        ({"rope": "false"}, OptionError, "rope='false'"),
        ({"model": nn.Linear(2, 2)}, PatchError, "Linear"),
    ],
)
def test_wrong_keyword_is_refused(keywords: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        liger.apply_liger_kernel_to_llama(**{"model": llama(), **keywords})


def test_function_of_another_family_patches_and_names_the_right_one() -> None:
    model = llama()
    with pytest.warns(UserWarning, match="Use apply_liger_kernel_to_llama"):
        liger.apply_liger_kernel_to_qwen2(model=model)
    assert patched_ops(model)["rms_norm"] == 5


@pytest.mark.parametrize(
    ("family", "flag", "reason"),
    [
        ("gpt_oss", "swiglu", "its experts clamp gate and up"),
        ("nemotron", "rms_norm", "it has no such module"),
        ("nemotron", "relu_squared", "tigon lacks this kernel"),
    ],
)
def test_flag_that_is_off_by_default_and_finds_nothing_is_a_warning(family: str, flag: str, reason: str) -> None:
    model = tiny_model(family, MODELS[family].tiny if family in MODELS else {})
    plain = copy.deepcopy(model)
    function = getattr(liger, f"apply_liger_kernel_to_{family}")
    with pytest.warns(UserWarning, match=f"{flag}=True has no effect.*{reason}") as warnings:
        report = function(model=model, **{flag: True})
    assert [w.filename for w in warnings if flag in str(w.message)] == [__file__]
    assert report.counts == function(model=plain).counts  # the rest is patched as without the flag
    assert report.counts["linear_cross_entropy"] == 2
    report.undo()
    assert not patched_ops(model)


@pytest.mark.parametrize("family", ["glm4", "deepseek_v2"])
def test_flag_that_is_off_by_default_and_finds_its_layers_patches_them(family: str) -> None:
    model = tiny_model(family, MODELS[family].tiny)
    function = getattr(liger, f"apply_liger_kernel_to_{family}")
    assert function(model=model, rope=True).counts["rope"] == 2


def test_flags_of_the_text_tower_are_passed_on_and_unknown_ones_are_named() -> None:
    model = tiny_model("llava", MODELS["llava"].tiny)
    with pytest.warns(UserWarning, match="swigul=False has no effect"):
        report = liger.apply_liger_kernel_to_llava(model=model, swiglu=False, swigul=False)
    assert report.counts and "swiglu" not in report.counts


def test_model_without_a_head_gets_its_layers() -> None:
    model = Qwen3Model(Qwen3Config(**SIZES))
    assert patched_ops(model) == {}
    liger.apply_liger_kernel_to_qwen3(model=model)
    assert patched_ops(model) == {"rms_norm": 9, "swiglu": 2, "rope": 2}


OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False, "rms_norm": False, "swiglu": False}


def bare(family: str) -> nn.Module:
    """A model without a head, of the family."""
    sizes = SIZES | {"head_dim": 8, "num_hidden_layers": 2 if family == "qwen3" else 4}
    if family == "qwen3":
        return Qwen3Model(Qwen3Config(**sizes))
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    return Qwen3_5TextModel(Qwen3_5TextConfig(**sizes, **linear, linear_value_head_dim=8))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_model_without_a_head_is_patched_in_parts(family: str) -> None:
    """As Liger: the flags of one call say what it adds, and a call that adds nothing leaves the model alone."""
    function = getattr(liger, f"apply_liger_kernel_to_{family}")
    model = bare(family)
    report = function(model=model, rope=False, **OFF)
    assert not report.counts and not patched_ops(model) and "switched off" in str(report)
    with pytest.warns(
        UserWarning, match=r"fused_linear_cross_entropy=True has no effect\. .* computes no language-model"
    ):
        function(model=model, rope=False, **OFF | {"fused_linear_cross_entropy": True})
    with pytest.warns(UserWarning, match="cross_entropy=True has no effect"):
        function(model=model, rope=False, **OFF | {"cross_entropy": True})
    assert not patched_ops(model)
    # Liger has no flag for the layers with a state, so they are patched as tigon.patch does; their norm is a norm.
    with_states = {"causal_conv1d", "gated_rms_norm"} if family == "qwen3_5" else set()
    function(model=model, rope=False, **OFF | {"rms_norm": True})
    assert set(patched_ops(model)) == {"rms_norm"} | with_states
    function(model=model, rope=False, **OFF | {"swiglu": True})
    function(model=model, rope=False, **OFF)
    assert set(patched_ops(model)) == {"rms_norm", "swiglu"} | with_states


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_hook_for_the_loss_alone_leaves_a_model_without_a_head_alone(family: str) -> None:
    getattr(liger, f"apply_liger_kernel_to_{family}")(rope=False, **OFF | {"fused_linear_cross_entropy": True})
    assert not patched_ops(bare(family))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("by", ["liger", "tigon"])
def test_modules_of_tigon_that_a_caller_put_into_a_model_count_as_patched(family: str, by: str) -> None:
    model = bare(family)
    for layer in model.layers:
        layer.mlp = modules.LigerSwiGLUMLP(model.config)
    norms = [path for path, m in model.named_modules() if type(m).__name__.endswith("RMSNorm")]
    for path in norms:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, modules.LigerRMSNorm(model.get_submodule(path).weight.shape[0]))
    own = {path: type(model.get_submodule(path)) for path in norms}
    function = getattr(liger, f"apply_liger_kernel_to_{family}") if by == "liger" else tigon.patch
    function(model=model) if by == "liger" else function(model)
    assert {path: type(model.get_submodule(path)) for path in norms} == own
    model(input_ids=torch.arange(5)[None]).last_hidden_state.sum().backward()


def test_vision_tower_of_pixtral_gets_its_layers() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = PixtralVisionConfig(**sizes, image_size=16, patch_size=4, hidden_act="silu")
    expected = {"rms_norm": 3, "swiglu": 1, "rope": 1}
    existing = PixtralVisionModel(config)
    liger.apply_liger_kernel_to_pixtral(model=existing)
    assert patched_ops(existing) == expected
    liger.apply_liger_kernel_to_pixtral()
    assert patched_ops(PixtralVisionModel(config)) == expected


def llava_with_pixtral() -> LlavaForConditionalGeneration:
    """Pixtral's own arrangement: its tower has RMSNorms only, where CLIP's has LayerNorms."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = PixtralVisionConfig(**sizes, image_size=16, patch_size=4, hidden_act="silu")
    text = MistralConfig(**sizes, num_key_value_heads=2, vocab_size=97)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=5))


def test_both_towers_of_a_vision_model_are_found() -> None:
    expected = {"rms_norm": 3, "swiglu": 1, "rope": 1}
    model = llava_with_pixtral()
    liger.apply_liger_kernel_to_llava(model=model)
    assert patched_ops(model.model.vision_tower) == patched_ops(model.model.language_model) == expected
    assert patched_ops(model.lm_head) == {"linear_cross_entropy": 1}

    parts = llava_with_pixtral()
    liger.apply_liger_kernel_to_pixtral(model=parts.model.vision_tower)
    liger.apply_liger_kernel_to_mistral(model=parts.model.language_model)
    assert patched_ops(parts.model.vision_tower) == patched_ops(parts.model.language_model) == expected

    liger.apply_liger_kernel_to_pixtral()
    assert patched_ops(llava_with_pixtral()) == expected


def test_text_tower_alone_is_taken_by_the_function_of_its_family() -> None:
    model = tiny_model("qwen2_5_vl", MODELS["qwen2_5_vl"].tiny)
    liger.apply_liger_kernel_to_qwen2_5_vl(model=model.model.language_model)
    assert patched_ops(model)["rms_norm"] == 5 and not patched_ops(model.model.visual)


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


def test_call_without_a_model_patches_models_built_afterwards_only() -> None:
    """Liger's second quick-start, without a model."""
    before, existing, init = _snapshot(), llama(), LlamaForCausalLM.__init__
    hook = liger.apply_liger_kernel_to_llama(swiglu=False)
    later = llama()
    assert patched_ops(later) == {"rms_norm": 5, "rope": 2, "linear_cross_entropy": 2}
    mistral = MistralForCausalLM(MistralConfig(**SIZES))
    for other in (existing, mistral):
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


def test_hooked_class_loads_in_the_requested_dtype(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    liger.apply_liger_kernel_to_llama()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert patched_ops(loaded)["rms_norm"] == 5 and loaded.dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32
    torch.testing.assert_close(loaded.lm_head.weight, llama().lm_head.weight.bfloat16())


def test_second_call_replaces_the_hook_and_its_flags() -> None:
    init = LlamaForCausalLM.__init__
    first = liger.apply_liger_kernel_to_llama()
    liger.apply_liger_kernel_to_llama(rope=False)
    assert "rope" not in patched_ops(llama())
    first.remove()  # no longer on any class
    assert patched_ops(llama())
    assert liger.remove_hooks() and LlamaForCausalLM.__init__ is init


def test_subclass_of_a_hooked_class_is_patched() -> None:
    class Mine(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.scale = 2.0

    liger.apply_liger_kernel_to_llama()
    assert patched_ops(Mine(LlamaConfig(**SIZES)))["rms_norm"] == 5


def test_text_tower_and_classifier_built_under_a_hook_get_their_layers() -> None:
    liger.apply_liger_kernel_to_llama(rope=False)
    llava = tiny_model("llava", MODELS["llava"].tiny)  # its text tower is a LlamaModel; llava itself is not hooked
    assert patched_ops(llava.model.language_model) == {"rms_norm": 5, "swiglu": 2}
    assert not patched_ops(llava.model.vision_tower) and not patched_ops(llava.lm_head)
    classifier = LlamaForSequenceClassification(LlamaConfig(**SIZES, pad_token_id=0))
    assert patched_ops(classifier) == {"rms_norm": 5, "swiglu": 2}
    headless = LlamaModel(LlamaConfig(**SIZES))
    assert patched_ops(headless) == {"rms_norm": 5, "swiglu": 2}


def test_hook_whose_model_fails_to_build_leaves_nothing_for_the_next() -> None:
    class Broken(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            raise RuntimeError("broken")

    class Outer(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            with contextlib.suppress(RuntimeError):
                self.other = Broken(config)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    liger.apply_liger_kernel_to_llama()
    assert patched_ops(Outer(LlamaConfig(**SIZES))) == ALL_OPS


def test_remote_code_that_derives_from_a_hooked_class_is_patched() -> None:
    """A repository with `trust_remote_code` has a config with a new model type."""

    class RemoteConfig(LlamaConfig):
        model_type = "remote_llama"

    class RemoteForCausalLM(LlamaForCausalLM):
        config_class = RemoteConfig

    liger.apply_liger_kernel_to_llama(rms_norm=False)
    assert patched_ops(RemoteForCausalLM(RemoteConfig(**SIZES))) == {"swiglu": 2, "rope": 2, "linear_cross_entropy": 2}


def test_remote_code_with_classes_of_its_own_is_patched(tmp_path: Path) -> None:
    """A dynamic module copies the family's file: its classes have the family's config and are in no table."""
    source = Path(modeling_llama.__file__).read_text(encoding="utf-8")
    source = source.replace("from ...", "from transformers.").replace("from .", "from transformers.models.llama.")
    (tmp_path / "copy_of_llama.py").write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("copy_of_llama", tmp_path / "copy_of_llama.py")
    assert spec is not None and spec.loader is not None
    copied = sys.modules["copy_of_llama"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(copied)
        liger.apply_liger_kernel_to_llama()
        assert not issubclass(copied.LlamaForCausalLM, LlamaForCausalLM)
        assert patched_ops(copied.LlamaForCausalLM(LlamaConfig(**SIZES))) == ALL_OPS
    finally:
        del sys.modules["copy_of_llama"]


def test_hook_that_cannot_patch_raises_when_the_model_is_built() -> None:
    liger.apply_liger_kernel_to_llama()
    with pytest.raises(PatchError, match="mlp"):
        llama(hidden_act="relu")
    liger.apply_liger_kernel_to_llama(swiglu=False)
    assert patched_ops(llama(hidden_act="relu"))


def test_hook_under_another_wrapper_is_not_removed() -> None:
    hook = liger.apply_liger_kernel_to_llama()
    ours = LlamaForCausalLM.__init__
    LlamaForCausalLM.__init__ = lambda self, config: ours(self, config)
    try:
        with pytest.raises(PatchError, match="replaced after the hook"):
            hook.remove()
    finally:
        LlamaForCausalLM.__init__ = ours
    hook.remove()


def test_family_that_transformers_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_of_transformers", lambda model_type: iter(()))
    with pytest.raises(PatchError, match="pass model="):
        liger.apply_liger_kernel_to_llama()


# --- the contract of Trainer and of the auto class --------------------------------------------------------------------


def test_auto_class_patches_the_loaded_model_and_not_its_class(tmp_path: Path) -> None:
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


def test_auto_class_loads_and_patches_a_repository_with_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    repository = tmp_path / "repository"
    llama().save_pretrained(repository)
    (repository / "modeling_remote.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class RemoteConfig(LlamaConfig):\n    model_type = 'remote_llama'\n\n\n"
        "class RemoteForCausalLM(LlamaForCausalLM):\n    config_class = RemoteConfig\n",
        encoding="utf-8",
    )
    config = json.loads((repository / "config.json").read_text(encoding="utf-8"))
    config["model_type"], config["architectures"] = "remote_llama", ["RemoteForCausalLM"]
    classes = {"AutoConfig": "RemoteConfig", "AutoModelForCausalLM": "RemoteForCausalLM"}
    config["auto_map"] = {auto: f"modeling_remote.{cls}" for auto, cls in classes.items()}
    (repository / "config.json").write_text(json.dumps(config), encoding="utf-8")

    model = liger.AutoLigerKernelForCausalLM.from_pretrained(repository, trust_remote_code=True)
    layers = {"rms_norm": 5, "swiglu": 2, "rope": 2}
    assert type(model).__name__ == "RemoteForCausalLM" and layers.items() <= patched_ops(model).items()
    liger.apply_liger_kernel_to_llama()
    hooked = AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True)
    assert patched_ops(hooked) == ALL_OPS


def test_instance_function_drops_keywords_that_the_family_does_not_take_and_names_them() -> None:
    model = llama()
    with pytest.warns(UserWarning, match="geglu, swigul: not used, because apply_liger_kernel_to_llama"):
        liger._apply_liger_kernel_to_instance(model=model, geglu=True, swigul=False, rope=False)
    assert "rope" not in patched_ops(model) and "swiglu" in patched_ops(model)


def test_family_without_a_function_is_patched_by_structure_or_warned_about() -> None:
    from transformers import GPTJConfig, GPTJForCausalLM

    assert "gptj" not in FAMILIES
    model = GPTJForCausalLM(GPTJConfig(n_embd=32, n_layer=1, n_head=2, rotary_dim=8, vocab_size=97))
    liger._apply_liger_kernel_to_instance(model=model)  # matched by structure
    assert patched_ops(model)
    with pytest.warns(UserWarning, match="no kernel was applied"):
        liger._apply_liger_kernel_to_instance(model=nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="gptj"):
        liger._apply_liger_kernel("gptj")


def test_class_function_hooks_the_family_and_ignores_other_keywords() -> None:
    liger._apply_liger_kernel("llama", rope=False, dtype="bfloat16", model="path")
    assert patched_ops(llama())["rms_norm"] == 5 and "rope" not in patched_ops(llama())


# --- the classes of what was patched ----------------------------------------------------------------------------------

CLASSES = ("LigerRMSNorm", "LigerLayerNorm", "LigerSwiGLUMLP", "LigerGEGLUMLP", "LigerPhi3SwiGLUMLP")


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"LigerRMSNorm": 5, "LigerSwiGLUMLP": 2}),
        ("gemma", {"LigerRMSNorm": 5, "LigerGEGLUMLP": 2}),
        ("phi3", {"LigerRMSNorm": 5, "LigerPhi3SwiGLUMLP": 2}),
        ("nemotron", {"LigerLayerNorm": 5}),
    ],
)
def test_patched_modules_are_instances_of_ligers_classes(family: str, expected: dict[str, int]) -> None:
    model = tiny_model(family, MODELS[family].tiny)

    def count() -> dict[str, int]:
        counts = {name: sum(isinstance(m, getattr(liger, name)) for m in model.modules()) for name in CLASSES}
        return {name: n for name, n in counts.items() if n}

    assert count() == {}
    report = getattr(liger, f"apply_liger_kernel_to_{family}")(model=model)
    assert count() == expected

    class Mine(liger.LigerRMSNorm):
        pass

    assert not any(isinstance(m, Mine) for m in model.modules())
    assert isinstance(Mine(8), liger.LigerRMSNorm)
    report.undo()
    assert count() == {}
