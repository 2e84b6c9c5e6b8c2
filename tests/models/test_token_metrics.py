"""`return_token_accuracy`, `return_predicted_tokens` and `skip_logits` of a patched model's forward."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tigon
from tigon.models.kv_cache import CACHE_ARGUMENTS
from tigon.models.seams.head.deferred_logits import MaterializedLogitsWarning
from tigon.models.seams.head.traced_logits import UncomputedLogits
from tigon.models.table import MODELS
from tigon.models.verification.tiny import tiny_model

METRICS = {"return_token_accuracy": True, "return_predicted_tokens": True}


def llama(layers: int = 2, **flags: Any) -> nn.Module:
    torch.manual_seed(0)
    model = tiny_model("llama", {**MODELS["llama"].tiny, "num_hidden_layers": layers})
    tigon.patch(model, **flags)
    return model.train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def expected(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    predicted, counts = logits.argmax(-1).reshape(-1), target != -100
    return (predicted[counts] == target[counts]).float().mean(), torch.where(counts, predicted, -1)


def half_right(model: nn.Module) -> dict[str, Tensor]:
    """The batch with labels of which the model predicts some and misses some."""
    plain = batch()
    with torch.no_grad():
        predicted = model(input_ids=plain["input_ids"]).logits.argmax(-1)
    plain["labels"][1, 1::2] = predicted[1, 0:-1:2]
    return plain


@pytest.mark.parametrize("mode", ["train", "eval", "eval-skip_logits", "logits"])
def test_metrics_on_the_outputs_match_the_logits(mode: str) -> None:
    model = llama(linear_cross_entropy=False) if mode == "logits" else llama()
    inputs = half_right(model)
    with torch.no_grad():
        plain = model.eval()(input_ids=inputs["input_ids"])
    model.train(mode in ("train", "logits"))
    keywords = {"skip_logits": True} if mode == "eval-skip_logits" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaterializedLogitsWarning)
        outputs = model(**inputs, **METRICS, **keywords)
    accuracy, tokens = expected(plain.logits, inputs["labels"])
    assert 0 < float(accuracy) < 1
    torch.testing.assert_close(outputs.token_accuracy, accuracy)
    assert torch.equal(outputs.predicted_tokens, tokens)
    assert torch.equal(outputs["predicted_tokens"], tokens) and isinstance(outputs, type(plain))
    torch.testing.assert_close(outputs.loss, model(**inputs).loss)
    assert not hasattr(model(**inputs), "token_accuracy")


def test_metrics_not_requested_are_none_and_a_tuple_ends_with_the_requested_ones() -> None:
    model = llama()
    outputs = model(**batch(), return_token_accuracy=True)
    assert outputs.predicted_tokens is None and outputs.token_accuracy.ndim == 0
    plain = model(**batch(), return_dict=False)
    pair = model(**batch(), return_dict=False, **METRICS)
    assert len(pair) == len(plain) + 2
    torch.testing.assert_close(pair[-2], outputs.token_accuracy)
    assert pair[-1].shape == (18,)


def test_metrics_count_logits_changed_by_a_hook_of_the_head() -> None:
    model = llama()
    model.lm_head.register_forward_hook(lambda module, args, output: output + 100 * (torch.arange(97) == 7))
    with pytest.warns(MaterializedLogitsWarning):
        tokens = model(**batch(), **METRICS).predicted_tokens
    assert set(tokens.tolist()) == {-1, 7}


def test_outputs_with_metrics_survive_pickle_and_pytrees() -> None:
    outputs = llama()(**batch(), **METRICS)
    left_out = {"logits", *CACHE_ARGUMENTS}
    kept = {name: value for name, value in outputs.items() if name not in left_out}
    outputs = type(outputs)(**{**kept, "loss": outputs.loss.detach()})
    copy = pickle.loads(pickle.dumps(outputs))
    assert torch.equal(copy.predicted_tokens, outputs.predicted_tokens) and type(copy) is type(outputs)
    doubled = torch.utils._pytree.tree_map_only(Tensor, lambda x: 2 * x, outputs)
    assert torch.equal(doubled.token_accuracy, 2 * outputs.token_accuracy)


def test_metrics_of_a_compiled_step_equal_those_of_eager_mode() -> None:
    model = llama(layers=1)
    eager = model(**batch(), **METRICS)
    compiled = torch.compile(model, backend="aot_eager")(**batch(), **METRICS)
    assert isinstance(compiled.logits, UncomputedLogits), "the compiled step has computed all logits"
    torch.testing.assert_close(compiled.token_accuracy, eager.token_accuracy)
    assert torch.equal(compiled.predicted_tokens, eager.predicted_tokens)


def test_metrics_cover_the_kept_logits_and_need_labels() -> None:
    model, ids = llama().eval(), batch()["input_ids"]
    kept = model(input_ids=ids, labels=ids[:, -4:], logits_to_keep=4, **METRICS)
    assert torch.equal(kept.predicted_tokens, expected(kept.logits, ids[:, -4:])[1])
    assert not hasattr(model(input_ids=ids, **METRICS), "token_accuracy")


def test_skip_logits_without_labels_is_refused() -> None:
    model = llama()
    with pytest.raises(ValueError, match="skip_logits=True, but labels and shift_labels are None"):
        model(input_ids=batch()["input_ids"], skip_logits=True)
    assert model(input_ids=batch()["input_ids"], skip_logits=False).logits.shape == (2, 9, 97)


def test_skip_logits_with_shift_labels_alone_gives_their_loss() -> None:
    model, ids = llama().eval(), batch()["input_ids"]
    shifted = torch.nn.functional.pad(batch()["labels"], (0, 1), value=-100)[:, 1:]
    outputs = model(input_ids=ids, shift_labels=shifted, skip_logits=True)
    torch.testing.assert_close(outputs.loss, model(**batch()).loss)


def test_positional_labels_of_none_give_way_to_shift_labels() -> None:
    model, ids = llama().eval(), batch()["input_ids"]
    shifted = torch.nn.functional.pad(batch()["labels"], (0, 1), value=-100)[:, 1:]
    outputs = model(ids, None, None, None, None, None, shift_labels=shifted, skip_logits=True)  # labels is the sixth
    torch.testing.assert_close(outputs.loss, model(**batch()).loss)


def test_compiled_skip_logits_computes_no_logits() -> None:
    model = llama(layers=1).eval()
    compiled = torch.compile(model, backend="aot_eager")(**batch(), skip_logits=True)
    assert isinstance(compiled.logits, UncomputedLogits)
    torch.testing.assert_close(compiled.loss, model(**batch()).loss)


@pytest.mark.parametrize("place", ["layer", "head"])
def test_metrics_count_labels_that_a_hook_has_edited(place: str) -> None:
    model, inputs = llama(), batch()

    def edit(module: nn.Module, args: Any, output: Any) -> None:
        inputs["labels"][:, :6] = -100

    {"layer": model.model.layers[0], "head": model.lm_head}[place].register_forward_hook(edit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedLogitsWarning)
        tokens = model(**inputs, **METRICS).predicted_tokens
    assert int((tokens != -1).sum()) == int((inputs["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("router_logits", [True, False], ids=["two losses", "one loss"])
def test_metrics_end_the_tuple_of_a_mixture(training: bool, router_logits: bool) -> None:
    torch.manual_seed(0)
    model = tiny_model("mixtral", MODELS["mixtral"].tiny)
    tigon.patch(model)
    model.train(training)
    inputs = {**batch(), "output_router_logits": router_logits}
    named = model(**inputs, **METRICS)
    pair = model(**inputs, **METRICS, return_dict=False)
    torch.testing.assert_close(pair[-2], named.token_accuracy)
    assert torch.equal(pair[-1], named.predicted_tokens)


def test_metrics_that_cannot_be_computed_are_none_at_the_end_of_a_tuple() -> None:
    model, ids = llama(), batch()["input_ids"]
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.float().mean()
    outputs = model(input_ids=ids, labels=ids, logits_to_keep=4, return_dict=False, **METRICS)
    assert outputs[-2:] == (None, None) and outputs[0].ndim == 0
