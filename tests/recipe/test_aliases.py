"""Names of other libraries are recipe keys, in a file and in --set."""

from __future__ import annotations

import re

import pytest

from tigon.errors import RecipeError
from tigon.objectives.recipe_checks import load
from tigon.recipe.aliases import ALIASES, INSTEAD, SHARED, WORDS
from tigon.recipe.keys import SECTIONS


def loaded(tmp_path, text, *assignments, gpu=False):
    file = tmp_path / "r.yaml"
    file.write_text(text, encoding="utf-8")
    return load(file, assignments, gpu_present=lambda: gpu)


def test_every_alias_names_a_key_and_is_none_itself():
    for alias in ALIASES.values():
        section, name = alias.key.split(".")
        assert hasattr(SECTIONS[section], name), alias
        assert not hasattr(SECTIONS[section], alias.name) and alias.name not in SECTIONS, alias


def test_names_without_a_recipe_key_are_answered_with_one(tmp_path):
    keys = {f"{section}.{name}" for section, cls in SECTIONS.items() for name in vars(cls())}
    for name, instead in INSTEAD.items():
        assert name not in ALIASES and name not in SHARED and name not in SECTIONS
        assert set(re.findall(r"[a-z_]+\.[a-z_]+", instead)) <= keys, instead
        with pytest.raises(RecipeError, match=re.escape(f"{name} is not a recipe key; use {instead}")):
            loaded(tmp_path, "train: {steps: 1}\n", f"{name}=1")
    with pytest.raises(RecipeError, match=r"r\.yaml:2: warmup_ratio is not a recipe key; use train\.warmup_steps"):
        loaded(tmp_path, "train: {steps: 1}\nwarmup_ratio: 0.1\n")


def test_words_that_people_try_first_are_answered_with_the_key(tmp_path):
    keys = {f"{section}.{name}" for section, cls in SECTIONS.items() for name in vars(cls())}
    assert set(WORDS.values()) <= keys and not WORDS.keys() & (keys | INSTEAD.keys() | ALIASES.keys() | SHARED.keys())
    for word, key in WORDS.items():
        written = word if "." in word else f"train.{word}"
        with pytest.raises(RecipeError, match=re.escape(f"{written} is not a recipe key; use {key}")):
            loaded(tmp_path, "train: {steps: 1}\n", f"{written}=1")
    with pytest.raises(RecipeError, match=r"r\.yaml:3: train\.lr is not a recipe key; use train\.learning_rate$"):
        loaded(tmp_path, "train:\n  steps: 1\n  lr: 1.0e-4\n")
    with pytest.raises(RecipeError, match=r"on_gpu\.train\.lr is not a recipe key; use train\.learning_rate$"):
        loaded(tmp_path, "train: {steps: 1}\non_gpu: {train: {lr: 1.0e-4}}\n", gpu=True)


def test_another_librarys_name_in_the_wrong_section_is_answered_with_its_key(tmp_path):
    for written, key in (("train.max_seq_length", "data.sequence_length"), ("model.load_in_4bit", "lora.quantize")):
        with pytest.raises(RecipeError, match=f"{written} is not a recipe key; use {key}$"):
            loaded(tmp_path, "train: {steps: 1}\n", f"{written}=1")


def test_shared_names_are_keys_and_may_stand_at_the_top_level(tmp_path):
    assert not ALIASES.keys() & SHARED.keys() and not SECTIONS.keys() & SHARED.keys()
    for key in SHARED.values():
        section, name = key.split(".")
        assert hasattr(SECTIONS[section], name), key
    theirs = "max_steps: 5\nlearning_rate: 2.0e-5\npacking: false\nr: 4\nmodules_to_save: [norm]\nreport_to: none\n"
    ours = (
        "train: {steps: 5, learning_rate: 2.0e-5, report_to: none}\ndata: {packing: false}\n"
        "lora: {rank: 4, modules_to_save: [norm]}\n"
    )
    assert loaded(tmp_path, theirs) == loaded(tmp_path, ours)
    assert loaded(tmp_path, ours, "seed=7", "train.seed=8").train.seed == 8
    with pytest.raises(RecipeError, match=r"r\.yaml:2: train\.learning_rate and learning_rate are the same key"):
        loaded(tmp_path, "train: {steps: 1, learning_rate: 1.0e-4}\nlearning_rate: 1.0e-3\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:2: train\.warmup_steps is -3"):
        loaded(tmp_path, "train: {steps: 1}\nwarmup_steps: -3\n")


