"""`tigon train`: train a model as a recipe says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tigon.cli.shared import Command, gpus_as_override
from tigon.trainer.guards import console


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="YAML; docs/train.md lists its keys.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key, e.g. --set train.batch_size=8."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of GPUs, with one process per GPU; same as --set sharding.gpus=N."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    auto: Annotated[
        bool,
        typer.Option("--auto", help="Set the keys that the recipe leaves out to the fastest options that fit the GPU."),
    ] = False,
) -> None:
    """Train a model as a recipe says, with a report at the end."""
    from tigon.trainer.run import train  # not for --help

    with console.survive_broken_streams():
        train(recipe, [*(assignments or ()), *gpus_as_override(gpus)], resume=resume, auto=auto)


COMMAND = Command(command, place=1)
