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
from tigon.trainer.guards.recipe_warnings import RunSize, epochs_of, steps_of, warnings_of

ROWS = RunSize(n_samples=100, n_eval_samples=4, n_processes=1)
UNINTENDED = {
    "warm-up": ({"warmup_steps": 20}, {}, ROWS, "train.warmup_steps is 20, but the run has 20 steps"),
    "late evaluation": ({"eval_steps": 21}, {}, ROWS, "train.eval_steps is 21, but the run has 20 steps"),
    "evaluation of nothing": ({"eval_steps": 5}, {}, replace(ROWS, n_eval_samples=0), "nothing is evaluated"),
    "late checkpoint": ({"save_steps": 21}, {}, ROWS, "no checkpoint is written"),
    "late record": ({"log_steps": 21}, {}, ROWS, "only the first step is recorded"),
    "checkpoints kept": ({"keep_checkpoints": 5}, {}, ROWS, "train.keep_checkpoints 5 has no effect"),
    "share held out": ({}, {"eval_fraction": 0.1, "eval_source": ("e",)}, ROWS, "data.eval_fraction 0.1 has no effect"),
    "attention twice": ({"checkpointing": "offload-attention"}, {}, ROWS, "computes attention twice, as offload does"),
    "training text": ({}, {"eval_source": ("python-docs",)}, ROWS, "both name python-docs"),
}


@pytest.mark.parametrize("train, data, extent, words", UNINTENDED.values(), ids=UNINTENDED.keys())
def test_each_unintended_value_has_one_warning(train, data, extent, words):
    recipe = Recipe(train=TrainConfig(**{"steps": 20, **train}), data=DataConfig(**data))
    (warning,) = warnings_of(recipe, extent, trains_tokenizer=True)
    assert words in warning


def test_4_bit_gradients_on_one_machine_have_a_warning(monkeypatch):
    sharding = ShardingConfig(gpus=2, zero=3, zero_int4_gradients=True)
    recipe = Recipe(train=TrainConfig(steps=20), sharding=sharding)
    (warning,) = warnings_of(recipe, ROWS, trains_tokenizer=True)
    assert "sharding.zero_int4_gradients has no effect on one machine" in warning
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert warnings_of(recipe, ROWS, trains_tokenizer=True) == ()


def test_recipe_of_intended_values_has_no_warning():
    once = TrainConfig(steps=20, checkpointing="offload-attention")
    for data in (DataConfig(packing=False), DataConfig(cross_document_attention=True)):
        assert warnings_of(Recipe(train=once, data=data), ROWS, trains_tokenizer=True) == ()
    train = TrainConfig(steps=20, warmup_steps=19, eval_steps=20, save_steps=20, keep_checkpoints=1)
    assert warnings_of(Recipe(train=train), ROWS, trains_tokenizer=True) == ()
    assert warnings_of(Recipe(train=TrainConfig(steps=20)), ROWS, trains_tokenizer=False) == ()


FEW_ROWS = RunSize(n_samples=4, n_eval_samples=1, n_processes=1, n_rows=78)
KEYS_THAT_GIVE_MORE = {
    "packed rows": (
        {"epochs": 3, "batch_size": 4, "learning_rate": 1e-4}, {"packing": True}, FEW_ROWS,
        "the run has 3 optimizer steps, fewer than 20, and the model may answer as before: raise train.epochs, lower "
        "train.batch_size, set data.packing: false (60 steps), lower data.sequence_length, or raise "
        "train.learning_rate 0.0001",
    ),
    "rows apart": (
        {"epochs": 1, "batch_size": 1, "gradient_accumulation": 8}, {"packing": False}, replace(FEW_ROWS, n_samples=78),
        "the run has 10 optimizer steps, fewer than 20, and the model may answer as before: raise train.epochs, lower "
        "train.gradient_accumulation, or raise train.learning_rate 0.0003",
    ),
    "given steps": (
        {"steps": 1}, {}, ROWS,
        "the run has 1 optimizer step, fewer than 20, and the model may answer as before: raise train.steps, or raise "
        "train.learning_rate 0.0003",
    ),
}  # fmt: skip


@pytest.mark.parametrize("train, data, extent, words", KEYS_THAT_GIVE_MORE.values(), ids=KEYS_THAT_GIVE_MORE.keys())
def test_run_of_few_steps_is_told_the_keys_that_give_more(train, data, extent, words):
    recipe = Recipe(train=TrainConfig(**train), data=DataConfig(**data))
    assert warnings_of(recipe, extent, trains_tokenizer=True) == (words,)


def test_epochs_are_the_passes_over_the_samples():
    assert epochs_of(Recipe(train=TrainConfig(steps=30, batch_size=4)), RunSize(40, 0, 1)) == 3
    assert epochs_of(Recipe(train=TrainConfig(epochs=2.5, batch_size=4)), RunSize(40, 0, 1)) == 2.5


def test_steps_of_epochs_are_those_of_the_trainer():
    for rows, epochs, wanted in ((100, 1.0, 7), (100, 2.5, 18), (96, 1.0, 6), (3, 0.001, 1)):
        train = TrainConfig(epochs=epochs, batch_size=4, gradient_accumulation=2)
        assert steps_of(Recipe(train=train), RunSize(rows, 0, 2)) == wanted


def test_a_warning_is_announced_and_recorded(recipe, tigon, here):
    outcome = tigon("train", recipe(train={"steps": 20, "warmup_steps": 25}, output={"sample_tokens": 0}))
    assert outcome.code == 0, outcome.err
    (record,) = records(here / "runs" / "r", "warnings")
    (warning,) = record["warnings"]
    assert "train.warmup_steps is 25, but the run has 20 steps" in warning
    assert f"warning  {warning}" in outcome.out


def test_frozen_random_weights_are_warned_of_unless_they_are_trained_first():
    train, adapters = TrainConfig(steps=100), LoraConfig(rank=4)
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