@pytest.mark.parametrize("alias", [a for a in ALIASES.values() if a.values], ids=lambda a: a.name)
def test_translated_values_are_values_of_the_key(alias, tmp_path):
    section, name = alias.key.split(".")
    for theirs, ours in alias.values.items():
        shown = str(theirs).lower() if isinstance(theirs, bool) else theirs
        needed = "lora_r: 4\n" if section == "lora" else ""
        needed += "lr_scheduler_type: constant\n" if ours == "schedule-free" else ""
        recipe = loaded(tmp_path, f"train: {{steps: 1}}\n{needed}{alias.name}: {shown}\n")
        assert getattr(getattr(recipe, section), name) == ours


def test_a_recipe_of_other_names_equals_one_of_recipe_keys(tmp_path):
    theirs = loaded(
        tmp_path,
        "model_name_or_path: some/model\nmax_length: 512\nnum_train_epochs: 2\noptim: adamw_torch\n"
        "train: {per_device_train_batch_size: 4, gradient_checkpointing: true}\nlora: {r: 8, lora_alpha: 16}\n",
    )
    ours = loaded(
        tmp_path,
        "model: {name: some/model}\ndata: {sequence_length: 512}\nlora: {rank: 8, alpha: 16}\n"
        "train: {epochs: 2, optimizer: adamw-foreach, batch_size: 4, checkpointing: full}\n",
    )
    assert theirs == ours


def test_set_takes_an_alias_with_and_without_its_section(tmp_path):
    text = "train: {steps: 1}\n"
    for name in ("per_device_train_batch_size", "train.per_device_train_batch_size"):
        assert loaded(tmp_path, text, f"{name}=3").train.batch_size == 3
    assert loaded(tmp_path, text, "gradient_checkpointing=true").train.checkpointing == "full"


def test_wrong_key_offers_the_recipe_key_and_the_other_librarys_name(tmp_path):
    with pytest.raises(RecipeError, match=r"train\.epochs, which is num_train_epochs in TrainingArguments"):
        loaded(tmp_path, "train: {steps: 1}\n", "train.num_train_epoch=1")


def test_on_gpu_takes_aliases(tmp_path):
    text = "train: {steps: 1}\non_gpu: {micro_batch_size: 5, train: {logging_steps: 2}}\n"
    train = loaded(tmp_path, text, gpu=True).train
    assert (train.batch_size, train.log_steps) == (5, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {steps: 1}\nmax_steps: 2\n", "r.yaml:2: train.steps and max_steps are the same key; keep one"),
        ("train: {steps: 1}\nlora: {r: 1, lora_r: 2}\n", "r.yaml:2: lora.r and lora.lora_r are the same key"),
        ("train: {steps: 1}\nlora:\n  r: x\n", "r.yaml:3: lora.rank is 'x', text"),
        ("train: {steps: 1}\nbf16: false\n", "r.yaml:2: bf16 is False, but can only be true; write train.precision"),
        (
            "train: {steps: 1}\nnum_train_epoch: 2\n",
            "num_train_epochs, another name of train.epochs",
        ),
        ("train: {steps: 1}\ndata: {bf16: true}\n", "r.yaml:2: data.bf16 is not a recipe key"),
        ("train: {steps: 1}\non_gpu: 3\n", "on_gpu is a section of keys"),
    ],
)
def test_wrong_uses_are_refused_by_line(tmp_path, text, words):
    with pytest.raises(RecipeError, match=re.escape(words)):
        loaded(tmp_path, text)
