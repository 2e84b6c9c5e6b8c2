"""The losses of heads, and every gradient, beside the definition written out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from heads_helpers import (
    CPU,
    MTP,
    SPECS,
    batch,
    by_definition,
    gradients,
    two_documents,
    with_heads,
)

from helpers import farthest
from second_proofs import DIFFERENT, proved_by
from tigon.medusa import HeadsSpec, Objective
from tigon.models import MODELS, patch
from tigon.models.verification.tiny import tiny_batch, tiny_model
from tigon.profiler.recording.peak import PeakMeter

pytest.importorskip("transformers")

LIMIT = 1e-5
STAGES = {stage: Objective(stage=stage, decay=0.7, coefficient=0.3) for stage in (1, 2)}
every_kind = pytest.mark.parametrize("kind", SPECS)
both_stages = pytest.mark.parametrize("stage", STAGES)
both_losses = pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])


def both(model: Any, inputs: dict[str, Any], objective: Objective, num_items: Any = None) -> tuple[Any, Any]:
    """((loss, gradients) of the model's own forward, of the definition)"""
    more = {} if num_items is None else {"num_items_in_batch": num_items}
    loss = model(**inputs, **more).loss
    got = loss.detach(), gradients(model, loss)
    truth = by_definition(model, inputs, objective, num_items)
    return got, (truth.detach(), gradients(model, truth))


@every_kind
@both_stages
@both_losses
def test_loss_and_gradients_match_the_definition(kind: str, stage: int, fused: bool) -> None:
    model = with_heads(SPECS[kind], STAGES[stage], fused=fused)
    (loss, grads), (truth, wanted) = both(model, batch(), STAGES[stage])
    torch.testing.assert_close(loss, truth, rtol=LIMIT, atol=0)
    assert farthest(grads, wanted) < LIMIT


@every_kind
@both_stages
@both_losses
def test_packed_sequence_scores_no_head_across_documents(kind: str, stage: int, fused: bool) -> None:
    model = with_heads(SPECS[kind], STAGES[stage], fused=fused)
    inputs = batch(position_ids=two_documents())
    (loss, grads), (truth, wanted) = both(model, inputs, STAGES[stage])
    torch.testing.assert_close(loss, truth, rtol=LIMIT, atol=0)
    assert farthest(grads, wanted) < LIMIT


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_packed_documents_have_the_loss_of_separate_ones(kind: str) -> None:
    """Two documents packed in one row are compared with the same documents in two rows."""
    model = with_heads(SPECS[kind], STAGES[2])
    whole = tiny_batch(CPU, rows=1)
    first = two_documents()[:1]
    items = torch.tensor(10)
    packed = {**whole, "position_ids": first, "labels": whole["input_ids"].masked_fill(first == 0, -100)}
    together = model(**packed, num_items_in_batch=items).loss
    apart = [
        model(input_ids=ids, labels=ids, num_items_in_batch=items).loss
        for ids in (whole["input_ids"][:, :7], whole["input_ids"][:, 7:])
    ]
    torch.testing.assert_close(together, sum(apart), rtol=LIMIT, atol=0)


@every_kind
@both_stages
def test_gradient_is_the_same_however_the_batch_is_split(kind: str, stage: int) -> None:
    """Two micro-batches of one row, which hold different numbers of labels, against both at once."""
    model = with_heads(SPECS[kind], STAGES[stage])
    inputs = batch()
    items = (inputs["labels"][:, 1:] != -100).sum()
    (_, at_once), (_, wanted) = both(model, inputs, STAGES[stage], items)
    model.zero_grad()
    for row in range(2):
        model(**{name: t[row : row + 1] for name, t in inputs.items()}, num_items_in_batch=items).loss.backward()
    split = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert farthest(split, at_once) < LIMIT
    assert farthest(at_once, wanted) < LIMIT


@every_kind
def test_head_further_ahead_than_the_sequence_is_not_scored(kind: str) -> None:
    """Rows of three tokens: the second head and those after it have nothing to predict, and get no gradient."""
    model = with_heads(SPECS[kind], STAGES[2]).double()
    inputs = {name: t[1:, :3].contiguous() for name, t in batch().items()}
    (loss, grads), (truth, wanted) = both(model, inputs, STAGES[2])
    torch.testing.assert_close(loss, truth, rtol=1e-10, atol=0)
    missing = {name: torch.zeros_like(t) for name, t in grads.items() if name not in wanted}
    assert farthest(grads, {**wanted, **missing}) < 1e-10
    if kind != "mtp":
        assert all(not t.any() for name, t in grads.items() if "blocks.1" in name or "blocks.2" in name)


@pytest.mark.parametrize("counted", [True, False], ids=["in place", "data"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_labels_that_a_layers_hook_edits_count(fused: bool, counted: bool) -> None:
    """Here it lets rows count that did not when the forward began; those are dropped before the products."""
    model = with_heads(SPECS["separate"], STAGES[2], fused=fused).double()
    inputs = batch()
    want = model(**inputs).loss
    labels = inputs["labels"].clone()
    inputs["labels"][:, :9] = -100

    def restore(*_: Any) -> None:
        (inputs["labels"] if counted else inputs["labels"].data).copy_(labels)  # `.data` has a separate version counter

    model.model.layers[0].register_forward_hook(restore)
    torch.testing.assert_close(model(**inputs).loss, want, rtol=1e-10, atol=0)


def test_batch_without_labels_gives_zero_loss_and_zero_gradients() -> None:
    model = with_heads(SPECS["separate"], STAGES[2])
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    loss = model(**inputs).loss
    assert float(loss.detach()) == 0.0
    assert all(not t.any() for t in gradients(model, loss).values())


@every_kind
def test_stage_1_gives_gradients_to_every_head_and_none_to_the_model(kind: str) -> None:
    model = with_heads(SPECS[kind], STAGES[1])
    grads = gradients(model, model(**batch()).loss)
    assert set(grads) == {f"draft_heads.{name}" for name, _ in model.draft_heads.named_parameters()}
    assert all(bool(t.any()) for t in grads.values())


def test_frozen_model_runs_in_evaluation_mode() -> None:
    """Dropout in what does not learn would only be noise."""
    model = with_heads(SPECS["shared"], STAGES[1])
    assert model.training and model.draft_heads.training and not model.model.training
    joint = with_heads(SPECS["shared"], STAGES[2])
    assert joint.model.training


def test_heads_start_with_the_logits_of_the_lm_head() -> None:
    """With residual blocks that are the identity, heads of both outputs begin with the model's logits."""
    from tigon.medusa import attach

    for spec in (HeadsSpec(count=2, layers=2), HeadsSpec(count=2, shared=True)):
        model: Any = tiny_model("llama")
        heads = attach(model, spec, Objective())
        hidden = torch.randn(5, 32)
        for logits in heads.logits(hidden, model.lm_head):
            torch.testing.assert_close(logits, model.lm_head(hidden), rtol=0, atol=0)


@pytest.mark.parametrize("family", proved_by(DIFFERENT, MODELS, "heads see a trunk and a head of the same kinds"))
def test_stage_2_loss_without_weight_for_heads_is_the_loss_of_the_model(family: str) -> None:
    """The families cap or scale their logits or tie their heads."""
    model: Any = tiny_model(family, MODELS[family].tiny, every_expert=True)
    inputs = tiny_batch(CPU)
    model.eval()
    with torch.no_grad():
        wanted = model(**inputs).loss
    from tigon.medusa import attach

    patch(model)
    attach(model, HeadsSpec(count=2, shared=True), Objective(stage=2, coefficient=1e-9))
    model.train()
    got = model(**inputs).loss
    torch.testing.assert_close(got.detach(), wanted, rtol=2e-5, atol=0)
    got.backward()


def test_loss_applies_schedule_coefficient_and_decay() -> None:
    objective = Objective(stage=2, decay=0.5, coefficient=0.4)
    assert objective.factors(3, 0.5) == [1.0, 0.1, 0.05, 0.025]
    assert objective.shifts(3) == [1, 2, 3, 4]
    assert dataclasses.replace(objective, stage=1).factors(2, 1.0) == [0.2, 0.1]
    assert dataclasses.replace(objective, stage=1).shifts(2) == [2, 3]
    model = with_heads(SPECS["shared"], objective)
    whole = float(model(**batch()).loss.detach())
    model.draft_heads.state.scheduled = 0.0
    own = float(model(**batch()).loss.detach())
    model.draft_heads.state.scheduled = 0.5
    assert float(model(**batch()).loss.detach()) == pytest.approx((whole + own) / 2, rel=1e-5)


# --- memory -----------------------------------------------------------------------------------------------------------


def step_bytes(count: int, *, shared: bool, fused: bool = True, stage: int = 2) -> tuple[int, int]:
    """(what a training step adds to the weights at its worst moment, the heads' own weights)"""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tigon.medusa import attach

    config = LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    if fused:
        patch(model)
    heads = attach(model, HeadsSpec(count=count, shared=shared), STAGES[stage])
    model.train()
    ids = torch.randint(0, 4096, (2, 1024), generator=torch.Generator().manual_seed(1))
    meter = PeakMeter(CPU)
    meter.start(list(model.parameters()))
    model(input_ids=ids, labels=ids).loss.backward()
    return meter.stop().step_bytes, sum(p.numel() * 4 for p in heads.parameters())


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
def test_memory_grows_with_the_heads_by_no_more_than_their_weights(shared: bool, stage: int) -> None:
    """From 2 heads to 6 the peak grows by the added gradients, and by no tensor as long as the rows.

    2048 tokens of 64 hidden values would take 512 KiB, and a chunk of logits 16 MiB.
    """
    (few, few_weights), (many, many_weights) = (step_bytes(n, shared=shared, stage=stage) for n in (2, 6))
    grown = many - few
    assert grown <= (many_weights - few_weights) + 2**17, (few, many)


def test_plain_loss_holds_the_logits_of_every_head() -> None:
    """That the count above can see what it looks for: with PyTorch's own ops each head adds its logits."""
    few, many = (step_bytes(n, shared=True, fused=False)[0] for n in (2, 4))
    assert many - few > 2 * 2048 * 4096 * 4


def test_frozen_trunk_keeps_no_activations() -> None:
    """Stage 1 against stage 2 of the same model: no gradient of the model, and nothing of its layers is kept."""
    one, two = step_bytes(2, shared=True, stage=1)[0], step_bytes(2, shared=True, stage=2)[0]
    embedding = 2 * 4096 * 64 * 4
    assert one < two - embedding, (one, two)


def test_decoder_layers_are_those_of_the_trunk_without_mtp_modules() -> None:
    """More modules than the model has layers: they must not be taken for the model's layers."""
    from tigon._trunk import decoder_layers

    model = with_heads(dataclasses.replace(MTP, count=4), STAGES[2])
    assert decoder_layers(model) == list(model.model.layers)
