"""Checks of settings: those that exclude each other, and packages that are missing.

A run is refused before anything is loaded. Most excluded pairs would not fail at once: they would train something else
than requested, or fail hours later at the first save.
"""

from __future__ import annotations

import importlib.util

import torch

from tigon._install import install_command
from tigon.errors import RecipeError
from tigon.techniques import EXCLUSIONS, MACHINE_CHECKS, TECHNIQUES
from tigon.techniques.condition import Exclusion, yaml_word
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import PACKAGE_EXTRAS


def untraceable(settings: Settings) -> tuple[str, ...]:
    """Returns why the planner cannot predict a run with these settings, one sentence per reason."""
    return tuple(_sentence(row, settings) for row in EXCLUSIONS if row.untraceable and row.applies(settings))


def refusals(settings: Settings) -> tuple[str, ...]:
    """Returns why no machine can train with these settings, one sentence per reason, with what to do instead."""
    return tuple(_sentence(row, settings) for row in EXCLUSIONS if row.applies(settings))


def check(settings: Settings, *, device: str) -> None:
    """Raise RecipeError with the first reason against `settings` on a `device` ("cpu" or "cuda") of this machine."""
    for reason in refusals(settings):
        raise RecipeError(reason)
    for technique in TECHNIQUES.values():
        if not technique.used_by(settings):
            continue
        chosen = {condition.key for condition in technique.chosen}
        keys = ", ".join(f"{key}: {yaml_word(value)}" for key, value in technique.recipe.items() if key in chosen)
        if device not in technique.devices:
            raise RecipeError(f"{keys} needs a GPU, and this run is on the CPU")
        for package in technique.packages(settings):
            if importlib.util.find_spec(package) is None:
                command = install_command(PACKAGE_EXTRAS[package])
                raise RecipeError(f"{keys} needs {package}, not installed here: {command}")


def check_machine(settings: Settings, device: torch.device) -> None:
    """Raise RecipeError with the first reason why this machine cannot run `settings` on `device`."""
    for machine_check in MACHINE_CHECKS:
        machine_check(settings, device)


def _sentence(row: Exclusion, settings: Settings) -> str:
    chosen = [f"{c.key}: {yaml_word(settings.value(c.key))}" for c in row.when]
    together = chosen[0] if len(chosen) == 1 else f"{', '.join(chosen[:-1])} with {chosen[-1]}"
    return f"{together}: {row.reason}; use {row.instead}"
