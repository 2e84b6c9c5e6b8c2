"""Helpers that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tigon.cli import short_forms
from tigon.trainer.guards import console

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED = 100_000
"""Columns of a file or a pipe, which has no edge to wrap at."""


@dataclass(frozen=True)
class Command:
    """A file of this folder declares one as `COMMAND`; its name on the command line is the file's name."""

    run: Callable[..., None] | Any
    """A function whose parameters are the options, or a `typer.Typer` with further commands."""
    place: int = 100
    """The help lists commands by this number, and those of one number by name."""


def gpus_as_override(gpus: int | None) -> list[str]:
    """`--gpus N` as `--set sharding.gpus=N`."""
    return short_forms.assignment(short_forms.GPUS, gpus)


def stdout_console() -> Console:
    """A console for standard output that wraps at a terminal's width, or at COLUMNS, but never in a pipe or a file."""
    wide = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return console.make_console(width=UNLIMITED if wide else None)
