"""What attaching changes in a model, what it refuses, and that detaching takes it back."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from heads_helpers import CPU, MEDUSA, MTP, SHARED, SPECS, batch, gradients, with_heads

from second_proofs import DIFFERENT, proved_by
from tigon.errors import PatchError, UsageError
from tigon.medusa import HeadsSpec, Objective, attach, detach, heads_of
from tigon.medusa.attach import scoring
from tigon.medusa.callback import HeadsCallback
from tigon.medusa.spec import scheduled, shares_head
from tigon.models import MODELS, patch, unpatch
from tigon.models.seams.base import PatchedModule
from tigon.models.seams.head.head_path import observed_logit_map
from tigon.models.seams.head.logits import LogitMap
from tigon.models.verification.tiny import tiny_batch, tiny_model

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
def test_detached_model_is_the_original_one(spec: HeadsSpec, patched: bool) -> None:
    model: Any = tiny_model("llama")
    if patched:
        patch(model)
    before = {name: type(m) for name, m in model.named_modules()}
    wanted = model(**batch()).loss.detach()
    heads = attach(model, spec, Objective(stage=2))
    assert heads_of(model) is heads
    assert detach(model) is heads
    assert {name: type(m) for name, m in model.named_modules()} == before
    assert not [name for name, _ in model.named_parameters() if "heads" in name]
    torch.testing.assert_close(model(**batch()).loss.detach(), wanted, rtol=0, atol=0)


def test_evaluation_gives_the_loss_and_logits_of_the_model() -> None:
    """In evaluation, and without labels, the model is what it was."""
    inputs = batch()
    plain: Any = tiny_model("llama").eval()
    model = with_heads(MEDUSA, Objective(stage=2)).eval()
    with torch.no_grad():
        wanted, got = plain(**inputs), model(**inputs)
        torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-5)
        assert model.train()(input_ids=inputs["input_ids"]).logits.shape == wanted.logits.shape


def test_heads_attach_once_and_only_to_a_model_that_can_have_them() -> None:
    model: Any = tiny_model("llama")
    with pytest.raises(UsageError, match="does not have heads"):
        heads_of(model)
    attach(model, SHARED, Objective())
    with pytest.raises(PatchError, match="already has heads"):
        attach(model, SHARED, Objective())
    biased: Any = tiny_model("llama")
    biased.lm_head.bias = torch.nn.Parameter(torch.zeros(biased.lm_head.out_features))
    with pytest.raises(PatchError, match="its output head has a bias"):
        attach(biased, SHARED, Objective())
    assert all(p.requires_grad for p in biased.parameters()), "stage 1 has frozen a model that got no heads"
    mixture: Any = tiny_model("mixtral")
    mixture.config.output_router_logits = True
    with pytest.raises(PatchError, match="output_router_logits"):
        attach(mixture, SHARED, Objective(stage=2))


def test_state_of_other_heads_is_refused() -> None:
    model: Any = tiny_model("llama")
    state = {name: t.clone() for name, t in attach(model, MEDUSA, Objective()).state_dict().items()}
    detach(model)
    with pytest.raises(UsageError, match=r"does not fit: .*count, layers, output"):
        attach(model, SHARED, Objective(), state)
    assert not hasattr(model, "draft_heads")


def test_logged_loss_and_accuracy_of_heads_are_those_of_their_logits() -> None:
    """Loss and accuracies of the log, and of a held-out batch, against logits looked at one by one."""
    model = with_heads(MEDUSA, Objective(stage=2))
    inputs, state = batch(), model.draft_heads.state
    state.ranked = True
    items = (inputs["labels"][:, 1:] != -100).sum()
    for row in range(2):  # micro-batches with different numbers of labels
        model(**{name: t[row : row + 1] for name, t in inputs.items()}, num_items_in_batch=items)
    logged = state.record.take()
    assert state.record.take() == {}
    model.eval()
    with scoring(model) as record:
        model(**inputs)
    held_out = record.take()
    assert state.record.take() == {}, "held-out tokens are in the training's record"
    with torch.no_grad():
        hidden = model.model(inputs["input_ids"]).last_hidden_state
    for k, logits in enumerate(model.draft_heads.logits(hidden.reshape(-1, 32), model.lm_head), start=1):
        z = logits.detach().view(2, -1, logits.shape[-1])[:, : -1 - k].log_softmax(-1)
        labels = inputs["labels"][:, 1 + k :]
        told = [(z[b, t], int(y)) for b in range(2) for t, y in enumerate(labels[b]) if y != -100]
        loss = sum(-float(row[y]) for row, y in told) / len(told)
        for found in (logged, held_out):
            assert found[f"head{k}_loss"] == pytest.approx(loss, rel=1e-5)
            for rank in (1, 5):
                share = sum(y in row.topk(rank).indices for row, y in told) / len(told)
                assert found[f"head{k}_top{rank}"] == pytest.approx(share, abs=1e-6)


def test_evaluation_forgets_the_batches_of_one_that_ended_without_metrics() -> None:
    model = with_heads(MEDUSA, Objective(stage=1))
    callback = HeadsCallback(stage=1, multiplier=1.0, schedule=lambda *_: 1.0, trained_on=None, sample_tokens=0)

    def evaluated() -> Any:
        counted: list[Any] = []
        callback.begin_evaluation(model)
        callback.on_prediction_step(
            None, None, None, model=model, inputs=batch(), precision=nullcontext, counted=counted, has_samples=True
        )
        for count in counted:
            count()
        return heads_of(model).state.evaluated.state()["counts"]

    first = evaluated()
    assert first[0] > 0 and evaluated() == first


def test_schedules_follow_their_curves() -> None:
    assert [scheduled("constant", t, 10, 1.0) for t in (1, 10)] == [1.0, 1.0]
    assert [scheduled("linear", t, 10, 1.0) for t in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert scheduled("sine", 5, 10, 1.0) == pytest.approx(0.5**0.5)
    assert [scheduled("linear", t, 10, 0.5) for t in (1, 5, 9)] == [0.2, 1.0, 1.0]


def test_heads_share_the_lm_head_if_their_own_would_outweigh_the_model() -> None:
    """5 heads of 128256 x 2048 would add more than Llama-3.2-1B's own 1.24 G parameters; an 8 B is larger."""
    head_1b, head_8b = 128256 * 2048, 128256 * 4096
    assert shares_head("auto", "medusa", 5, 1_235_814_400, head_1b)
    assert not shares_head("auto", "medusa", 3, 1_235_814_400, head_1b)
    assert not shares_head("auto", "medusa", 5, 8_030_261_248, head_8b)
    assert shares_head("shared", "medusa", 1, 10**12, 1)
    assert not shares_head("separate", "medusa", 5, 1, 10**12)
    assert shares_head("separate", "mtp", 1, 10**12, 1)


