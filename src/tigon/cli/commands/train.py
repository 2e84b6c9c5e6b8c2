"""`tigon train`: train a model as a recipe says."""

from __future__ import annotations

from typing import Annotated

import typer

from tigon.cli.options import Assignments, Gpus, Recipe, Resume
from tigon.cli.shared import Command, gpus_as_override
from tigon.trainer.guards import console


def command(
    recipe: Recipe,
    assignments: Assignments = None,
    gpus: Gpus = None,
    resume: Resume = False,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto",
            help="Change keys that the recipe leaves at their defaults to the fastest values that fit the GPU.",
        ),
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(metavar="K", min=0, help="Continue from the last checkpoint after a failure, at most K times."),
    ] = 0,
) -> None:
    """Train a model as a recipe says, with a report at the end."""
    from tigon.trainer.distributed.torchrun import recorded  # not for --help
    from tigon.trainer.run import train  # not for --help

    with console.survive_broken_streams():
        overrides = [*(assignments or ()), *gpus_as_override(gpus)]
        recorded(train)(recipe, overrides, resume=resume, auto=auto, max_restarts=max_restarts)


COMMAND = Command(command, place=1)
