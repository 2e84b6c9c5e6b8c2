"""Checkpoints that are there whole or not at all, and that are looked at before they are used.

The Trainer writes its files straight into `checkpoint-N`, in several engines' ways, and takes the highest number for
the newest checkpoint. Here they are written into `.writing-N/checkpoint-N`, brought to the disk (fsync), listed with
their sizes and SHA-256 in a manifest, which is the last file, and moved into place by one rename: whatever ends the
process, at whatever moment, `checkpoints/` holds complete checkpoints and at most folders named with a dot,
which the next save removes. `newest` compares every file with the manifest and passes over what differs, with the
reason. The manifest protects against accidents; against malice nothing is read as a pickle (`no_pickles`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tigon.errors import RunFolderError

MANIFEST, FORMAT = "manifest.json", 1
PIECE_BYTES = 64 * 2**20  # hashed side by side: one stream of SHA-256 is slower than a good disk
READ_BYTES = 2**20
FULL_BYTES = 64 * 2**20
NOT_OURS = "training_args.bin"  # a pickle that the Trainer leaves and nobody reads
WRITING, REMOVING = ".writing-", ".removing-"
NFS = ".nfs"  # what NFS calls a removed file that is still open: gone in a moment


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from, and what is wrong with the newer ones."""

    path: Path
    metadata: Mapping[str, Any]
    """What the run said of itself when it was written."""
    passed_over: tuple[str, ...] = ()


def name_of(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(checkpoint.name.split("-")[1])


def scratch(folder: Path, step: int) -> Path:
    """Where the files of `checkpoint-<step>` are written until they are complete; the same in every process."""
    return folder / f"{WRITING}{step}"


def clear(folder: Path) -> None:
    """Remove what a save or a removal that was cut off has left."""
    for path in folder.glob(".*"):
        if path.name.startswith((WRITING, REMOVING)) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def publish(folder: Path, step: int, metadata: Mapping[str, Any], keep: int) -> None:
    """Complete the checkpoint in `scratch(folder, step)`, move it into place, and remove all but the newest `keep`.

    facts: what a resumed run compares itself with.
    """
    written = scratch(folder, step) / name_of(step)
    (written / NOT_OURS).unlink(missing_ok=True)
    _write_manifest(written, step, metadata)
    final = folder / name_of(step)
    before = _put_away(final) if final.exists() or final.is_symlink() else None
    written.rename(final)
    _sync(folder)
    scratch(folder, step).rmdir()
    if before is not None:  # not earlier: the new one has to be in place first
        shutil.rmtree(before, ignore_errors=True)
    others = sorted((n, path) for n, path in _numbered(folder) if n != step)
    later = [path for n, path in others if n > step]  # of a run that this one was resumed before
    for path in later + [path for n, path in others if n < step][: -(keep - 1) or None]:
        _remove(path)


def newest(folder: Path) -> ResumePoint:
    """The newest checkpoint that is as it was written. Raises RunFolderError when there is none."""
    problems: list[str] = []
    for step, path in sorted(_numbered(folder), reverse=True):
        problem = problem_of(path, step)
        if problem is None:
            return ResumePoint(path, _manifest(path)["facts"], tuple(problems))
        problems.append(f"{path.name} {problem}")
    why = "; ".join(problems) or "there is none; set train.save_steps"
    raise RunFolderError(f"{folder}: no complete checkpoint to resume from: {why}; start a new run without --resume")


def problem_of(path: Path, step: int) -> str | None:
    """What differs from the manifest, as the end of a sentence; None: nothing."""
    if path.is_symlink():
        return "is a link"
    try:
        manifest = _manifest(path)
        listed = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()}
        format_, numbers = int(manifest["format"]), int(manifest["step"])
        dict(dict(manifest["facts"]).get("versions", {}))
    except FileNotFoundError:
        return f"lacks {MANIFEST}: it was not written to its end"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return f"has an unreadable {MANIFEST}"
    if format_ != FORMAT:
        return f"has a {MANIFEST} of format {format_}, and this tigon reads {FORMAT}"
    if numbers != step:
        return f"says it is step {numbers}"
    try:
        present = _files(path)
    except RunFolderError as error:
        return str(error)
    for name in listed:
        if name not in present:
            return f"lacks {name}"
    for name in present:
        if name not in listed and not Path(name).name.startswith("."):  # .DS_Store and the like: nothing reads them
            return f"holds {name}, which its {MANIFEST} does not list"
    for name, (size_bytes, _) in listed.items():
        found_bytes = (path / name).stat().st_size
        if found_bytes != size_bytes:
            return f"is damaged: {name} has {found_bytes:,} bytes instead of {size_bytes:,}"
    for name, (_, sha256) in listed.items():
        if digest(path / name) != sha256:
            return f"is damaged: the content of {name} is not what was written"
    return None


