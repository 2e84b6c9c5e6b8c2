"""What became of a point that did not end well: out of memory, which is a result, or a failure with its reason.

Running out of memory shows in many ways: PyTorch's allocator and DeepSpeed, which uses it, raise OutOfMemoryError;
cuBLAS and cuDNN return a status when they cannot allocate; the CPU allocator raises a RuntimeError; Linux kills a
process when the host's memory is gone.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

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
    """What stands in tables and charts where there is no measurement; in brackets what a smaller size has ruled out."""
    return _MARKS.get(status, status)


def line(text: object, limit: int = 300) -> str:
    """One line, its paths and its length as they are needed in a table."""
    words = " ".join(str(text).split())
    return words if len(words) <= limit else words[: limit - 1] + "…"


def of_exception(error: BaseException) -> tuple[str, str]:
    """(status, reason) of an exception in the process itself, its causes included."""
    import torch

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (torch.OutOfMemoryError, MemoryError)) or _MEMORY.search(str(seen)):
            return OUT_OF_MEMORY, line(_sentence(str(seen)) or type(seen).__name__)
        seen = seen.__cause__ or seen.__context__
    return FAILED, line(f"{type(error).__name__}: {error}")


def _sentence(text: str) -> str:
    """What was asked for: the rest of such a message is where in the source, and advice."""
    said = re.sub(r"^\[enforce fail[^\]]*\][^.]*\.\s*", "", text.strip())
    return re.split(r"\s(?:GPU \d|Error code|CUDA kernel errors)", said)[0]


def of_exit(code: int, log: Path, kills_before: int | None) -> tuple[str, str]:
    """(status, reason) of a process that ended with `code` and left no result: its log is what there is."""
    text = _tail(log)
    if found := _MEMORY.search(text):
        start = text.rfind("\n", 0, found.start()) + 1
        return OUT_OF_MEMORY, line(text[start:].splitlines()[0])
    if killed := of_kill(code, kills_before):
        return killed
    said = next(
        (words for words in reversed(text.splitlines()) if re.match(r"\w*(Error|Exception|tigon)\b", words)), ""
    )
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return FAILED, line(f"{ended}{': ' + said if said else ''}")


def of_kill(code: int, kills_before: int | None) -> tuple[str, str] | None:
    """(status, reason) where SIGKILL ended the process; None where it did not. kills_before: `kernel_kills` of the time
    when it began.

    SIGKILL is how Linux ends a process when the host's memory is gone, and how others end one for reasons of their own.
    """
    if code != -signal.SIGKILL:
        return None
    kills = kernel_kills()
    if kills is None or kills_before is None:
        return FAILED, "killed by SIGKILL, perhaps for want of host memory: Linux does not count such kills here"
    if kills > kills_before:
        return OUT_OF_MEMORY, "killed by Linux: the host's memory was full"
    return FAILED, "killed by SIGKILL, and not by Linux for want of host memory"


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:] if log.is_file() else ""


def kernel_kills() -> int | None:
    """How often Linux has killed a process for want of memory, in this control group or else on this machine; None
    where it does not say."""
    for counter in _counters():
        try:
            found = re.search(r"^oom_kill (\d+)", counter.read_text(encoding="ascii"), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def _counters() -> Iterator[Path]:
    """Where the kills may be counted, the narrowest first: this process's control group or the nearest around it (the
    counter of version 2 covers the groups inside), and the machine, whose other kills count there too."""
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
            yield _CGROUPS / "memory" / "memory.oom_control"  # what a container sees as its own
    yield _PROC / "vmstat"
