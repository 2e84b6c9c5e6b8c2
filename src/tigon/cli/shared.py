"""Helpers that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """What a file of this folder declares as `COMMAND`; its name on the command line is the file's name."""

    run: Callable[..., None] | Any
    """A function whose parameters are the options, or a `typer.Typer` with commands of its own."""
    place: int = 100
    """The help lists commands by this number, and those of one number by name."""


def gpus_as_override(gpus: int | None) -> list[str]:
    """`--gpus N` as `--set sharding.gpus=N`."""
    return [] if gpus is None else [f"sharding.gpus={gpus}"]
