"""A patched Llama computes the loss and gradients of an unpatched one, in every way it is called."""

from __future__ import annotations

import copy

import pytest
import torch
from models_helpers import CONFIGS, VOCAB, assert_close, batch, call, llama, loss_and_gradients, relative_errors, twins
from torch.utils.checkpoint import checkpoint

from tigon.models import patch

INPUTS = batch()
TARGETS = torch.nn.functional.pad(INPUTS["labels"], (0, 1), value=-100)[..., 1:].contiguous()


def packed():
    """Two documents in one row, told apart by position_ids that start again."""
    ids = batch(1, 20, seed=5)["input_ids"]
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    labels = ids.clone()
    labels[0, [0, 8]] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def padded():
    inputs = batch(seed=6)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :4] = 0
    labels = inputs["labels"].masked_fill(mask == 0, -100)
    return {**inputs, "labels": labels, "attention_mask": mask}


CALLS = {
    "labels": INPUTS,
    "shift_labels": {**INPUTS, "shift_labels": TARGETS},
    "shift_labels-win-over-labels": {**INPUTS, "labels": torch.full_like(TARGETS, 7), "shift_labels": TARGETS},
    "num_items-int": {**INPUTS, "num_items_in_batch": 11},
    "num_items-float": {**INPUTS, "num_items_in_batch": 11.5},
    "num_items-tensor": {**INPUTS, "num_items_in_batch": torch.tensor(11)},
    "num_items-one-element": {**INPUTS, "num_items_in_batch": torch.tensor([11])},
    "ignore_index": {**INPUTS, "labels": INPUTS["labels"].masked_fill(INPUTS["labels"] == -100, 5), "ignore_index": 5},
    "packed-position_ids": packed(),
    "left-padding": padded(),
    "logits_to_keep": {**INPUTS, "labels": INPUTS["labels"][:, -6:], "logits_to_keep": 6},
    "logits_to_keep-indices": {
        **INPUTS,
        "shift_labels": TARGETS[:, [3, 9, 12]],
        "logits_to_keep": torch.tensor([3, 9, 12]),
    },
    "int32-free-inputs_embeds": {
        "inputs_embeds": torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(2)),
        "labels": INPUTS["labels"],
    },
    "use_cache-off": {**INPUTS, "use_cache": False},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_each_llama_generation_trains_as_before(config):
    patched, original = twins(config)
    report = patch(patched)
    assert report.counts["linear_cross_entropy"] == 1 and not report.left_alone
    want = loss_and_gradients(original, call(**INPUTS))
    got = loss_and_gradients(patched, call(**INPUTS))
    assert_close(got, want, exact=lambda: loss_and_gradients(copy.deepcopy(original).double(), call(**INPUTS)))


@pytest.mark.parametrize("name", CALLS)
def test_each_keyword_keeps_its_meaning(name):
    patched, original = twins()
    patch(patched)
    want = loss_and_gradients(original, call(**CALLS[name]))
    assert_close(loss_and_gradients(patched, call(**CALLS[name])), want)


@pytest.mark.parametrize(
    "flags",
    [
        {"linear_cross_entropy": False},
        {"linear_cross_entropy": False, "cross_entropy": False},
        {"cross_entropy": False},
        {"rms_norm": False, "rope": False, "mlp": False},
    ],
    ids=lambda flags: "-".join(flags),
)
def test_each_flag_alone_trains_as_before(flags):
    patched, original = twins()
    patch(patched, **flags)
    for inputs in (INPUTS, CALLS["num_items-tensor"], CALLS["shift_labels"]):
        want = loss_and_gradients(original, call(**inputs))
        assert_close(loss_and_gradients(patched, call(**inputs)), want)


def test_positional_labels_are_found():
    patched, original = twins()
    patch(patched)
    args = (INPUTS["input_ids"], None, None, None, None, INPUTS["labels"])
    want = loss_and_gradients(original, lambda model: model(*args).loss)
    assert_close(loss_and_gradients(patched, lambda model: model(*args).loss), want)


