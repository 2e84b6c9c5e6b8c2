"""The run folder on each node's disk, if the nodes of a run do not share one; see node_disks.py."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tigon.errors import DataError, RunFolderError, TigonError
from tigon.trainer.distributed import launch, launch_folder, node_disks


def check_same_data(data: Mapping[str, Any]) -> None:
    """Check that every node has read the same data. Every process calls it with its `Prepared.data`.

    Raises:
        DataError: In the main process, if a node has other data.
        SystemExit: In the others then, with code 2.
    """
    if not launch.has_several_nodes():
        return
    answers = launch.gather((data["fingerprint"], socket.gethostname(), data["tokens"]))
    other = next((rank for rank, answer in enumerate(answers) if answer[0] != answers[0][0]), None)
    if other is None:
        return
    if launch.rank() > 0:
        raise SystemExit(2)
    raise DataError(
        f"the data of process {other} on {answers[other][1]} differ from those of process 0 on {answers[0][1]} "
        f"({answers[other][2]:,} and {answers[0][2]:,} tokens); give all nodes the same data files"
    )


def open_new(path: Path, *, offload: str = "none") -> None:
    """Find out which nodes share the new run folder `path`, and create it on the others' disks.

    Args:
        path: The run folder.
        offload: The value of `sharding.offload`.

    Raises:
        TigonError: In the main process, if a node cannot have the folder; no node keeps it then.
        SystemExit: In the others then, with code 2.
    """
    try:
        _open_new(path, offload)
    except TigonError:
        if launch.rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _open_new(path: Path, offload: str) -> None:
    disks = node_disks.find(path)
    if disks is None:
        return
    problem = ""
    if offload == "nvme":  # DeepSpeed copies its files into checkpoints itself
        problem = (
            f"sharding.offload: nvme has not been tried with {path} on each node's own disk; set output.folder to a "
            "folder on a disk that all nodes share, or use sharding.offload: cpu"
        )
    if node_disks.is_writer() and launch.rank() > 0 and any(path.iterdir()):
        if launch_folder.is_marked(path):  # an earlier attempt of this launch, without a checkpoint to continue from
            shutil.rmtree(path)
            path.mkdir()
        else:
            problem = f"{disks.place}: this folder exists there; remove it, or choose another output.name"
    problems = list(filter(None, launch.gather(problem)))
    if problems and launch.rank() == 0:
        raise RunFolderError(problems[0])
    if problems:
        with suppress(OSError):  # it is not empty if it existed before
            path.rmdir()
        raise SystemExit(2)


def open_again(path: Path) -> list[str]:
    """Find out which nodes share the run folder `path` of an earlier run. Raises as `node_disks.find`.

    Returns:
        A line for the user if a node has no such folder.
    """
    had = launch.gather(path.is_dir()) if launch.has_several_nodes() else []
    disks = node_disks.find(path)
    new = [disks.hosts[i] for i, ranks in enumerate(disks.processes) if not had[ranks[0]]] if disks else []
    return [f"{path} was not on {', '.join(new)}"] if new else []


def lines(path: Path, *, divided: bool) -> list[str]:
    """What was found about the disks of several nodes, for the user; [] with one node.

    divided: Whether each node has only its own part of a checkpoint.
    """
    disks = node_disks.several()
    if disks is None:
        return [f"disks    all nodes share {path}"] if launch.has_several_nodes() else []
    kept = "the files of its own processes" if divided else "whole checkpoints"
    return [
        f"disks    each of the {disks.count} nodes has {path} on its own disk and keeps {kept} there; records, report "
        f"and final model are on {disks.hosts[0]}"
    ]
