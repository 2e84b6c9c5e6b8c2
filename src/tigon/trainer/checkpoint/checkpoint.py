"""Checkpoints that are complete or absent, and that are compared with their manifest before they are loaded.

Hugging Face's Trainer writes its files directly into `checkpoint-N` and takes the highest N for the newest checkpoint.
tigon writes them into `.writing-N/checkpoint-N` and flushes them to the disk (fsync). It then writes a manifest with
the size and `digest` of every file, and moves the folder into place with one rename.

So `checkpoints/` holds complete checkpoints whenever a process is killed. It may also hold folders whose name begins
with a dot, which the next save removes. `newest` compares every file with the manifest, skips checkpoints that differ,
and gives the reason. The manifest protects against accidents only. `no_pickles` protects against malicious files.
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
from types import NoneType
from typing import Any

from tigon._files import read_text
from tigon.errors import RunFolderError

MANIFEST, FORMAT = "manifest.json", 1
PIECE_BYTES = 64 * 2**20  # pieces are hashed in parallel, because one stream of SHA-256 is slower than a fast disk
READ_BYTES = 2**20
FULL_BYTES = 64 * 2**20  # a disk with less free space counts as full
NOT_OURS = "training_args.bin"  # a pickle that the Trainer writes and tigon never reads
STATE = "trainer_state.json"
COUNTS = ("processes", "samples_per_step")
"""Entries of the metadata that are numbers, if a checkpoint has them."""
_NUMBER = (int, float)
_STATE_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("global_step", "max_steps"), (int,)),
    **dict.fromkeys(("num_train_epochs", "total_flos", "num_input_tokens_seen"), _NUMBER),
    **dict.fromkeys(("epoch", "best_metric"), (*_NUMBER, NoneType)),
    "best_global_step": (int, NoneType),
    "best_model_checkpoint": (str, NoneType),
    "log_history": (list,),
    "stateful_callbacks": (dict,),
}
WRITING, REMOVING = ".writing-", ".removing-"
NFS = ".nfs"  # prefix of files that were removed on NFS while they were open; they disappear when they are closed


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from, and the problems of newer ones."""

    path: Path
    metadata: Mapping[str, Any]
    """The settings and versions of the run that wrote it."""
    passed_over: tuple[str, ...] = ()
    """A sentence for each newer checkpoint that cannot be used."""


def name_of(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(checkpoint.name.split("-")[1])


def scratch(folder: Path, step: int) -> Path:
    """The folder in which every process writes the files of `checkpoint-<step>` until it is complete."""
    return folder / f"{WRITING}{step}"


def clear(folder: Path) -> None:
    """Remove the folders that an interrupted save or removal has left."""
    for path in folder.glob(".*"):
        if path.name.startswith((WRITING, REMOVING)) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def publish(folder: Path, step: int, metadata: Mapping[str, Any], keep: int | None, best: int | None = None) -> None:
    """Complete the checkpoint in `scratch(folder, step)`, move it into place, and remove all but the newest `keep`.

    Args:
        folder: The `checkpoints` folder of the run.
        step: The optimizer step of the checkpoint.
        metadata: The settings and versions that a resumed run compares with its own.
        keep: The number of checkpoints to keep, with this one; None: all.
        best: The step of a checkpoint that is kept too, however old it is.
    """
    written = scratch(folder, step) / name_of(step)
    (written / NOT_OURS).unlink(missing_ok=True)
    _write_manifest(written, step, metadata)
    final = folder / name_of(step)
    before = _put_away(final) if final.exists() or final.is_symlink() else None
    written.rename(final)
    _sync(folder)
    scratch(folder, step).rmdir()
    if before is not None:  # only now, when the new checkpoint is in place
        shutil.rmtree(before, ignore_errors=True)
    for n, path in _numbered(folder):
        if n > step:  # written before the run was resumed from an earlier step
            _remove(path)
    if keep is None:
        return
    for n, path in sorted((n, path) for n, path in _numbered(folder) if n < step)[: -(keep - 1) or None]:
        if n != best:
            _remove(path)


def newest(folder: Path) -> ResumePoint:
    """The newest checkpoint whose files equal its manifest.

    Raises:
        RunFolderError: There is none; the message gives the problem of each checkpoint.
    """
    problems: list[str] = []
    for step, path in sorted(_numbered(folder), reverse=True):
        problem = problem_of(path, step)
        if problem is None:
            return ResumePoint(path, metadata_of(path), tuple(problems))
        problems.append(f"{path.name} {problem}")
    why = "; ".join(problems) or "there is none"
    raise RunFolderError(
        f"{folder}: no complete checkpoint to resume from: {why}; start without --resume and with another "
        f"output.name, or remove {folder.parent} before; train.save_steps: N saves a checkpoint every N steps"
    )


def newest_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of the newest checkpoint with a readable manifest, without a look at its files; {} if there is none.

    All checkpoints of a run agree in what identifies the run.
    """
    return next(filter(None, (metadata_of(path) for _, path in sorted(_numbered(folder), reverse=True))), {})


def metadata_of(path: Path) -> dict[str, Any]:
    """The metadata of a checkpoint; {} if its manifest cannot be read."""
    try:
        return _facts(_manifest(path))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata in a manifest. Raises KeyError or TypeError if it is not what `publish` writes."""
    facts = dict(manifest["facts"])
    numbers = [facts[name] for name in COUNTS if name in facts]
    versions = facts.get("versions", {})
    if not isinstance(versions, dict) or any(type(number) is not int or number < 1 for number in numbers):
        raise TypeError
    return facts


def newest_path(folder: Path) -> Path:
    """The path of the newest checkpoint, for a message; `checkpoint-N` if there is none."""
    return max(_numbered(folder), default=(0, folder / "checkpoint-N"))[1]


def problem_of(path: Path, step: int) -> str | None:
    """How a checkpoint differs from its manifest, as the end of a sentence; None if it does not."""
    if path.is_symlink():
        return "is a link"
    try:
        manifest = _manifest(path)
        listed = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()}
        format_, numbers = int(manifest["format"]), int(manifest["step"])
        _facts(manifest)
    except FileNotFoundError:
        return f"lacks {MANIFEST}: it was not completed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return f"has an unreadable {MANIFEST}"
    if format_ != FORMAT:
        return f"has a {MANIFEST} of format {format_}, but this version of tigon reads format {FORMAT}"
    if numbers != step:
        return f"has a {MANIFEST} of step {numbers}"
    try:
        present = _files(path)
    except RunFolderError as error:
        return str(error)
    for name in listed:
        if name not in present:
            return f"lacks {name}"
    for name in present:
        if name not in listed and not Path(name).name.startswith("."):  # such as .DS_Store, which tigon does not read
            return f"holds {name}, which its {MANIFEST} does not list"
    for name, (size_bytes, _) in listed.items():
        found_bytes = (path / name).stat().st_size
        if found_bytes != size_bytes:
            return f"is damaged: {name} has {found_bytes:,} bytes instead of {size_bytes:,}"
    for name, (_, sha256) in listed.items():
        if digest(path / name) != sha256:
            return f"is damaged: the content of {name} has changed"
    return _problem_of_state(path / STATE, step) if STATE in listed else None


