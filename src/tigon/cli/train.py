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
        typer.Option(
            "--auto",
            help="Change keys that the recipe leaves at their defaults to the fastest values that fit the GPU.",
        ),
    ] = False,
    nnodes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of machines. Start the command on each; --gpus is per machine."),
    ] = None,
    rdzv: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With --nnodes: one of the machines, where all of them meet."),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(metavar="R", help="Number of this machine. HOST is number 0. Default: given when they meet."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(metavar="K", help="Continue from the last checkpoint after a failure, at most K times."),
    ] = None,
) -> None:
    """Train a model as a recipe says, with a report at the end."""
    from tigon.trainer.distributed import failures, nodes  # not for --help
    from tigon.trainer.run import train  # not for --help

    with console.survive_broken_streams(), failures.recorded():
        machines = nodes.from_options(nnodes, rdzv, node_rank, max_restarts)
        overrides = [*(assignments or ()), *gpus_as_override(gpus)]
        train(recipe, overrides, resume=resume, auto=auto, nodes=machines)


COMMAND = Command(command, place=1)
