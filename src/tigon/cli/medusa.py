"""`tigon medusa`: train a recipe with `heads:`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tigon.cli.shared import Command, gpus_as_override
from tigon.objectives.recipe_checks import require_heads
from tigon.trainer.guards import console


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="YAML with `heads:`; see docs/medusa.md.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key, e.g. --set heads.count=5."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of GPUs, with one process per GPU; same as --set sharding.gpus=N."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
) -> None:
    """Train heads that predict several tokens ahead (Medusa, MTP), with a report at the end."""
    from tigon.trainer import run  # not for --help

    with console.survive_broken_streams():
        run.train(recipe, [*(assignments or ()), *gpus_as_override(gpus)], resume=resume, require=require_heads)


COMMAND = Command(command, place=2)
