"""What excludes what: every row is reached, says why and what instead, and leaves the defaults alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.pages import techniques as technique_pages
from tests.short_names import settings_of
from tigon._install import install_command
from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe
from tigon.techniques import EXCLUSIONS, TECHNIQUES
from tigon.techniques.checkpointing.checkpointing import every_n_layers
from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.keys.settings import Settings
from tigon.techniques.matrix import check, refusals
from tigon.techniques.optimizers.table import OPTIMIZERS

# values that a negative condition holds for
OTHER = {
    "model.attention": "flash_attention_2", "train.optimizer": "sgd", "sharding.offload": "cpu", "sharding.zero": 0,
    "lora.init": "orthogonal", "lora.bias": "all", "lora.modules_to_save": ("norm",), "model.kernels": "none",
    "train.checkpointing": "selective", "train.objective": "dpo", "lora.adapter_dtype": "fp32",
    "sharding.nvme_folder": "swap", "train.qat": "int4", "train.schedule": "cosine",
}  # fmt: skip


def satisfying(condition: Condition) -> Any:
    """A value that the condition holds for."""
    if condition.test in ("is not", "is not one of"):
        return OTHER[condition.key]
    if condition.test == "includes":
        return f"{condition.wanted}2" if condition.wanted.endswith(":") else (condition.wanted,)
    if condition.test == "is above":
        return condition.wanted + 0.5
    if condition.test == "starts with":
        return {"amp": "amp-bf16"}.get(condition.wanted, condition.wanted[0])
    return condition.wanted[0] if condition.test == "is one of" else condition.wanted


@pytest.mark.parametrize("row", EXCLUSIONS, ids=lambda row: " and ".join(map(str, row.when)))
def test_excluded_choices_are_refused_with_the_reason(row: Exclusion):
    settings = Recipe().resolved().having({condition.key: satisfying(condition) for condition in row.when})
    assert row.applies(settings)
    (sentence,) = [text for text in refusals(settings) if row.reason in text]
    assert row.instead in sentence and "\n" not in sentence
    with pytest.raises(RecipeError):
        check(settings, device="cuda")


def test_defaults_and_single_techniques_are_accepted():
    assert refusals(Settings.of({})) == ()
    for name in OPTIMIZERS:
        assert refusals(Settings.of({"train.optimizer": name})) == (), name
    for alone in (
        {"sharding.zero": 3},
        {"sharding.fsdp": True},
        {"lora.rank": 8},
        {"sharding.gpus": 8},
        {"train.gradient_accumulation": 4},
        {"model.kernels": "liger"},
    ):
        assert refusals(settings_of(alone)) == (), alone
    together = Settings.of({
        "sharding.zero": 3, "sharding.offload": "nvme", "train.checkpointing": "offload", "lora.rank": 8,
        "sharding.gpus": 2,
    })  # fmt: skip
    assert refusals(together) == ()


def test_unknown_optimizer_is_refused_with_the_nearest_name():
    with pytest.raises(RecipeError, match=r"train\.optimizer is 'adamw_8bit'; it must be one of .*adamw-8bit"):
        Settings.of({"train.optimizer": "adamw_8bit"})


def test_gpu_only_choice_is_refused_on_the_cpu():
    with pytest.raises(RecipeError, match=r"train\.precision: amp-fp16 needs a GPU"):
        check(Settings.of({"train.precision": "amp-fp16"}), device="cpu")


def test_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    command = re.escape(install_command("bnb"))
    with pytest.raises(RecipeError, match=f"needs bitsandbytes, not installed here: {command}"):
        check(Settings.of({"train.optimizer": "adamw-8bit"}), device="cuda")


def test_every_n_is_read_only_from_its_own_word():
    assert [every_n_layers(word) for word in ("every-3", "full", "none")] == [3, None, None]


@pytest.mark.parametrize("page", technique_pages.pages())
def test_pages_of_techniques_are_current(page):
    """If this fails: python -m benchmarks.pages.techniques rewrites docs/techniques."""
    text = (technique_pages.FOLDER / f"{page}.md").read_text(encoding="utf-8")
    assert technique_pages.BEGIN in text
    assert text == technique_pages.renewed(page)


def test_every_technique_has_a_section_with_all_that_is_written_by_hand():
    texts = [(technique_pages.FOLDER / f"{page}.md").read_text(encoding="utf-8") for page in technique_pages.pages()]
    found = [(name, words) for text in texts for name, words in technique_pages.sections(text).items()]
    assert sorted(name for name, _ in found) == sorted(TECHNIQUES.keys() - OPTIMIZERS.keys())
    for name, words in found:
        assert all(words.get(word) for word in technique_pages.WRITTEN), name
        for needed in TECHNIQUES[name].needs + ("a GPU",) * (TECHNIQUES[name].devices == ("cuda",)):
            assert needed in words["Needs"], name


def test_defaults_use_autocast_and_adamw_only():
    used = [name for name, technique in TECHNIQUES.items() if technique.used_by(Settings.of({}))]
    assert used == ["amp-bf16", "adamw"]


@pytest.mark.parametrize("divided", [{"gpus": 4, "fsdp": True, "replicas": 2}, {"gpus": 4, "sharding.sequence": 2}])
def test_adapters_that_no_test_trained_with_divided_rows_or_copies_are_refused(divided: dict[str, Any]):
    experts = {"lora_rank": 4, "lora.targets": ("linear", "experts")}
    assert any("has not tried adapters on experts" in text for text in refusals(settings_of(divided | experts)))
    four_bits = divided | {"lora_rank": 4, "lora.quantize": True}
    sharded = refusals(settings_of(four_bits | {"fsdp": True}))
    assert any("has not tried frozen weights in 4 bits that FSDP2 divides" in text for text in sharded)
    assert refusals(settings_of(divided | {"lora_rank": 4})) == ()
    if "fsdp" not in divided:
        assert refusals(settings_of(four_bits)) == ()
