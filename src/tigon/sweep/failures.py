"""What became of a point that did not end well: out of memory, which is a result, or a failure with its reason.

Running out of memory shows in many ways: PyTorch's allocator and DeepSpeed, which uses it, raise OutOfMemoryError;
cuBLAS and cuDNN return a status when they cannot allocate; the CPU allocator raises a RuntimeError; Linux kills a
process when the host's memory is gone.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

OK, OUT_OF_MEMORY, REFUSED, FAILED, TIMED_OUT = "ok", "out of memory", "refused", "failed", "timed out"
SKIPPED, NOT_MEASURED = "skipped", "not measured"

_MEMORY = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED"
    r"|cudaErrorMemoryAllocation|can't allocate memory|Cannot allocate memory|std::bad_alloc",
    re.IGNORECASE,
)
_TAIL_CHARACTERS = 20_000
_KERNEL_KILLS = Path("/sys/fs/cgroup/memory.events")


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
    text = log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:] if log.is_file() else ""
    if found := _MEMORY.search(text):
        start = text.rfind("\n", 0, found.start()) + 1
        return OUT_OF_MEMORY, line(text[start:].splitlines()[0])
    if code == -signal.SIGKILL and kills_before is not None and (kernel_kills() or 0) > kills_before:
        return OUT_OF_MEMORY, "killed by Linux: the host's memory was full"
    said = next(
        (words for words in reversed(text.splitlines()) if re.match(r"\w*(Error|Exception|tigon)\b", words)), ""
    )
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return FAILED, line(f"{ended}{': ' + said if said else ''}")


def kernel_kills() -> int | None:
    """How often Linux has killed a process of this control group for its memory; None where it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)", _KERNEL_KILLS.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