def test_activation_checkpoints_leave_the_gradient_unchanged() -> None:
    grads = []
    for checkpointed in (False, True):
        model = with_heads(MTP, Objective(stage=2))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**tiny_batch(CPU)).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-7)


def test_adapters_and_heads_both_get_gradients() -> None:
    peft = pytest.importorskip("peft")
    model: Any = tiny_model("llama")
    patch(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj"]))
    attach(wrapped, MEDUSA, Objective(stage=2))
    wrapped.train()
    wrapped(**batch()).loss.backward()
    learned = {name for name, p in wrapped.named_parameters() if p.grad is not None}
    adapters = {name for name, _ in wrapped.named_parameters() if "lora_" in name}
    heads = {name for name, _ in wrapped.named_parameters() if "draft_heads" in name}
    assert adapters and heads and learned == adapters | heads


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_mask_that_a_layer_takes_by_position_reaches_the_mtp_module(implementation: str) -> None:
    """GPT-2's layers take the mask by position. Without it an MTP module would see later tokens and other documents."""
    torch.manual_seed(1)
    ids, positions = torch.randint(3, 97, (1, 12)), torch.cat([torch.arange(4), torch.arange(8)])[None]
    late, early = ids.clone(), ids.clone()
    late[0, 9:], early[0, :4] = torch.randint(3, 97, (3,)), torch.randint(3, 97, (4,))
    labels = torch.full_like(ids, -100)
    labels[0, 8] = ids[0, 8]
    losses = []
    for row in (ids, late, early):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            "gpt2", vocab_size=97, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            initializer_range=0.15, attn_implementation=implementation,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config)
        patch(model)
        attach(model, HeadsSpec(kind="mtp", count=1), Objective(stage=1))
        model.train()
        packed = {"position_ids": positions} if implementation == "sdpa" else {}
        losses.append(float(model(input_ids=row, labels=labels, **packed).loss))
    assert losses[0] == losses[1]
    assert implementation == "eager" or losses[0] == losses[2]


# Config keys by which families without a row scale their logits or hidden states.
WITHOUT_A_ROW = {
    "hyperclovax": {"logits_scaling": 3.0, "num_key_value_heads": 4},
    "minicpm3": {"dim_model_base": 8, "num_key_value_heads": 4},
    "inkling_text": {"logits_mup_width_multiplier": 2.0},
    "recurrent_gemma": {"logits_soft_cap": 2.0, "num_hidden_layers": 3},
    "opt": {},
}