def digest(path: Path) -> str:
    """SHA-256 of the concatenated SHA-256 of the file's pieces of `PIECE_BYTES`."""
    starts = range(0, path.stat().st_size, PIECE_BYTES)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return hashlib.sha256(b"".join(pool.map(partial(_piece, path), starts))).hexdigest()


def _piece(path: Path, start: int) -> bytes:
    sha256, left = hashlib.sha256(), PIECE_BYTES
    with path.open("rb") as handle:
        handle.seek(start)
        while left and (part := handle.read(min(READ_BYTES, left))):
            sha256.update(part)
            left -= len(part)
    return sha256.digest()


def _manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def _write_manifest(path: Path, step: int, metadata: Mapping[str, Any]) -> None:
    files = {}
    for name in _files(path):
        _sync(path / name)
        files[name] = {"bytes": (path / name).stat().st_size, "sha256": digest(path / name)}
    manifest = {"format": FORMAT, "step": step, "facts": dict(metadata), "files": files}
    (path / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _sync(path / MANIFEST)
    for folder, _, _ in os.walk(path):
        _sync(Path(folder))


def _files(path: Path) -> list[str]:
    """Every file below but the manifest, by its path from there; also .metadata, without which PyTorch's distributed
    checkpoints of FSDP2 cannot be read."""
    paths = []
    for folder, folders, files in os.walk(path):
        for name in sorted(folders + files):
            here = Path(folder, name)
            if here.is_symlink():
                raise RunFolderError(f"holds a link, {here.relative_to(path)}")
        paths += [Path(folder, name).relative_to(path).as_posix() for name in files if not name.startswith(NFS)]
    return sorted(name for name in paths if name != MANIFEST)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    checkpoints = []
    for path in folder.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match and path.is_dir():
            checkpoints.append((int(match[1]), path))
    return checkpoints


def _remove(path: Path) -> None:
    """Out of sight by one rename first, so that no half-removed checkpoint is ever seen."""
    away = _put_away(path)
    if away is not None:
        shutil.rmtree(away, ignore_errors=True)


def _put_away(path: Path) -> Path | None:
    """Where it went, out of sight. A link is only unlinked."""
    if path.is_symlink():
        path.unlink()
        return None
    away = path.with_name(f"{REMOVING}{path.name}")
    if away.exists():
        shutil.rmtree(away)
    path.rename(away)
    return away


def _sync(path: Path) -> None:
    """To the disk. Some file systems cannot do that for folders, and need not."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def disk_is_full(error: BaseException, folder: Path) -> bool:
    """Whether `error`, or what it came from, is that of a full disk or quota, whichever library said so.

    PyTorch's writer only says that a stream failed, in several ways; then the disk is asked, so ask before any of what
    was written is removed.
    """
    while True:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error) or "os error 28" in str(error):
            return True
        if isinstance(error, RuntimeError) and folder.exists() and shutil.disk_usage(folder).free < FULL_BYTES:
            return True
        before = error.__cause__ or error.__context__
        if before is None:
            return False
        error = before


def no_pickles() -> None:
    """From here on torch.load executes nothing, whoever calls it in this process or one it starts: DeepSpeed asks for
    whole pickles."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # with both, torch.load refuses every file
