"""A patched Llama computes the loss and gradients of an unpatched one, in every way it is called."""

from __future__ import annotations

import copy

import pytest
import torch
from models_helpers import CONFIGS, VOCAB, assert_close, batch, call, llama, loss_and_gradients, twins
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


def test_hidden_states_and_attentions_can_be_recorded():
    patched, original = twins("wide-heads-eager")
    patch(patched)
    want = original(**INPUTS, output_hidden_states=True, output_attentions=True)
    got = patched(**INPUTS, output_hidden_states=True, output_attentions=True)
    assert len(got.hidden_states) == len(want.hidden_states) == 3 and len(got.attentions) == 2
    for a, b in zip((*got.hidden_states, *got.attentions), (*want.hidden_states, *want.attentions), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
