"""Which node has which files of a checkpoint, if each node of a run has its own disk; and the choice of one to resume.

With DDP every node has a whole checkpoint: the weights and states are equal in all processes, and the small files of
each process go to every node. So a node that lacks the checkpoint gets it from the main process. FSDP2 and ZeRO divide
weights or states among processes. Then each node has the files of its own processes, and a run that needs others names
them and the command that copies them.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tigon.errors import RunFolderError
from tigon.recipe.keys import Recipe
from tigon.trainer.checkpoint import checkpoint, elastic, universal
from tigon.trainer.checkpoint.checkpoint import ResumePoint
from tigon.trainer.distributed import launch, node_disks
from tigon.trainer.distributed.node_disks import Disks

DISKS = "disks"  # in a checkpoint's metadata


def divides(recipe: Recipe) -> bool:
    """Whether the processes of a run write different weights or optimizer states into its checkpoints."""
    # With FSDP2 and another optimizer, the main process gathers and writes whole states.
    return recipe.sharding.zero > 0 or (recipe.sharding.fsdp and elastic.writes_distributed(recipe))


def facts(divided: bool) -> dict[str, Any]:
    """The entry of a checkpoint's metadata about the disks of the run; {} if its nodes share one."""
    disks = node_disks.several()
    if disks is None:
        return {}
    own = {"own": disks.own, "processes": disks.processes, "hosts": disks.hosts, "folders": disks.folders}
    return {DISKS: {**own, "divided": divided}}


def number_before(checkpoints: Path) -> int | None:
    """The number of the node that wrote the newest checkpoint on its own disk; None if nodes shared the disk."""
    disks = checkpoint.newest_metadata(checkpoints).get(DISKS)
    return int(disks["own"]) if disks else None


def _written(metadata: Mapping[str, Any]) -> Disks | None:
    """The disks on which the processes wrote a divided checkpoint; None if it is whole wherever it is."""
    disks = metadata.get(DISKS)
    if not disks or not disks["divided"]:
        return None
    processes = tuple(map(tuple, disks["processes"]))
    return Disks(int(disks["own"]), processes, tuple(disks["hosts"]), tuple(disks["folders"]))


def _place(disks: Disks, disk: int, name: str) -> str:
    """Host and path of a checkpoint on a disk."""
    return f"{disks.place_of(disk)}/checkpoints/{name}"


def problem(path: Path) -> str | None:
    """The files that a checkpoint lacks because other nodes have them, as a message; None if it is whole."""
    written = _written(checkpoint.metadata_of(path))
    missing = sorted(set(range(written.count)) - set(checkpoint.parts_in(path))) if written else []
    if written is None or not missing:
        return None
    return f"{path} {_lacks(written, missing, path.name, str(path), {})}"


def agree(point: ResumePoint, *, same: bool) -> tuple[ResumePoint, list[str]]:
    """Choose the newest checkpoint that every node can resume from. Every process calls it, with equal arguments.

    Args:
        point: The newest checkpoint on the disk of the main process.
        same: Whether the run has the processes and the engine that wrote the checkpoints.

    Returns:
        The checkpoint, and lines for the user about copies that were made.

    Raises:
        RunFolderError: In the main process, if there is none; it says what is missing where.
        SystemExit: In the others then, with code 2.
    """
    disks = node_disks.several() or _one_disk(point.path)
    passed, first = list(point.passed_over), ""
    while True:
        written = _written(point.metadata)
        if written is None:
            return replace(point, passed_over=tuple(passed)), _complete(point.path, disks)
        lacking = _lacking(point.path, disks, written, same=same)
        if not lacking:
            return replace(point, passed_over=tuple(passed)), []
        text = "; ".join(lacking)
        first, older = first or text, launch.broadcast(_older(point))
        if older is None:
            if launch.rank() > 0:
                raise SystemExit(2)
            raise RunFolderError(f"{first}; then start the command on every node again with --resume")
        passed.append(f"{point.path.name} is not whole: {text}")
        point = older