def test_return_dict_false_gives_loss_and_logits():
    patched, original = twins()
    patch(patched)
    want = original(**INPUTS, return_dict=False, use_cache=False)
    got = patched(**INPUTS, return_dict=False, use_cache=False)
    assert len(got) == len(want) == 2
    torch.testing.assert_close(got[0], want[0])
    with pytest.warns(UserWarning, match="were read"):
        torch.testing.assert_close(got[1] + 0, want[1])


def test_shift_labels_without_labels_computes_no_loss_like_transformers():
    patched, original = twins()
    patch(patched)
    inputs = {"input_ids": INPUTS["input_ids"], "shift_labels": TARGETS}
    assert original(**inputs).loss is None and patched(**inputs).loss is None


def test_labels_that_do_not_fit_logits_to_keep_are_refused():
    model = llama()
    patch(model)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(**INPUTS, logits_to_keep=4)
    # The next call is not disturbed by what the failed one left behind.
    assert model(input_ids=INPUTS["input_ids"]).logits.shape == (2, 19, VOCAB)


def test_gradient_accumulation_with_num_items_equals_one_large_batch():
    model = llama()
    patch(model)
    inputs = batch(4, 12, seed=3)
    inputs["labels"][2] = -100  # a micro-batch without a single target
    items = (inputs["labels"][:, 1:] != -100).sum()

    def run(micro_batch):
        def losses(model):
            rows = range(0, 4, micro_batch)
            parts = [{name: t[i : i + micro_batch] for name, t in inputs.items()} for i in rows]
            return torch.stack([model(**part, num_items_in_batch=items).loss for part in parts]).sum()

        return losses

    want = loss_and_gradients(model, run(4))
    for micro_batch in (1, 2):
        assert_close(loss_and_gradients(model, run(micro_batch)), want)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_trains_as_before(use_reentrant):
    patched, original = twins()
    patch(patched)
    want = loss_and_gradients(original, call(**INPUTS))
    patched.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    patched.enable_input_require_grads()
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)


def test_checkpointing_the_whole_model_recomputes_the_same_loss():
    patched, original = twins()
    patch(patched)
    ids, labels = INPUTS["input_ids"], INPUTS["labels"]

    def run(model):
        return checkpoint(lambda: model(input_ids=ids, labels=labels, use_cache=False).loss, use_reentrant=False)

    want = loss_and_gradients(original, call(**INPUTS))
    assert_close(loss_and_gradients(patched, run), want)


@pytest.mark.parametrize("config", ["grouped-query", "tied-llama3-rope"])
def test_bf16_error_is_at_most_twice_that_of_the_unpatched_model(config):
    truth = loss_and_gradients(llama(config).double(), call(**INPUTS))
    original = llama(config, torch.bfloat16)
    patched = llama(config, torch.bfloat16)
    patch(patched)
    baseline = relative_errors(loss_and_gradients(original, call(**INPUTS)), truth)
    errors = relative_errors(loss_and_gradients(patched, call(**INPUTS)), truth)
    # The loss is one number, whose error may be zero by luck: its floor is a rounding of bf16 hidden states.
    worse = {name: (error, baseline[name]) for name, error in errors.items() if error > 2 * max(baseline[name], 1e-3)}
    assert not worse, worse


def test_bf16_autocast_over_fp32_weights_is_as_close_as_unpatched():
    truth = loss_and_gradients(llama().double(), call(**INPUTS))
    patched, original = twins()
    patch(patched)

    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(**INPUTS).loss

    baseline = relative_errors(loss_and_gradients(original, run), truth)
    got = loss_and_gradients(patched, run)
    assert all(t.dtype == torch.float32 for t in got.values())
    worse = {k: (e, baseline[k]) for k, e in relative_errors(got, truth).items() if e > 2 * max(baseline[k], 1e-3)}
    assert not worse, worse