@pytest.mark.parametrize(
    "family",
    proved_by(
        (*DIFFERENT, *WITHOUT_A_ROW), [*MODELS, *WITHOUT_A_ROW], "heads see a trunk and a head of the same kinds"
    ),
)
def test_heads_at_their_start_have_the_logits_of_the_model(family: str) -> None:
    """A head of zeros is the model's own lm_head, one token further ahead."""
    tiny = MODELS[family].tiny if family in MODELS else WITHOUT_A_ROW[family]
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    model: Any = tiny_model(family, tiny).eval()
    inputs = tiny_batch(CPU)
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-2].float()
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 2:].flatten())
    patch(model)
    for spec in (HeadsSpec(count=1, shared=True), HeadsSpec(count=1)):
        attach(model, spec, Objective(stage=1))
        with scoring(model.eval()) as record:
            model(**inputs)
        detach(model)
        assert record.take()["head1_loss"] == pytest.approx(float(wanted), rel=2e-6)


def test_logits_that_no_head_can_follow_are_refused() -> None:
    def masked(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = LlamaForCausalLM.forward(self, *args, **kwargs)
        outputs.logits = outputs.logits.masked_fill(outputs.logits < 0, 0.0)
        return outputs

    LlamaForCausalLM = transformers.LlamaForCausalLM
    model: Any = tiny_model("llama")
    model.__class__ = type("Masked", (LlamaForCausalLM,), {"forward": masked})
    with pytest.raises(PatchError, match="neither a product with a number"):
        attach(model, SHARED, Objective())
    projected: Any = tiny_model("llama")
    projected.__class__ = type("Projected", (LlamaForCausalLM,), {"forward": _projecting})
    with pytest.raises(PatchError, match="is not given its trunk's last hidden state"):
        attach(projected, SHARED, Objective())


def _projecting(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
    hidden = self.model(input_ids).last_hidden_state
    return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden.relu()))


def test_observing_the_path_to_the_logits_leaves_the_model_unchanged() -> None:
    """No hook runs, no random number is drawn and no attribute is set. The weights may be missing."""
    model: Any = tiny_model("llama")
    calls: list[str] = []
    for name in ("model", "lm_head"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    before, state = {n: dict(vars(m)) for n, m in model.named_modules()}, torch.get_rng_state()
    assert observed_logit_map(model) == LogitMap()
    assert observed_logit_map(tiny_model("gemma2", {"final_logit_softcapping": 3.0}).to("meta")) == LogitMap(1.0, 3.0)
    assert not calls and torch.equal(torch.get_rng_state(), state)
    assert {n: dict(vars(m)) for n, m in model.named_modules()} == before


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("fused", [True, False], ids=["patched", "unpatched"])
def test_copied_and_pickled_models_keep_their_heads(spec: HeadsSpec, fused: bool) -> None:
    model = with_heads(spec, Objective(stage=2), fused=fused)
    wanted = model(**batch()).loss.detach()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for twin in copies:
        loss = twin(**batch()).loss
        torch.testing.assert_close(loss.detach(), wanted, rtol=0, atol=0)
        loss.backward()
        assert heads_of(twin) is not heads_of(model) and all(p.grad is None for p in model.parameters())
        detach(twin)
        assert unpatch(twin) or not fused
        assert type(twin) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_input_embeddings_give_the_gradients_of_their_tokens(spec: HeadsSpec) -> None:
    model = with_heads(spec, Objective(stage=2))
    inputs = batch()
    wanted = gradients(model, model(**inputs).loss)
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    got = gradients(model, model(inputs_embeds=embeds, **inputs).loss)
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "given", [{"shift_labels": torch.zeros(2, 18, dtype=torch.long)}, {"ignore_index": 0}, {"logits_to_keep": 6}]
)
def test_loss_arguments_that_heads_cannot_follow_are_refused(given: dict[str, Any]) -> None:
    model = with_heads(SHARED, Objective(stage=2))
    with pytest.raises(UsageError, match=f"{next(iter(given))} is not supported"):
        model(**batch(), **given)
    assert model(**batch(), ignore_index=-100, logits_to_keep=0).loss.isfinite()


def test_undo_is_refused_with_heads_attached_and_unpatch_restores_the_layers() -> None:
    ids = torch.randint(3, 97, (2, 14))
    model = tiny_model("llama", MODELS["llama"].tiny)
    report = patch(model)
    attach(model, HeadsSpec(count=2), Objective(stage=1))
    with pytest.raises(PatchError, match="undo the later patch first"):
        report.undo()
    assert model.train()(input_ids=ids, labels=ids).loss.requires_grad
    assert unpatch(model) and not any(isinstance(m, PatchedModule) for m in model.modules())
