"""Values that a recipe hardly intends are announced and recorded; intended values are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trainer_helpers import records

from tigon.recipe.keys import (
    DataConfig,
    HeadsConfig,
    LoraConfig,
    ModelConfig,
    PostTrainingConfig,
    Recipe,
    ShardingConfig,
    TrainConfig,
)
from tigon.trainer.guards.recipe_warnings import RunSize, steps_of, warnings_of

ROWS = RunSize(n_samples=100, n_eval_samples=4, n_processes=1)
UNINTENDED = {
    "warm-up": ({"warmup_steps": 10}, {}, ROWS, "train.warmup_steps is 10, but the run has 10 steps"),
    "late evaluation": ({"eval_steps": 11}, {}, ROWS, "train.eval_steps is 11, but the run has 10 steps"),
    "evaluation of nothing": ({"eval_steps": 5}, {}, replace(ROWS, n_eval_samples=0), "nothing is evaluated"),
    "late checkpoint": ({"save_steps": 11}, {}, ROWS, "no checkpoint is written"),
    "late record": ({"log_steps": 11}, {}, ROWS, "only the first step is recorded"),
    "checkpoints kept": ({"keep_checkpoints": 5}, {}, ROWS, "train.keep_checkpoints 5 has no effect"),
    "share held out": ({}, {"eval_fraction": 0.1, "eval_source": ("e",)}, ROWS, "data.eval_fraction 0.1 has no effect"),
    "attention twice": ({"checkpointing": "offload-attention"}, {}, ROWS, "computes attention twice, as offload does"),
    "training text": ({}, {"eval_source": ("python-docs",)}, ROWS, "both name python-docs"),
}


@pytest.mark.parametrize("train, data, extent, words", UNINTENDED.values(), ids=UNINTENDED.keys())
def test_each_unintended_value_has_one_warning(train, data, extent, words):
    recipe = Recipe(train=TrainConfig(**{"steps": 10, **train}), data=DataConfig(**data))
    (warning,) = warnings_of(recipe, extent, trains_tokenizer=True)
    assert words in warning


def test_4_bit_gradients_on_one_machine_have_a_warning(monkeypatch):
    sharding = ShardingConfig(gpus=2, zero=3, zero_int4_gradients=True)
    recipe = Recipe(train=TrainConfig(steps=1), sharding=sharding)
    (warning,) = warnings_of(recipe, ROWS, trains_tokenizer=True)
    assert "sharding.zero_int4_gradients has no effect on one machine" in warning
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert warnings_of(recipe, ROWS, trains_tokenizer=True) == ()


def test_recipe_of_intended_values_has_no_warning():
    once = TrainConfig(steps=1, checkpointing="offload-attention")
    for data in (DataConfig(packing=False), DataConfig(cross_document_attention=True)):
        assert warnings_of(Recipe(train=once, data=data), ROWS, trains_tokenizer=True) == ()
    train = TrainConfig(steps=4, warmup_steps=3, eval_steps=4, save_steps=4, keep_checkpoints=1)
    assert warnings_of(Recipe(train=train), ROWS, trains_tokenizer=True) == ()
    assert warnings_of(Recipe(train=TrainConfig(steps=1)), ROWS, trains_tokenizer=False) == ()


def test_steps_of_epochs_are_those_of_the_trainer():
    for rows, epochs, wanted in ((100, 1.0, 7), (100, 2.5, 18), (96, 1.0, 6), (3, 0.001, 1)):
        train = TrainConfig(epochs=epochs, batch_size=4, gradient_accumulation=2)
        assert steps_of(Recipe(train=train), RunSize(rows, 0, 2)) == wanted


def test_a_warning_is_announced_and_recorded(recipe, tigon, here):
    outcome = tigon("train", recipe(train={"steps": 2, "warmup_steps": 5}, output={"sample_tokens": 0}))
    assert outcome.code == 0, outcome.err
    (record,) = records(here / "runs" / "r", "warnings")
    assert len(record["warnings"]) == 1 and "train.warmup_steps is 5, but the run has 2 steps" in record["warnings"][0]
    assert f"warning  {record['warnings'][0]}" in outcome.out


def test_frozen_random_weights_are_warned_of_unless_they_are_trained_first():
    train, adapters = TrainConfig(steps=1), LoraConfig(rank=4)
    (warning,) = warnings_of(Recipe(train=train, lora=adapters), ROWS, trains_tokenizer=True)
    assert "tigon-demo has random weights, and lora.rank: 4 freezes them" in warning
    heads = HeadsConfig(stage=1)
    assert "heads.stage: 1 freezes" in warnings_of(Recipe(train=train, heads=heads), ROWS, trains_tokenizer=True)[0]
    for made in (
        Recipe(train=train, lora=adapters, model=ModelConfig(name="some/model")),
        Recipe(train=train, heads=replace(heads, base_steps=1)),
        Recipe(train=train, lora=adapters, post_training=PostTrainingConfig(base_steps=1)),
    ):
        assert not warnings_of(made, ROWS, trains_tokenizer=made.model.name == "tigon-demo")
