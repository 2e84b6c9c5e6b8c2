"""`tigon doctor`: this machine, every op, and the kernels that a model gets."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tigon._quiet import quiet_packages
from tigon.cli.shared import Command
from tigon.models.loading import hub


def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A preset, a checkpoint folder, a config.json or a hub id."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, every op, and which kernels a model gets; exit code 1 if something is wrong."""
    from tigon.doctor import diagnose  # not for --help

    # These two change the whole process, so the command calls them instead of the library.
    hub.set_offline_mode(() if model is None else (model,))
    quiet_packages()
    diagnosis = diagnose(model)
    print(json.dumps(diagnosis.to_dict(), indent=2) if as_json else diagnosis)
    raise typer.Exit(0 if diagnosis.ok else 1)


COMMAND = Command(command, place=7)
