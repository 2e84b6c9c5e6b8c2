"""Every row of the table is proved on a small random model: patched, it computes what it computed."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle

import pytest
import torch
from models_helpers import FITS_FROM, assert_close, call, loss_and_gradients, too_old
from torch import nn

from backends import HAS_GPU, HAS_TRITON, kernels_on_the_cpu
from second_proofs import DIFFERENT, proved_by
from tigon import ops
from tigon.errors import OptionError, PatchError
from tigon.models import MODELS, DeferredLogits, PatchSpec, Verification, patch, unpatch, verify
from tigon.models.seams.base import PatchedModule
from tigon.models.seams.head.logits import LogitAttributes
from tigon.models.seams.mlp import GATED_OPS, GatedMlpSeam
from tigon.models.seams.norm import LayerNormSeam, NormSeam
from tigon.models.seams.rope import RopeSeam
from tigon.models.verification.tiny import tiny_batch, tiny_model
from tigon.models.verification.verify import FP32_BOUND, _rounding_noise

CPU = torch.device("cpu")


def say(verification: Verification) -> str:
    return "\n".join(f"{c.name}: {c.error} > {c.bound} in {c.worst} {c.note}" for c in verification.failures)


def family(name: str) -> nn.Module:
    return tiny_model(name, MODELS[name].tiny)


@pytest.mark.parametrize("name", MODELS)
def test_patched_family_equals_unpatched_in_fp32(name):
    verification = verify(MODELS[name])
    assert verification.passed, say(verification)
    used = [check for check in verification.checks if not check.note]
    assert {check.name for check in used} >= {"labels", "shift_labels", "num_items_in_batch", "evaluation", "generate"}
    assert {check.name for check in used} >= {"gradient accumulation", "gradient checkpointing", "undo"}
    assert {check.name for check in used} >= {"no logits in training", "logits_to_keep", "packed position_ids"}
    assert verification.counts["linear_cross_entropy"] == 1


def test_family_older_than_its_row_is_refused_or_trains_as_unpatched():
    older = [name for name, release in FITS_FROM.items() if too_old(release)]
    if not older:
        pytest.skip("the installed transformers fits every row")
    for name in older:
        try:
            verification = verify(MODELS[name])
        except PatchError as error:
            assert "Nothing was changed" in str(error)
        else:
            assert verification.passed, say(verification)


# Gated norms and complex tables are in these two alone.
ROUNDED = (*DIFFERENT, "qwen3_next", "deepseek_v2")


@pytest.mark.parametrize(
    "name", proved_by(ROUNDED, MODELS, "a row is proved in fp32, and rounding depends on the kind of seam alone")
)
def test_patched_family_is_as_accurate_as_unpatched_in_bf16(name):
    verification = verify(MODELS[name], dtype=torch.bfloat16)
    assert verification.passed, say(verification)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_equal_the_unpatched_family_on_a_gpu(name, dtype):
    verification = verify(MODELS[name], device="cuda", dtype=dtype)
    assert verification.passed, say(verification)


@pytest.mark.parametrize("name", MODELS)
def test_row_replaces_what_its_flags_claim_and_refuses_other_flags(name):
    """A row replaces every op that it claims; an explicit flag cannot switch on any other."""
    row = MODELS[name]
    counts = patch(family(name), attention_sinks=False).counts
    flags = {"swiglu": "mlp", "geglu": "mlp", "gated_rms_norm": "rms_norm"}
    of_no_row = ("experts", "topk_softmax", "topk_sigmoid", "causal_conv1d", "gated_delta_rule")
    got = {flags.get(op, op) for op in counts if op not in of_no_row}
    # The experts' op is the whole MLP. It, the router's, those of hybrid layers and attention with sinks are in no row.
    assert got | ({"mlp"} & row.flags if "experts" in counts else set()) == row.flags
    for flag in {"rms_norm", "layer_norm", "rope", "mlp"} - row.flags:
        model = family(name)
        with pytest.raises(PatchError, match=f"{flag}: "):
            patch(model, **{flag: True})
        assert not any(isinstance(m, PatchedModule) for m in model.modules())


def test_rounding_of_a_model_that_casts_to_fp32_is_measured_in_fp64() -> None:
    """Its router casts its input, and its own weights are in fp64 then."""

    class Router(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float()).softmax(-1, dtype=torch.float32).to(torch.float32)

    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        return {"y": model(torch.ones(2, 3, dtype=model.weight.dtype)).detach()}

    router = Router(3, 4)
    router.set_experts_implementation = lambda _: None
    (bound,) = _rounding_noise(run, router, run(router), ["y"]).values()
    assert FP32_BOUND <= bound < 2 * FP32_BOUND


# --- verify can fail --------------------------------------------------------------------------------------------------


def wrong(op, monkeypatch):
    """An op off by half a percent."""
    original = getattr(ops, op)
    monkeypatch.setattr(ops, op, lambda *args, **options: original(*args, **options) * 1.005)


@pytest.mark.parametrize("op", ["linear_cross_entropy", "cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verification_detects_a_wrong_loss(op, dtype, monkeypatch):
    wrong(op, monkeypatch)
    failed = {check.name for check in verify(MODELS["llama"], dtype=dtype).failures}
    training = {"labels", "shift_labels", "num_items_in_batch", "gradient accumulation", "gradient checkpointing"}
    # Half a percent is within what bf16 itself errs, except in the loss.
    assert failed >= (training if op == "linear_cross_entropy" else {"evaluation"})


def test_verification_detects_a_wrong_gradient(monkeypatch):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.001 * grad

    original = ops.rms_norm
    monkeypatch.setattr(ops, "rms_norm", lambda x, *args, **options: original(Doubled.apply(x), *args, **options))
    # The probe would refuse such an op; it is not what is tested here.
    monkeypatch.setattr(NormSeam, "objection", lambda self, module: None)
    failed = {check.name for check in verify(MODELS["llama"]).failures}
    assert "labels" in failed and "evaluation" not in failed


def test_verification_detects_logits_computed_in_training():
    row = dataclasses.replace(MODELS["cohere"], logits=LogitAttributes())
    assert "no logits in training" in {check.name for check in verify(row).failures}


def test_row_with_the_wrong_norm_is_refused():
    for name, norm in (
        ("llama", MODELS["gemma"].norm),
        ("gemma", MODELS["llama"].norm),
        ("gpt2", MODELS["llama"].norm),
    ):
        with pytest.raises(PatchError, match="norm: nothing in this"):
            verify(dataclasses.replace(MODELS[name], norm=norm))


def test_norms_that_round_at_different_places_in_bf16_are_told_apart():
    """Llama and OLMo 2 compute the same in fp32 and round at different places in bf16."""
    for name, other in (("llama", "olmo2"), ("olmo2", "llama")):
        with pytest.raises(PatchError, match="rounds at another place"):
            verify(dataclasses.replace(MODELS[name], norm=MODELS[other].norm))


def test_unknown_family_or_dtype_is_refused():
    with pytest.raises(PatchError, match="no model_type 'no_such_family'"):
        verify(PatchSpec(model_type="no_such_family"))
    with pytest.raises(OptionError, match="float16"):
        verify(MODELS["llama"], dtype=torch.float16)


def test_verification_record_is_valid_json():
    record = json.loads(json.dumps(verify(MODELS["gpt2"]).to_dict()))
    assert record["passed"] is True and record["dtype"] == "float32"
    assert all({"name", "passed", "error", "bound"} <= set(check) for check in record["checks"])


# --- nothing global, and the model stays a model ----------------------------------------------------------------------


@pytest.mark.parametrize("name", DIFFERENT)
def test_copies_of_a_patched_model_are_patched(name, tmp_path):
    model, inputs = family(name), tiny_batch(CPU)
    keys = list(model.state_dict())
    patch(model)
    assert list(model.state_dict()) == keys
    want = loss_and_gradients(model, call(**inputs))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for clone in copies:
        assert [type(m) for m in clone.modules()] == [type(m) for m in model.modules()]
        got = loss_and_gradients(clone, call(**inputs))
        assert all(torch.equal(got[key], want[key]) for key in want)
    assert unpatch(copies[0]) == unpatch(model) > 3
    assert not any(isinstance(m, PatchedModule) for m in copies[0].modules())


@pytest.mark.parametrize("name", DIFFERENT)
def test_moved_and_cast_model_stays_patched(name):
    model = family(name)
    text = repr(model)
    patch(model)
    assert repr(model) == text
    wide = family(name).double()
    model.double()
    # transformers computes the loss of fp64 logits in fp32, tigon in fp64
    if name not in ("mixtral", "deepseek_v3", "gpt_oss"):  # grouped_mm has no fp64
        want = wide(**tiny_batch(CPU)).loss
        torch.testing.assert_close(model(**tiny_batch(CPU)).loss, want, check_dtype=False, rtol=1e-5, atol=0)
    model.to("meta")
    assert isinstance(model, PatchedModule) and all(p.is_meta for p in model.parameters())


# --- families without a row -------------------------------------------------------------------------------------------

UNNAMED = ("arcee", "bert", "bloom", "lfm2", "gpt_bigcode", "seed_oss", "dots1")
NEWER = ("qwen4_exp_text", "dory", "lara_mini")


@pytest.mark.parametrize("name", (*UNNAMED, *NEWER))
def test_family_without_a_row_is_patched_by_structure_and_verified(name):
    from transformers import CONFIG_MAPPING

    from benchmarks.pages.model_families import surveyed
    from tigon.models.verification.small_models import small_model

    if name in NEWER and name not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know it")
    outcome = surveyed(name)
    assert name not in MODELS and outcome.outcome == "verified", outcome
    report = patch(small_model(name)[0])
    assert "matched by structure" in str(report) and report.counts


def test_module_that_structure_does_not_match_is_reported():
    report = patch(tiny_model("gptj", {"rotary_dim": 4}))
    reasons = {row.cls: row.reason for row in report.left_alone}
    assert "apply_rotary_pos_emb" in reasons["GPTJAttention"] and "(tensor, sin, cos)" in reasons["GPTJAttention"]


def test_model_in_which_nothing_matches_is_refused():
    from transformers import PretrainedConfig, PreTrainedModel

    class Config(PretrainedConfig):
        model_type = "nothing-matches"

    class Model(PreTrainedModel):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.layer = nn.Linear(2, 2)

    model = Model(Config())
    with pytest.raises(PatchError, match="nothing in this Model can run an op"):
        patch(model)


def test_remote_code_with_a_capped_head_trains_right_and_is_fused_after_one_step():
    """Without a row nobody says that the logits are scaled: the first step finds out, the next ones are fused."""
    from transformers.modeling_outputs import CausalLMOutput

    base = type(family("llama"))

    class Scaled(base):
        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = torch.tanh(self.lm_head(self.model(input_ids).last_hidden_state).float() / 7.0) * 7.0
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            return CausalLMOutput(loss=loss, logits=logits)

    original = family("llama")
    original.__class__ = Scaled
    patched = copy.deepcopy(original)
    patch(patched)
    want = loss_and_gradients(original, call(**tiny_batch(CPU)))
    with pytest.warns(UserWarning, match="were read"):
        assert_close(loss_and_gradients(patched, call(**tiny_batch(CPU))), want)
    assert_close(loss_and_gradients(patched, call(**tiny_batch(CPU))), want)
    logits = patched(**tiny_batch(CPU)).logits
    assert type(logits) is DeferredLogits and not logits.source.touched
    torch.testing.assert_close(logits + 0, original(**tiny_batch(CPU)).logits)


def test_seam_is_chosen_by_the_numbers_a_module_computes():
    """Fields of a seam that do not fit a module are told from numbers."""
    cohere, llama, glm = (family(name) for name in ("cohere", "llama", "glm4"))
    assert LayerNormSeam(eps="variance_epsilon").objection(cohere.model.norm) is None
    assert "differs" in str(NormSeam().objection(cohere.model.norm))
    attention = llama.model.layers[0].self_attn
    assert RopeSeam(styles=("interleaved",)).objection(attention) and not RopeSeam().objection(attention)
    assert RopeSeam(styles=("half-split",)).objection(glm.model.layers[0].self_attn)
    packed = GatedMlpSeam(packed="gate_up_proj", act="activation_fn")
    assert packed.candidate(glm.model.layers[0].mlp) and packed.objection(glm.model.layers[0].mlp) is None
    assert not packed.candidate(llama.model.layers[0].mlp)


def test_model_that_slices_its_logits_after_the_head_trains_as_unpatched():
    """As models do that put image tokens before the text: there are more hidden states than labels."""
    from transformers.modeling_outputs import CausalLMOutput

    class Prefixed(type(family("llama"))):
        def forward(self, input_ids=None, labels=None, **kwargs):
            hidden = self.model(torch.cat([input_ids[:, :3], input_ids], dim=1)).last_hidden_state
            logits = self.lm_head(hidden)[:, 3:].contiguous()
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            return CausalLMOutput(loss=loss, logits=logits)

    original = family("llama")
    original.__class__ = Prefixed
    patched = copy.deepcopy(original)
    patch(patched)
    want = loss_and_gradients(original, call(**tiny_batch(CPU)))
    assert_close(loss_and_gradients(patched, call(**tiny_batch(CPU))), want)


@pytest.mark.parametrize("tower", ["qwen2", "gemma2"])
def test_llava_over_another_text_tower_equals_unpatched(tower):
    text = {"model_type": tower, **MODELS[tower].tiny}
    row = dataclasses.replace(MODELS["llava"], tiny={"text_config": text})
    verification = verify(row)
    assert verification.passed, say(verification)
    assert verification.counts["rms_norm"] >= 5 and verification.counts["rope"] == 2


def test_eager_experts_are_refused_or_keep_their_own_loop():
    model = family("mixtral")
    model.set_experts_implementation("eager")
    with pytest.raises(PatchError, match=r"mlp: .*eager loop"):
        patch(model, experts=False)
    report = patch(model, mlp=False, experts=False)
    assert "swiglu" not in report.counts
    model, original = family("mixtral"), family("mixtral")
    patch(model, experts=False)
    for m in (model, original):  # after the patch: the loop computes what it computed
        m.set_experts_implementation("eager")
    want = loss_and_gradients(original, call(**tiny_batch(CPU)))
    assert_close(loss_and_gradients(model, call(**tiny_batch(CPU))), want)


def test_loss_flag_that_cannot_apply_is_refused():
    from transformers import LlamaModel

    trunk = LlamaModel(family("llama").config)
    for flag in ("linear_cross_entropy", "cross_entropy"):
        with pytest.raises(PatchError, match=f"{flag}=True"):
            patch(trunk, **{flag: True})
    model = family("llama")
    nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.raises(PatchError, match=r"linear_cross_entropy=True, but .*parametrized"):
        patch(model, linear_cross_entropy=True)
    assert not any(isinstance(m, PatchedModule) for m in (*model.modules(), *trunk.modules()))


@pytest.mark.skipif(HAS_GPU or not HAS_TRITON, reason="the kernels run on the GPU, or not at all")
@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3"])
def test_interpreted_kernels_equal_the_unpatched_family(name):
    with kernels_on_the_cpu():
        verification = verify(MODELS[name], tokens=8)
    assert verification.passed, say(verification)


@pytest.mark.parametrize(
    "name", proved_by(DIFFERENT, MODELS, "the hooks are seen by the kind of seam, and these have every kind")
)
def test_hooks_on_activations_run_as_often_as_without_the_patch(name):
    calls = {False: [], True: []}
    for patched, called in calls.items():
        model = family(name)
        if patched:
            patch(model)
        for path, module in model.named_modules():
            if type(module).__name__ in GATED_OPS or isinstance(module, nn.GELU):
                module.register_forward_hook(lambda *_, path=path, called=called: called.append(path))
        call(**tiny_batch(CPU))(model).backward()
    assert calls[True] == calls[False]


def test_a_model_whose_activations_all_have_hooks_is_refused_with_the_reason():
    model = family("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(PatchError, match=r"has a hook or its own forward.*pass mlp=False"):
        patch(model)
    patch(model, mlp=False)


def test_hooks_of_zero3_on_activations_leave_the_op_in_place():
    """They are on every module, and gather parameters, of which activations have none."""
    model = family("llama")

    def gather(*_):
        raise AssertionError("the op does not call the activation")

    gather.__module__ = "deepspeed.runtime.zero.parameter_offload"
    patch(model)
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_pre_hook(gather)
    call(**tiny_batch(CPU))(model)


def test_a_forward_set_on_an_activation_runs_and_is_reported():
    model = family("llama")
    patch(model)
    fused = call(**tiny_batch(CPU))(model)
    act = model.model.layers[0].mlp.act_fn
    act.forward = lambda x: 0 * x
    assert not torch.equal(call(**tiny_batch(CPU))(model), fused)
    unpatch(model)
    report = patch(model)
    assert report.counts["swiglu"] == len(model.model.layers) - 1
    assert any("hook or its own forward" in row.reason for row in report.left_alone)
