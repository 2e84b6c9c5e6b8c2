"""`tigon sweep`: measure memory and speed of a recipe with each combination of values of its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tigon.cli.shared import Command
from tigon.trainer.guards import console


def command(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="YAML; docs/sweep.md lists its keys.")],
    *,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key in every point of the grid."),
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory limit per process, e.g. 24GiB or rtx-4090.")
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start no point that would end after this time, e.g. 500s or 9m.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Results folder. Default: runs/sweeps/NAME.")] = None,
    only: Annotated[str | None, typer.Option(metavar="REGEX", help="Only points in whose name REGEX is found.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure failed points again.")] = False,
    draw: Annotated[bool, typer.Option("--draw", help="Only write the report; measure nothing.")] = False,
) -> None:
    """Measure memory and speed of a recipe at each point of a grid, a combination of values of its keys.

    Points that are already in the results folder are not measured again.
    """
    from tigon.sweep.run import sweep  # not for --help

    with console.survive_broken_streams():
        limits = {"memory_limit": memory_limit, "time_limit": time_limit}
        sweep(file, assignments or (), **limits, out=out, only=only, retry=retry, draw=draw)


COMMAND = Command(command, place=4)
