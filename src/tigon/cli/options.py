"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="YAML; docs/recipe.md lists its keys.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key, e.g. --set train.batch_size=8."),
]
Gpus = Annotated[
    int | None,
    typer.Option(metavar="N", help="Number of GPUs, with one process per GPU; same as --set sharding.gpus=N."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")]
Trained = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="A run folder, a checkpoint, a folder of adapters, or a hub id.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model, if you trust it.")
]
