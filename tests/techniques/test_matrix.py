"""What excludes what: every row is reached, says why and what instead, and leaves the defaults alone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import technique_pages

from tigon._install import install_command
from tigon.errors import RecipeError
from tigon.techniques import EXCLUSIONS, PAGES, TECHNIQUES
from tigon.techniques.checkpointing import every_n_layers
from tigon.techniques.matrix import check, exclusion_table, refusals
from tigon.techniques.optimizers import OPTIMIZERS
from tigon.techniques.records.choices import Choices
from tigon.techniques.records.condition import Condition, Exclusion

# values that a negative condition holds for
OTHER = {
    "attention": "flash_attention_2", "optimizer": "sgd", "offload": "cpu", "zero": 0, "lora_init": "orthogonal",
    "lora_bias": "all", "lora_modules_to_save": ("norm",), "checkpointing": "selective", "kernels": "none",
}  # fmt: skip


def satisfying(condition: Condition) -> Any:
    """A value that the condition holds for."""
    if condition.test in ("is not", "is not one of"):
        return OTHER[condition.field]
    if condition.test == "includes":
        return (condition.wanted,)
    if condition.test == "is above":
        return condition.wanted + 0.5
    if condition.test == "starts with":
        return {"amp": "amp-bf16"}.get(condition.wanted, condition.wanted[0])
    return condition.wanted[0] if condition.test == "is one of" else condition.wanted


@pytest.mark.parametrize("row", EXCLUSIONS, ids=lambda row: " and ".join(map(str, row.when)))
def test_excluded_choices_are_refused_with_the_reason(row: Exclusion):
    choices = Choices(**{condition.field: satisfying(condition) for condition in row.when})
    assert row.applies(choices)
    (sentence,) = [text for text in refusals(choices) if row.reason in text]
    assert row.instead in sentence and "\n" not in sentence
    with pytest.raises(RecipeError):
        check(choices, device="cuda")


def test_defaults_and_single_techniques_are_accepted():
    assert refusals(Choices()) == ()
    for name in OPTIMIZERS:
        assert refusals(Choices(optimizer=name)) == (), name
    for alone in ({"zero": 3}, {"fsdp": True}, {"lora_rank": 8}, {"gpus": 8}, {"accumulate": 4}, {"kernels": "liger"}):
        assert refusals(Choices(**alone)) == (), alone
    assert refusals(Choices(zero=3, offload="nvme", checkpointing="offload", lora_rank=8, gpus=2)) == ()


def test_unknown_optimizer_is_refused_with_the_nearest_name():
    (reason,) = refusals(replace(Choices(), optimizer="adamw_8bit"))
    assert "adamw_8bit" in reason and "adamw-8bit" in reason


def test_gpu_only_choice_is_refused_on_the_cpu():
    with pytest.raises(RecipeError, match=r"train\.precision: amp-fp16 needs a GPU"):
        check(Choices(precision="amp-fp16"), device="cpu")


def test_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    command = re.escape(install_command("bnb"))
    with pytest.raises(RecipeError, match=f"needs bitsandbytes, not installed here: {command}"):
        check(Choices(optimizer="adamw-8bit"), device="cuda")


def test_every_n_is_read_only_from_its_own_word():
    assert [every_n_layers(word) for word in ("every-3", "full", "none")] == [3, None, None]


@pytest.mark.parametrize("page", technique_pages.pages())
def test_pages_of_techniques_are_current(page):
    """If this fails: python tests/techniques/technique_pages.py rewrites docs/techniques."""
    text = (technique_pages.FOLDER / f"{page}.md").read_text(encoding="utf-8")
    assert technique_pages.BEGIN in text
    assert text == technique_pages.with_generated(page, text)


def test_every_technique_has_a_page():
    assert {technique.page for technique in TECHNIQUES.values()} == set(PAGES)
    assert exclusion_table() in technique_pages.generated("README")


def test_defaults_use_autocast_and_adamw_only():
    used = [name for name, technique in TECHNIQUES.items() if technique.used_by(Choices())]
    assert used == ["amp-bf16", "adamw"]
