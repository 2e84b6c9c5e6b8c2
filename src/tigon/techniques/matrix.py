"""Checks of choices: values that are not allowed, choices that exclude each other, and packages that are missing.

A run is refused before anything is loaded. Most excluded pairs would not fail at once: they would train something else
than requested, or fail hours later at the first save.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from tigon._install import install_command
from tigon.errors import RecipeError
from tigon.techniques import EXCLUSIONS, SETTINGS, TECHNIQUES
from tigon.techniques.records.choices import Choices
from tigon.techniques.records.condition import Condition, Exclusion, yaml_word
from tigon.techniques.records.setting import Setting
from tigon.techniques.records.technique import PACKAGE_EXTRAS


def wrong_values(choices: Choices, name: Callable[[Setting], str] = lambda setting: setting.field) -> tuple[str, ...]:
    """Returns a sentence for each value that its setting does not allow.

    name: returns the name of a setting in the sentence: its recipe key, or its flag.
    """
    problems = []
    for setting in SETTINGS.values():
        value = getattr(choices, setting.field)
        problem = setting.problem(value)
        if problem:
            problems.append(f"{name(setting)} is {value!r}; {problem}")
    return tuple(problems)


def untraceable(choices: Choices) -> tuple[str, ...]:
    """Returns why the planner cannot predict a run with these choices, one sentence per reason."""
    return tuple(_sentence(row, choices) for row in EXCLUSIONS if row.untraceable and row.applies(choices))


def refusals(choices: Choices) -> tuple[str, ...]:
    """Returns why no machine can train with these choices, one sentence per reason, with what to do instead."""
    excluded = [_sentence(row, choices) for row in EXCLUSIONS if row.applies(choices)]
    return (*wrong_values(choices, name=lambda setting: setting.key), *excluded)


def check(choices: Choices, *, device: str) -> None:
    """Raise RecipeError with the first reason against `choices` on a `device` ("cpu" or "cuda") of this machine."""
    for reason in refusals(choices):
        raise RecipeError(reason)
    for technique in TECHNIQUES.values():
        if not technique.used_by(choices):
            continue
        keys = ", ".join(f"{key}: {yaml_word(value)}" for key, value in technique.recipe.items())
        if device not in technique.devices:
            raise RecipeError(f"{keys} needs a GPU, and this run is on the CPU")
        for package in technique.packages(choices):
            if importlib.util.find_spec(package) is None:
                command = install_command(PACKAGE_EXTRAS[package])
                raise RecipeError(f"{keys} needs {package}, not installed here: {command}")


def exclusion_table() -> str:
    """Returns the Markdown table of docs/techniques/README.md."""
    rows = ["| these together | are refused, because | instead | source |", "|---|---|---|---|"]
    for row in EXCLUSIONS:
        when = " and ".join(map(condition_text, row.when))
        rows.append(f"| {when} | {row.reason} | {row.instead} | {row.source} |")
    return "\n".join(rows)


def condition_text(condition: Condition) -> str:
    """Returns a condition as Markdown, by its recipe key."""
    return condition.text(SETTINGS[condition.field].key)


def _sentence(row: Exclusion, choices: Choices) -> str:
    chosen = [f"{SETTINGS[c.field].key}: {yaml_word(getattr(choices, c.field))}" for c in row.when]
    together = chosen[0] if len(chosen) == 1 else f"{', '.join(chosen[:-1])} with {chosen[-1]}"
    return f"{together}: {row.reason}; use {row.instead}"