def _problem_of_state(file: Path, step: int) -> str | None:
    """How the Trainer's own record differs from one of this step; None if it does not.

    The Trainer makes its state of any JSON, and fails on a wrong value many steps later.
    """
    try:
        state = json.loads(read_text(file))
        wrong = [name for name, types in _STATE_TYPES.items() if type(state.get(name)) not in types]
    except (OSError, ValueError, AttributeError, RecursionError):
        return f"has an unreadable {file.name}"
    if not wrong and not all(isinstance(record, dict) and "step" in record for record in state["log_history"]):
        wrong = ["log_history"]
    if not wrong and state["global_step"] != step:
        wrong = ["global_step"]
    return f"has a {file.name} with a wrong value of {', '.join(wrong)}" if wrong else None


def digest(path: Path) -> str:
    """SHA-256 over the SHA-256 digests of the file's pieces of `PIECE_BYTES`."""
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
    manifest: dict[str, Any] = json.loads(read_text(path / MANIFEST))
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
    """The relative paths of every file below `path` except the manifest. FSDP2's checkpoints need their .metadata.

    Raises:
        RunFolderError: There is a link, or something else that is not a regular file.
    """
    paths = []
    for folder, folders, files in os.walk(path):
        for name in sorted(folders + files):
            here = Path(folder, name)
            if here.is_symlink():
                raise RunFolderError(f"holds a link, {here.relative_to(path)}")
            if not (here.is_file() or here.is_dir()):
                raise RunFolderError(f"holds {here.relative_to(path)}, which is not a regular file")
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
    """Rename the folder before removing its files, so that no half-removed checkpoint is ever found."""
    hidden = _put_away(path)
    if hidden is not None:
        shutil.rmtree(hidden, ignore_errors=True)


def _put_away(path: Path) -> Path | None:
    """Rename a checkpoint to a hidden name, which is returned. A link is only unlinked."""
    if path.is_symlink():
        path.unlink()
        return None
    hidden = path.with_name(f"{REMOVING}{path.name}")
    if hidden.exists():
        shutil.rmtree(hidden)
    path.rename(hidden)
    return hidden


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk. Some file systems cannot flush folders, and do not need it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def disk_is_full(error: BaseException, folder: Path) -> bool:
    """Whether `error` or one of its causes means that a disk or quota is full.

    PyTorch's writer does not name the cause of a failed write, so for a RuntimeError the disk's free space decides.
    Call this before removing any of the written files.
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
    """Make every torch.load in this process and its children run with `weights_only=True`, also DeepSpeed's."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # with both, torch.load refuses every file
