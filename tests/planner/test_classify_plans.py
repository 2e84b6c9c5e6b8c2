"""Plans of classification: a head of few labels in place of lm_head, for decoders and encoders."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_helpers import BARE, request_of
from transformers import AutoConfig

from tigon.objectives.choose import config_for, objective_of
from tigon.planner.estimate import estimate
from tigon.planner.request import refusals
from tigon.recipe.keys import Recipe

RECIPE = Recipe().having({"train.objective": "classify"})
SHAPE = {
    "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2,
    "max_position_embeddings": 512, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_a_plan_of_a_classification_holds_no_lm_head_and_no_logits_of_the_vocabulary(model_type):
    plain = AutoConfig.for_model(model_type, **SHAPE)
    config = config_for(RECIPE, plain)
    objective = objective_of(RECIPE, config, dict).planned()
    request = replace(request_of(batch=4, seq=64, masked=True), model=model_type, config=config, objective=objective)
    planned = estimate(request, gpu=BARE)
    of_text = estimate(replace(request_of(batch=4, seq=64, masked=True), model=model_type, config=plain), gpu=BARE)
    weights_of_head = 8192 * 64 * 4
    assert planned.peak_allocated_bytes < of_text.peak_allocated_bytes - weights_of_head
    assert any("The head has 2 labels" in note for note in planned.notes)


def test_a_plan_refuses_what_a_run_refuses():
    config = config_for(RECIPE, AutoConfig.for_model("llama", **SHAPE))
    request = replace(request_of(), config=config, objective=objective_of(RECIPE, config, dict).planned())
    (reason,) = refusals(request, request.settings.having({"sharding.zero": 3}))
    assert "new classification head" in reason
