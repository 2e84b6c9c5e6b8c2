"""Checks that the processes of a run agree: on the recipe, on the data, and on a run folder that all of them see.

Only processes on several machines can differ.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tigon.errors import DataError, RecipeError, RunFolderError
from tigon.recipe.keys import Recipe
from tigon.trainer.distributed import launch

T = TypeVar("T")
SEEN_S = 30  # file systems on a network show new files to other machines after a delay
TOKEN = ".shared-"


def check_shared(path: Path) -> None:
    """Check that every process sees the run folder `path`. Every process calls it.

    The main process writes a file with a random name, and the others look for it.

    Raises:
        RunFolderError: In the main process, if a process on another machine does not see the file.
        SystemExit: In the other processes then, with code 2.
    """
    if not launch.has_several_nodes():
        return
    token = path / f"{TOKEN}{launch.broadcast(uuid.uuid4().hex[:12])}"
    error = ""
    if launch.rank() == 0:
        try:
            token.touch()
        except OSError as caught:
            error = f"{path}: cannot be written: {caught.strerror}; choose another output.folder"
    if not (error := launch.broadcast(error)):
        answers = launch.gather((_appears(token), socket.gethostname()))
        blind = [(rank, host) for rank, (seen, host) in enumerate(answers) if not seen]
        if launch.rank() == 0:
            token.unlink()
        if not blind:
            return
        who = ", ".join(f"process {rank} on {host}" for rank, host in blind)
        error = (
            f"output.folder: {path} on {answers[0][1]} is not visible to {who}; a run on "
            "several machines needs a folder on a disk that all of them share: set output.folder to one"
        )
    if launch.rank() > 0:
        raise SystemExit(2)
    raise RunFolderError(error)


def _appears(file: Path) -> bool:
    """Whether a file is there, or comes within `SEEN_S`."""
    deadline_s = time.monotonic() + SEEN_S
    while not file.exists():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.1)
        with suppress(OSError):
            os.listdir(file.parent)  # NFS then asks its server again
    return True


def check_same_recipe(recipe: Recipe) -> None:
    """Check that every process has read the same recipe with the same --set options. Every process calls it.

    recipe: The recipe as this process has read it, before a resumed run divides its samples.

    Raises:
        RecipeError: In the main process, if a process has another recipe.
        SystemExit: In the other processes then, with code 2.
    """
    if (found := _different(repr(recipe.as_mapping()))) is not None:
        host, other, its_host, _ = found
        raise RecipeError(
            f"the recipe or its --set options of process {other} on {its_host} differ from those of process 0 "
            f"on {host}; start the same command on every machine"
        )


def check_same_data(data: Mapping[str, Any]) -> None:
    """Check that every process has read the same data. Every process calls it.

    data: `Prepared.data`.

    Raises:
        DataError: In the main process, if a process has other data.
        SystemExit: In the other processes then, with code 2.
    """
    if (found := _different((data["fingerprint"], data["tokens"]))) is not None:
        host, other, its_host, (_, tokens) = found
        raise DataError(
            f"the data of process {other} on {its_host} differ from those of process 0 on {host} "
            f"({tokens:,} and {data['tokens']:,} tokens); give all machines the same data files"
        )


def _different(own: T) -> tuple[str, int, str, T] | None:
    """Compare a value of every process with that of process 0. On one machine they are not compared.

    Returns:
        (the main process's machine, the first process with another value, its machine, its value), or None if all are
        the same.

    Raises:
        SystemExit: In the processes other than the main one if a value differs, with code 2.
    """
    if not launch.has_several_nodes():
        return None
    (host, first), *others = launch.gather((socket.gethostname(), own))
    for other, (its_host, value) in enumerate(others, start=1):
        if value != first:
            if launch.rank() > 0:
                raise SystemExit(2)
            return host, other, its_host, value
    return None
