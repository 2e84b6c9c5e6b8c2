"""Classifies points that did not finish: out of memory, which is a result, or a failure with its reason.

Running out of memory shows in several ways. PyTorch's allocator, which DeepSpeed uses too, raises OutOfMemoryError.
cuBLAS and cuDNN return a status when they cannot allocate. The CPU allocator raises a RuntimeError. Linux kills a
process when the host's memory is full.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

OK, OUT_OF_MEMORY, REFUSED, FAILED, TIMED_OUT = "ok", "out of memory", "refused", "failed", "timed out"
SKIPPED, NOT_MEASURED = "skipped", "not measured"
FINISHED = (OK, OUT_OF_MEMORY)
_MARKS = {OK: "", OUT_OF_MEMORY: "OOM", SKIPPED: "(OOM)"}

_MEMORY = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED"
    r"|cudaErrorMemoryAllocation|can't allocate memory|Cannot allocate memory|std::bad_alloc",
    re.IGNORECASE,
)
_TAIL_CHARACTERS = 20_000
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def mark(status: str) -> str:
    """Text for tables and charts instead of a figure. "(OOM)" marks a point skipped because a smaller one ran out."""
    return _MARKS.get(status, status)


def line(text: object, limit: int = 300) -> str:
    """The text as one line of at most `limit` characters."""
    words = " ".join(str(text).split())
    return words if len(words) <= limit else words[: limit - 1] + "…"


def status_of_exception(error: BaseException) -> tuple[str, str]:
    """(status, reason) of an exception in this process. Its causes are searched too."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (torch.OutOfMemoryError, MemoryError)) or _MEMORY.search(str(seen)):
            return OUT_OF_MEMORY, line(_sentence(str(seen)) or type(seen).__name__)
        seen = seen.__cause__ or seen.__context__
    return FAILED, line(f"{type(error).__name__}: {error}")


def _sentence(text: str) -> str:
    """The part of an out-of-memory message about the allocation, without source location and advice."""
    message = re.sub(r"^\[enforce fail[^\]]*\][^.]*\.\s*", "", text.strip())
    return re.split(r"\s(?:GPU \d|Error code|CUDA kernel errors)", message)[0]


def status_of_exit(code: int, log: Path, kills_before: int | None) -> tuple[str, str]:
    """(status, reason) of a process that ended with `code` and left no result, from its exit code and log."""
    text = _tail(log)
    if match := _MEMORY.search(text):
        start = text.rfind("\n", 0, match.start()) + 1
        return OUT_OF_MEMORY, line(text[start:].splitlines()[0])
    if killed := status_of_kill(code, kills_before):
        return killed
    message = next(
        (words for words in reversed(text.splitlines()) if re.match(r"\w*(Error|Exception|tigon)\b", words)), ""
    )
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return FAILED, line(f"{ended}{': ' + message if message else ''}")


def status_of_kill(code: int, kills_before: int | None) -> tuple[str, str] | None:
    """(status, reason) if SIGKILL ended the process, else None. kills_before: `kernel_kills()` when the process began.

    Linux sends SIGKILL when the host's memory is full, but users and schedulers send it too.
    """
    if code != -signal.SIGKILL:
        return None
    kills = kernel_kills()
    if kills is None or kills_before is None:
        return FAILED, "killed by SIGKILL, perhaps because host memory was full: Linux does not count such kills here"
    if kills > kills_before:
        return OUT_OF_MEMORY, "killed by Linux: the host's memory was full"
    return FAILED, "killed by SIGKILL, but not by Linux for lack of host memory"


def status_of_processes(
    outputs: Sequence[Mapping[str, Any]], code: int | None, log: Path, kills_before: int | None, timeout_s: float
) -> tuple[str, str]:
    """(status, reason) of a point of which a process left no result. code: None after the timeout."""
    reported = _reported(outputs, FAILED)
    if code is None:
        return reported or (TIMED_OUT, f"longer than {timeout_s:g} s")
    # a kill first: the other processes then fail too, because they lose the connection to the killed one
    return status_of_kill(code, kills_before) or reported or status_of_exit(code, log, kills_before)


def worst(outputs: Sequence[Mapping[str, Any]], ended: tuple[str, str] | None) -> tuple[str, str]:
    """(status, reason) of a point, from its processes' results and from how they ended if one left none."""
    return _reported(outputs, OUT_OF_MEMORY, REFUSED) or ended or _reported(outputs, FAILED) or (OK, "")


def _reported(outputs: Sequence[Mapping[str, Any]], *statuses: str) -> tuple[str, str] | None:
    return next(((s, str(one["detail"])) for s in statuses for one in outputs if one["status"] == s), None)


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:] if log.is_file() else ""


def kernel_kills() -> int | None:
    """How many processes Linux has killed for lack of memory, in this control group or else on this machine.

    None if Linux has no such counter here.
    """
    for counter in _counters():
        try:
            match = re.search(r"^oom_kill (\d+)", counter.read_text(encoding="ascii"), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1])
    return None


def _counters() -> Iterator[Path]:
    """Files that may count the kills, the narrowest scope first.

    They are those of this process's control group, of the groups around it, and of the machine. In version 2 a group's
    counter includes the groups inside it. The machine's counter includes unrelated kills.
    """
    try:
        lines = (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for controllers, name in (entry.split(":", 2)[1:] for entry in lines):
        group = PurePosixPath(name.lstrip("/"))
        if not controllers:
            yield from (_CGROUPS / part / "memory.events" for part in (group, *group.parents))
        elif "memory" in controllers.split(","):
            yield _CGROUPS / "memory" / group / "memory.oom_control"
            yield _CGROUPS / "memory" / "memory.oom_control"  # a container's own group, as it is mounted inside
    yield _PROC / "vmstat"