def test_all_labels_ignored_gives_zero_loss_and_exactly_zero_gradients():
    model = llama()
    patch(model)
    labels = torch.full_like(INPUTS["labels"], -100)
    for inputs in ({"labels": labels}, {"labels": labels, "num_items_in_batch": 0}):
        got = loss_and_gradients(model, call(input_ids=INPUTS["input_ids"], **inputs))
        assert got.keys() - {"loss"} == dict(model.named_parameters()).keys()
        assert all(torch.equal(t, torch.zeros_like(t)) for t in got.values())


def test_frozen_trunk_trains_the_head():
    patched, original = twins()
    patch(patched)
    for model in (patched, original):
        model.model.requires_grad_(False)
    want = loss_and_gradients(original, call(**INPUTS))
    assert want.keys() == {"loss", "lm_head.weight"}
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)


def test_frozen_head_trains_the_trunk():
    patched, original = twins()
    patch(patched)
    for model in (patched, original):
        model.lm_head.requires_grad_(False)
    want = loss_and_gradients(original, call(**INPUTS))
    assert "lm_head.weight" not in want
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)


def test_head_with_a_bias_trains_the_bias():
    patched, original = twins()
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    for model in (patched, original):
        model.lm_head.bias = torch.nn.Parameter(bias.clone())
    patch(patched)
    want = loss_and_gradients(original, call(**INPUTS))
    assert "lm_head.bias" in want
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)


def test_eval_gives_the_logits_and_the_loss():
    patched, original = twins()
    patch(patched)
    patched.eval(), original.eval()
    with torch.no_grad():
        want, got = original(**INPUTS), patched(**INPUTS)
    assert type(got.logits) is torch.Tensor
    torch.testing.assert_close(got.logits, want.logits)
    torch.testing.assert_close(got.loss, want.loss)


def test_without_labels_training_gives_plain_logits():
    patched, original = twins()
    patch(patched)
    want = original(input_ids=INPUTS["input_ids"]).logits
    got = patched(input_ids=INPUTS["input_ids"]).logits
    assert type(got) is torch.Tensor and got.requires_grad
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_generate_writes_the_same_tokens(options):
    patched, original = twins()
    patch(patched)
    patched.eval(), original.eval()
    ids = INPUTS["input_ids"][:, :7]
    options = {"max_new_tokens": 9, "attention_mask": torch.ones_like(ids), **options}
    assert torch.equal(patched.generate(ids, **options), original.generate(ids, **options))


def test_training_ten_steps_ends_at_the_same_weights():
    patched, original = twins()
    patch(patched)
    for model in (patched, original):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(10):
            optimizer.zero_grad()
            model(**batch(seed=step)).loss.backward()
            optimizer.step()
    for (name, got), want in zip(patched.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_second_backward_and_in_place_loss_scaling_work():
    patched, original = twins()
    patch(patched)

    def run(model):
        loss = model(**INPUTS).loss
        loss *= 3  # the Trainer multiplies by the number of processes
        loss.backward(retain_graph=True)
        return loss

    assert_close(loss_and_gradients(patched, run), loss_and_gradients(original, run))


def test_hidden_states_and_attentions_can_be_recorded():
    patched, original = twins("wide-heads-eager")
    patch(patched)
    want = original(**INPUTS, output_hidden_states=True, output_attentions=True)
    got = patched(**INPUTS, output_hidden_states=True, output_attentions=True)
    assert len(got.hidden_states) == len(want.hidden_states) == 3 and len(got.attentions) == 2
    for a, b in zip((*got.hidden_states, *got.attentions), (*want.hidden_states, *want.attentions), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_patched_model_trains_alone():
    patched, original = twins()
    patch(patched)
    clone = copy.deepcopy(patched)
    want = loss_and_gradients(original, call(**INPUTS))
    assert_close(loss_and_gradients(clone, call(**INPUTS)), want)
    assert all(p.grad is None for p in patched.parameters())
