"""A model may edit labels or logits between its head and its loss, and may call the loss more than once. The
patched model's loss and gradients are those of its unpatched twin."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models_helpers import VOCAB, batch, loss_and_gradients, relative_errors, twins
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from tigon import patch
from tigon.models.seams.head.deferred_logits import DeferredLogits, MaterializedLogitsWarning

Between = Callable[[Any, Tensor, Callable[..., Tensor]], Tensor]
"""Variants of the code after the head: (logits, labels, ask) -> loss, where ask(logits, labels, **options) is the
model's loss_function."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaterializedLogitsWarning)
        yield


def with_forward(model: nn.Module, between: Between) -> nn.Module:
    """The model, with a forward that calls trunk and head as transformers does and then `between`."""

    def forward(self: Any, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        assert labels is not None
        loss_function = self.loss_function  # named here, where the patch looks for it

        def ask(logits: Any, labels: Tensor, **options: Any) -> Tensor:
            loss: Tensor = loss_function(logits=logits, labels=labels, vocab_size=VOCAB, **options)
            return loss

        return CausalLMOutputWithPast(loss=between(logits, labels, ask), logits=logits)

    base = type(model)
    model.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": __name__})
    return model


def silent(action: Callable[[], Any]) -> Callable[..., None]:
    """A hook that acts and returns nothing, so that the module's output stays."""

    def hook(*_: Any) -> None:
        action()

    return hook


def fresh() -> dict[str, Tensor]:
    """Makes a new batch for every run, because the runs write to their labels."""
    return {name: value.clone() for name, value in batch().items()}


def assert_twins_agree(patched: nn.Module, original: nn.Module) -> None:
    want = loss_and_gradients(original, lambda model: model(**fresh()).loss)
    got = loss_and_gradients(patched, lambda model: model(**fresh()).loss)
    errors = {name: error for name, error in relative_errors(got, want).items() if not error <= 2e-5}
    assert not errors, errors


def assert_same_training(between: Between) -> None:
    patched, original = (with_forward(model, between) for model in twins())
    assert patch(patched).counts["linear_cross_entropy"] == 1
    assert_twins_agree(patched, original)


# --- labels -----------------------------------------------------------------------------------------------------------

LABEL_EDITS: dict[str, Callable[[Tensor], Any]] = {
    "setitem": lambda labels: labels.__setitem__((slice(None), slice(0, 5)), -100),
    "masked_fill_": lambda labels: labels.masked_fill_(labels > 60, -100),
    "view": lambda labels: labels[0].copy_(labels[1]),
    "data": lambda labels: labels.data.__setitem__((0, slice(3, 9)), -100),
    "numpy": lambda labels: labels.numpy().__setitem__((1, slice(2, 6)), 7),
}


@pytest.mark.parametrize("edit", LABEL_EDITS.values(), ids=LABEL_EDITS.keys())
def test_labels_edited_before_super_forward_count_in_the_loss(edit: Callable[[Tensor], Any]) -> None:
    patched, original = twins()
    for model in (patched, original):
        base: Any = type(model)

        class Editing(base):  # type: ignore[misc]
            def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
                edit(labels)
                return super().forward(input_ids=input_ids, labels=labels, **kwargs)

        model.__class__ = Editing
    patch(patched)
    assert type(patched(**fresh()).logits) is DeferredLogits
    assert_twins_agree(patched, original)


@pytest.mark.parametrize("where", ["model.layers.0", "lm_head"])
@pytest.mark.parametrize("edit", LABEL_EDITS.values(), ids=LABEL_EDITS.keys())
def test_labels_edited_by_a_hook_count_in_the_loss(edit: Callable[[Tensor], Any], where: str) -> None:
    """A hook of a layer runs before the head has read the labels, a forward hook of the head after it."""
    patched, original = twins()
    patch(patched)
    labels: list[Tensor] = []
    for model in (patched, original):
        model.get_submodule(where).register_forward_hook(silent(lambda: edit(labels[-1])))

    def run(model: nn.Module) -> Tensor:
        inputs = fresh()
        labels.append(inputs["labels"])
        loss: Tensor = model(**inputs).loss
        return loss

    want, got = loss_and_gradients(original, run), loss_and_gradients(patched, run)
    assert max(relative_errors(got, want).values()) <= 2e-5


def test_labels_edited_before_the_head_cost_no_logits() -> None:
    patched, _ = twins()
    patch(patched)
    inputs = fresh()
    handle = patched.get_submodule("model.layers.0").register_forward_hook(
        lambda *_: inputs["labels"].__setitem__((slice(None), slice(0, 5)), -100)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patched(**inputs).loss.backward()
    handle.remove()


def test_items_edited_after_the_head_divide_the_loss() -> None:
    patched, original = twins()
    patch(patched)
    items: list[Tensor] = []
    for model in (patched, original):
        model.get_submodule("lm_head").register_forward_hook(silent(lambda: items[-1].mul_(2)))

    def run(model: nn.Module) -> Tensor:
        items.append(torch.tensor(11))
        loss: Tensor = model(**fresh(), num_items_in_batch=items[-1]).loss
        return loss

    want, got = loss_and_gradients(original, run), loss_and_gradients(patched, run)
    assert max(relative_errors(got, want).values()) <= 2e-5


# --- logits -----------------------------------------------------------------------------------------------------------


def without_gradients(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def run(logits: Tensor) -> None:
        with torch.no_grad():
            write(logits)

    return run


def in_inference_mode(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def run(logits: Tensor) -> None:
        with torch.inference_mode():
            write(logits)

    return run


def _replace_data(logits: Tensor) -> None:
    logits.data = logits.data * 2


LOGIT_EDITS: dict[str, Callable[[Tensor], Any]] = {
    "setitem": without_gradients(lambda z: z.__setitem__((Ellipsis, slice(90, None)), -1e4)),
    "clamp_": without_gradients(lambda z: z.clamp_(-0.5, 0.5)),
    "foreach": without_gradients(lambda z: torch._foreach_mul_([z], 2.0)),
    "out": without_gradients(lambda z: torch.mul(z, 2, out=z)),
    "out-of-another": without_gradients(lambda z: torch.mul(z.clone(), 2, out=z)),
    "inference-mode": in_inference_mode(lambda z: z.mul_(2)),
    "detach": lambda z: z.detach().mul_(2),
    "detach-cast-to-its-dtype": lambda z: z.detach().float().mul_(2),
    "data": lambda z: z.data.mul_(2),
    "set-data": _replace_data,
    "view": without_gradients(lambda z: z.view(-1, VOCAB)[3:9].mul_(2)),
    "row": without_gradients(lambda z: z[0].mul_(2)),
    "unbind": without_gradients(lambda z: z.unbind(0)[1].zero_()),
    "data-of-a-view": lambda z: z.transpose(0, 1).data.mul_(2),
    "numpy": lambda z: z.detach().numpy().__imul__(2),
    "autograd": lambda z: z.mul_(2),
}


@pytest.mark.parametrize("edit", LOGIT_EDITS.values(), ids=LOGIT_EDITS.keys())
def test_logits_edited_between_head_and_loss_count_in_the_loss(edit: Callable[[Tensor], Any]) -> None:
    def between(logits: Any, labels: Tensor, ask: Callable[..., Tensor]) -> Tensor:
        edit(logits)
        return ask(logits, labels)

    assert_same_training(between)


@pytest.mark.parametrize("edit", LOGIT_EDITS.values(), ids=LOGIT_EDITS.keys())
def test_logits_edited_by_a_hook_of_the_head_count_in_the_loss(edit: Callable[[Tensor], Any]) -> None:
    patched, original = twins()
    patch(patched)
    for model in (patched, original):
        model.get_submodule("lm_head").register_forward_hook(lambda _, __, output: (edit(output), None)[1])
    assert_twins_agree(patched, original)


def test_copy_of_the_logits_keeps_what_they_were_before_an_edit() -> None:
    def between(logits: Any, labels: Tensor, ask: Callable[..., Tensor]) -> Tensor:
        doubled, cast = logits * 2, logits.double()
        with torch.no_grad():
            logits.mul_(3)
        return ask(doubled, labels) + 0.5 * ask(cast.float(), labels) + 0.25 * ask(logits, labels)

    assert_same_training(between)


def test_edited_logits_are_the_logits_of_the_output() -> None:
    def between(logits: Any, labels: Tensor, ask: Callable[..., Tensor]) -> Tensor:
        logits.detach().mul_(2)
        return ask(logits, labels)

    patched, original = (with_forward(model, between) for model in twins())
    patch(patched)
    torch.testing.assert_close(patched(**fresh()).logits + 0, original(**fresh()).logits)


def test_hook_on_the_logits_gets_the_gradient_of_edited_logits() -> None:
    def between(logits: Any, labels: Tensor, ask: Callable[..., Tensor]) -> Tensor:
        logits.register_hook(lambda grad: grad * 3)
        logits.detach().mul_(2)
        logits.register_hook(lambda grad: grad + 0.01)
        return ask(logits, labels)

    assert_same_training(between)


# --- the loss, asked for more than once -------------------------------------------------------------------------------


def _without_gradient(logits: Any, labels: Tensor, ask: Callable[..., Tensor]) -> Tensor:
    with torch.no_grad():
        first = ask(logits, labels)
    return ask(logits, labels) * first


def _changed_in_place(logits: Any, labels: Tensor, ask: Callable[..., Tensor]) -> Tensor:
    first = ask(logits, labels)
    first *= 3
    return first + ask(logits, labels)


ASKED_AGAIN: dict[str, Between] = {
    "twice": lambda z, labels, ask: ask(z, labels) + ask(z, labels),
    "three-times": lambda z, labels, ask: ask(z, labels) + 2 * ask(z, labels) - 0.5 * ask(z, labels),
    "product": lambda z, labels, ask: ask(z, labels) * ask(z, labels),
    "logits-detached": lambda z, labels, ask: ask(z, labels) * ask(z.detach(), labels),
    "loss-detached": lambda z, labels, ask: ask(z, labels) / ask(z, labels).detach(),
    "without-gradient": _without_gradient,
    "changed-in-place": _changed_in_place,
    "through-a-cast": lambda z, labels, ask: ask(z, labels) + ask(z.float(), labels),
    "other-labels": lambda z, labels, ask: ask(z, labels) + 0.5 * ask(z, labels.roll(1, 1)),
    "shift-labels": lambda z, labels, ask: ask(z, labels) + 0.5 * ask(z, labels, shift_labels=labels.roll(-2, 1)),
    "other-count": lambda z, labels, ask: ask(z, labels) + ask(z, labels, num_items_in_batch=7),
    "other-ignore-index": lambda z, labels, ask: ask(z, labels) + ask(z, labels.clamp(min=0), ignore_index=0),
}


@pytest.mark.parametrize("between", ASKED_AGAIN.values(), ids=ASKED_AGAIN.keys())
def test_loss_asked_for_again_has_the_unpatched_models_gradients(between: Between) -> None:
    assert_same_training(between)


def test_repeated_loss_of_one_pair_computes_no_logits() -> None:
    patched, _ = twins()
    with_forward(patched, ASKED_AGAIN["logits-detached"])
    patch(patched)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patched(**fresh()).loss.backward()


# --- any order of these -----------------------------------------------------------------------------------------------


def _random_between(seed: int) -> Between:
    """Up to six edits of labels, edits of logits, copies, aliases and losses, in any order."""

    def between(logits: Any, labels: Tensor, ask: Callable[..., Tensor]) -> Tensor:
        choose = random.Random(seed)
        made: list[Any] = [logits]
        loss = 0.0 * ask(logits, labels) if choose.random() < 0.5 else torch.zeros(())
        for _ in range(choose.randint(1, 6)):
            z, action = choose.choice(made), choose.randrange(4)
            if action == 0:
                choose.choice([edit for name, edit in LOGIT_EDITS.items() if name not in ("setitem", "set-data")])(z)
            elif action == 1:
                made.append(choose.choice([z * 1.25, z.float(), z.clone(), z.detach(), z.contiguous(), z / 2.0]))
            elif action == 2:
                choose.choice(list(LABEL_EDITS.values()))(labels)
            else:
                loss = loss + choose.uniform(0.2, 1.0) * choose.choice(list(ASKED_AGAIN.values()))(z, labels, ask)
        return loss + ask(logits, labels)

    return between


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_edits_and_losses_trains_as_unpatched(seed: int) -> None:
    between = _random_between(seed)
    patched, original = (with_forward(model, between) for model in twins())
    patch(patched)
    try:
        loss_and_gradients(original, lambda model: model(**fresh()).loss)
    except RuntimeError:  # autograd refuses an edit of what it has saved, or of a label out of range
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            loss_and_gradients(patched, lambda model: model(**fresh()).loss)
        return
    try:
        loss_and_gradients(patched, lambda model: model(**fresh()).loss)
    except RuntimeError as error:  # tigon's cross entropy keeps the logits, PyTorch's a copy of them
        assert "modified by an inplace operation" in str(error)
        return
    assert_twins_agree(patched, original)


# --- compiled ---------------------------------------------------------------------------------------------------------

COMPILED_EDITS: dict[str, Between] = {
    name: (lambda edit: lambda z, labels, ask: (edit(z), ask(z, labels))[1])(LOGIT_EDITS[name])
    for name in ("setitem", "data")
}


@pytest.mark.parametrize("between", COMPILED_EDITS.values(), ids=COMPILED_EDITS.keys())
def test_compiled_step_counts_edits_of_logits(between: Between) -> None:
    patched, original = (with_forward(model, between) for model in twins(num_hidden_layers=1))
    patch(patched)
    torch._dynamo.reset()
    compiled = torch.compile(patched, backend="eager", fullgraph=True)
    want = loss_and_gradients(original, lambda model: model(**fresh()).loss)
    got = loss_and_gradients(patched, lambda _: compiled(**fresh()).loss)
    assert max(relative_errors(got, want).values()) <= 2e-5


def test_compiled_step_whose_labels_change_after_the_head_returns_nan() -> None:
    def between(logits: Any, labels: Tensor, ask: Callable[..., Tensor]) -> Tensor:
        labels[:, :5] = -100
        return ask(logits, labels)

    patched, _ = twins(num_hidden_layers=1)
    with_forward(patched, between)
    patch(patched)
    torch._dynamo.reset()
    assert torch.compile(patched, backend="eager", fullgraph=True)(**fresh()).loss.isnan()
