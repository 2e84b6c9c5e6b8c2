"""Whether the nodes of a run share the disk of its run folder, and what each node keeps if they do not.

Every process writes a file with its number into the run folder and looks for the files of the others. So the run finds
out by itself which processes share a disk. Either all nodes share one, or each node has its own; a mixture is refused.

With own disks, the first process of each node writes what its node needs to resume. A process has one run folder, so
the result is kept in this module: `several()` and `is_writer()` answer for it.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tigon.errors import ProcessError, RunFolderError
from tigon.trainer.distributed import launch

SEEN_S = 30  # file systems on a network show new files to other machines after a delay
# A file system of these types belongs to one machine, so a file that is not there at once never comes.
LOCAL_TYPES = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs", "exfat"}
MOUNTS = Path("/proc/self/mountinfo")
PIECE_BYTES = 64 * 2**20  # of a file that travels to other nodes
TOKEN = ".disk-"


@dataclass(frozen=True)
class Disks:
    """The disks of a run whose nodes do not share one; disk N belongs to node N."""

    own: int
    """The disk of this process."""
    processes: tuple[tuple[int, ...], ...]
    """The processes of each disk's node."""
    hosts: tuple[str, ...]
    folders: tuple[str, ...]
    """The absolute path of the run folder on each disk."""

    @property
    def count(self) -> int:
        return len(self.processes)

    @property
    def place(self) -> str:
        """Host and run folder of this process's disk."""
        return self.place_of(self.own)

    def place_of(self, disk: int) -> str:
        """Host and run folder of a disk."""
        return f"{self.hosts[disk]}:{self.folders[disk]}"


_found: Disks | None = None


def several() -> Disks | None:
    """The disks of this run; None if all its processes share one."""
    return _found


def is_writer() -> bool:
    """Whether this process writes the files that all processes of its disk read."""
    return launch.rank() == 0 if _found is None else launch.rank() == _found.processes[_found.own][0]


def find(path: Path) -> Disks | None:
    """Find out which processes share the disk of the run folder `path`. Every process calls it.

    The folder is created on each disk that lacks it.

    Returns:
        The disks; None if all processes share one.

    Raises:
        RunFolderError: The folder cannot be created on this node.
        ProcessError: In the main process, if some nodes share a disk and others do not.
        SystemExit: In the other processes then, with code 2.
    """
    global _found
    _found = None
    if not launch.has_several_nodes():
        return None
    prefix = f"{TOKEN}{launch.broadcast(uuid.uuid4().hex[:12])}-"
    token = path / f"{prefix}{launch.rank()}"
    error = _write(token)
    errors = launch.gather(error)
    if any(errors):
        raise RunFolderError(error or f"{path}: process {_first(errors)} cannot write into its run folder")
    seen = _seen(path, prefix)
    answers = launch.gather((seen, socket.gethostname(), str(path.resolve()), _local_rank()))
    with suppress(OSError):
        token.unlink()
    distributed.barrier()  # the folder has no tokens any more
    groups = sorted({ranks for ranks, _, _, _ in answers}, key=min)
    if len(groups) == 1 and len(groups[0]) == launch.world_size():
        return None
    leaders = [[rank for rank in ranks if not answers[rank][3]] for ranks in groups]
    agree = all(rank in ranks for rank, (ranks, _, _, _) in enumerate(answers))
    whole = sum(map(len, groups)) == launch.world_size() and all(len(first) == 1 for first in leaders)
    if not agree or not whole:
        if launch.rank() > 0:
            with suppress(OSError):  # it is empty if it is new
                path.rmdir()
            raise SystemExit(2)
        nodes = "; ".join(f"processes {', '.join(map(str, sorted(ranks)))}" for ranks in groups)
        raise ProcessError(
            f"output.folder: some nodes share {path.parent} and others do not ({nodes} see each other's files); set "
            "output.folder to a folder on a disk that all nodes share, or to one on each node's own disk"
        )
    _found = Disks(
        own=next(i for i, ranks in enumerate(groups) if launch.rank() in ranks),
        processes=tuple((leaders[i][0], *sorted(ranks - {leaders[i][0]})) for i, ranks in enumerate(groups)),
        hosts=tuple(answers[min(ranks)][1] for ranks in groups),
        folders=tuple(answers[min(ranks)][2] for ranks in groups),
    )  # fmt: skip
    return _found