def _one_disk(path: Path) -> Disks:
    """The disk that all processes share."""
    folder = str(path.parent.parent.resolve())
    return Disks(0, (tuple(range(launch.world_size())),), (socket.gethostname(),), (folder,))


def _older(point: ResumePoint) -> ResumePoint | None:
    if launch.rank() > 0:
        return None
    try:
        return checkpoint.newest(point.path.parent, below=checkpoint.step_of(point.path))
    except RunFolderError:
        return None


def _complete(path: Path, disks: Disks) -> list[str]:
    """Copy a whole checkpoint to the nodes that lack it. Returns a line about each copy."""
    if disks.count == 1:
        return []
    lacks = node_disks.is_writer() and launch.rank() > 0 and _problem_here(path) is not None
    copies = [rank for rank, answer in enumerate(launch.gather(lacks)) if answer]
    if not copies:
        return []
    if lacks:
        shutil.rmtree(path, ignore_errors=True)
    node_disks.share(path, here=lacks)
    places = [disks.place_of(i) for i, ranks in enumerate(disks.processes) if ranks[0] in copies]
    return [f"{path.name} was copied to {', '.join(places)}"]


def _problem_here(path: Path) -> str | None:
    return checkpoint.problem_of(path, checkpoint.step_of(path)) if path.is_dir() else "is not there"


def _lacking(path: Path, disks: Disks, written: Disks, *, same: bool) -> list[str]:
    """A sentence for each node that cannot resume from a divided checkpoint. Every process calls it."""
    own = None
    if node_disks.is_writer():
        exists = path.is_dir()
        own = (_problem_here(path) if exists else None, sorted(checkpoint.parts_in(path)) if exists else [])
    answers = launch.gather(own)
    by_disk = [answers[ranks[0]] or (None, []) for ranks in disks.processes]
    holders = {part: i for i, (trouble, parts) in reversed(list(enumerate(by_disk))) if not trouble for part in parts}
    only_main_reads = not same and launch.broadcast(universal.is_deepspeeds(path))
    sentences = []
    for i, (trouble, parts) in enumerate(by_disk):
        target = f"{disks.folders[i]}/checkpoints/{path.name}"
        if trouble:
            sentences.append(f"{_place(disks, i, path.name)} {trouble}")
            continue
        needed = _needed(written, disks.processes[i], same=same) if i == 0 or not only_main_reads else set()
        if missing := sorted(needed - set(parts)):
            places = {part: _place(disks, holder, path.name) for part, holder in holders.items()}
            text = _lacks(written, missing, path.name, target, places, host=disks.hosts[i])
            sentences.append(f"{_place(disks, i, path.name)} {text}")
    return sentences


def _needed(written: Disks, processes: Collection[int], *, same: bool) -> set[int]:
    """The parts of a checkpoint that the processes of one node read."""
    return {part for part, wrote in enumerate(written.processes) if not same or set(wrote) & set(processes)}


def _lacks(
    written: Disks, missing: Sequence[int], name: str, target: str, places: Mapping[int, str], host: str = ""
) -> str:
    """The end of a sentence that says what a checkpoint lacks and how to copy it.

    Args:
        written: Where it was written.
        missing: The parts that are not there.
        name: The name of the checkpoint.
        target: Its path.
        places: The parts that a node of this run has -> host and path.
        host: The host of `target`.
    """
    ranks = sorted(rank for part in missing for rank in written.processes[part])
    what = f"lacks the files of process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    sources = {part: places.get(part, _place(written, part, name)) for part in missing}
    lost = [place for place in sources.values() if place == f"{host}:{target}"]
    if lost:
        return f"{what}, which were written there and which no other node has; restore that folder"
    copies = " and ".join(
        f"`rsync -a --ignore-existing {place}/ {target}/`" for place in dict.fromkeys(sources.values())
    )
    return f"{what}; copy them{f' on {host}' if host else ''} with {copies}"
