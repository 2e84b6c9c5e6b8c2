"""`tigon profile`: record the memory of a recipe's first steps, and time the operators of a later one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tigon.cli.options import Recipe
from tigon.cli.shared import Command
from tigon.trainer.guards import console


def command(
    recipe: Recipe,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key, with --beside of both recipes."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps whose allocations are recorded.")] = 2,
    beside: Annotated[
        Path | None, typer.Option(metavar="RECIPE.yaml", help="Profile a second recipe and show both side by side.")
    ] = None,
    beside_assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--beside-set",
            metavar="KEY=VALUE",
            help="Change a key of the second profile only. Without --beside, it profiles the same recipe again.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="New or empty folder for the results.")] = None,
) -> None:
    """Record every allocation of a recipe's first steps, then the time of each operator in a later step."""
    from tigon.trainer.measuring.profile import ProfileRequest, profile  # not for --help

    with console.survive_broken_streams():
        profile(ProfileRequest(recipe, tuple(assignments or ()), steps, beside, tuple(beside_assignments or ()), out))


COMMAND = Command(command, place=5)