def _write(token: Path) -> str:
    """Create the token and its folder. Returns why not, or an empty text."""
    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch()
    except OSError as error:
        return f"{token.parent}: cannot be created on {socket.gethostname()}: {error.strerror}; choose another folder"
    return ""


def _first(errors: Sequence[str]) -> int:
    return next(rank for rank, error in enumerate(errors) if error)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _seen(path: Path, prefix: str) -> frozenset[int]:
    """The processes whose tokens this process sees. It waits for missing ones only if they may come late."""
    deadline_s = time.monotonic() + (0 if _is_local(path) else SEEN_S)
    while True:
        names = [name for name in os.listdir(path) if name.startswith(prefix)]
        if len(names) == launch.world_size() or time.monotonic() >= deadline_s:
            return frozenset(int(name.removeprefix(prefix)) for name in names)
        time.sleep(0.1)


def _is_local(path: Path) -> bool:
    """Whether the file system of `path` belongs to this machine alone; False if the system does not tell."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    here, best = path.resolve(), (-1, "")
    for line in lines:
        before, _, after = line.partition(" - ")
        mounted = Path(before.split()[4].replace("\\040", " "))
        if here.is_relative_to(mounted):
            best = max(best, (len(mounted.parts), after.split()[0]), key=lambda each: each[0])
    return best[1] in LOCAL_TYPES


def share(folder: Path, *, here: bool = True) -> None:
    """Give every disk the files that the main process has in `folder` and the disk lacks. Every process calls it.

    A file that a disk has in the same size stays as it is.

    Args:
        folder: A folder below the run folder, which need not exist on the other disks.
        here: Whether the disk of this process takes part.

    Raises:
        RunFolderError: A disk could not be written; in every process.
    """
    if _found is None:
        return
    files = {name: (folder / name).stat().st_size for name in _names(folder)} if launch.rank() == 0 else {}
    files = launch.broadcast(files)
    writes = here and is_writer() and launch.rank() > 0
    missing = {name for name, n_bytes in files.items() if writes and not _has(folder / name, n_bytes)}
    wanted = {name for names in launch.gather(missing) for name in names}
    error: OSError | None = None
    for name in (name for name in files if name in wanted):
        error = _send(folder / name, files[name], receives=name in missing and error is None) or error
    errors = launch.gather(str(error or ""))
    for name in missing:
        if any(errors):
            _scratch(folder / name).unlink(missing_ok=True)
        else:
            _scratch(folder / name).replace(folder / name)
    if any(errors):
        raise RunFolderError(
            f"{folder}: cannot be copied to every node: process {_first(errors)}: {errors[_first(errors)]}"
        ) from error
    distributed.barrier()  # other processes of a node read what its writer has just renamed


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _has(file: Path, n_bytes: int) -> bool:
    try:
        return file.stat().st_size == n_bytes
    except OSError:
        return False


def _scratch(file: Path) -> Path:
    return file.with_name(f".{file.name}.part")


def _send(file: Path, n_bytes: int, *, receives: bool) -> OSError | None:
    """Broadcast a file of the main process in pieces; those that receive write it to its scratch file.

    Returns:
        The error of this process, which takes part to the end, so that the others do not wait for it.
    """
    sends, scratch, error = launch.rank() == 0, _scratch(file), None
    opened: Any = None
    try:
        if receives:
            scratch.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("rb") if sends else scratch.open("wb") if receives else None
    except OSError as caught:
        error = caught
    for start in range(0, n_bytes, PIECE_BYTES):
        piece = torch.zeros(min(PIECE_BYTES, n_bytes - start), dtype=torch.uint8)
        try:
            if sends and opened is not None:
                opened.readinto(piece.numpy())
        except OSError as caught:
            error = caught
        distributed.broadcast(piece, src=0)
        try:
            if receives and opened is not None and error is None:
                opened.write(piece.numpy())
        except OSError as caught:
            error = caught
    try:
        if opened is not None:
            opened.close()
    except OSError as caught:
        error = caught
    return error


def exchange(folder: Path, names: Sequence[str]) -> None:
    """Give every disk the small files `names` that this process has written into `folder`. Every process calls it."""
    if _found is None:
        return
    own = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    for files in launch.gather(own):
        for name, content in files.items() if is_writer() else ():
            if not (folder / name).exists():
                (folder / name).write_bytes(content)


def remove(path: Path) -> None:
    """Remove the run folder `path` on every disk. Every process may call it."""
    if is_writer():
        shutil.rmtree(path, ignore_errors=True)
