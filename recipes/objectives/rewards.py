"""Reward functions of grpo.yaml. TRL calls them with the completions and the other columns of the rows, as lists."""

from __future__ import annotations

from typing import Any


def polite(completions: list[str], **columns: Any) -> list[float]:
    """1 for each completion that says please."""
    return [float("please" in completion.lower()) for completion in completions]


def names_the_thing(completions: list[str], thing: list[str], **columns: Any) -> list[float]:
    """0.5 for each completion that names what the question asks about."""
    return [0.5 * (name in completion) for completion, name in zip(completions, thing, strict=True)]
