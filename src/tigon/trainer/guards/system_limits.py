"""The system's limits on a process (open files, file size, memory), and the messages for a run that reaches one."""

from __future__ import annotations

import errno
import re

from tigon.errors import RecipeError

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

OPEN_FILES = 4096  # far more than a run needs
LEAST_OPEN_FILES, OPEN_FILES_OF_A_WORKER = 16, 8  # 16 files were enough without workers, and 48 with four workers
# The error texts of glibc's loader, Python's threads and PyTorch's CPU allocator.
_NO_MEMORY = (
    r"failed to map segment|[Cc]annot allocate memory|can't start new thread|can't allocate memory|not enough memory|"
    r"cannot create (execution|thread)|Resource temporarily unavailable"
)
_TOO_LARGE = r"File too large|os error 27\b"


def raise_open_files(workers: int) -> None:
    """Raise the limit of open files to `OPEN_FILES`, or as far as the user may.

    Args:
        workers: Processes that prepare batches.

    Raises:
        RecipeError: The limit is too low for the workers. The run would hang, because PyTorch's threads could not open
            files.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    needed = LEAST_OPEN_FILES + workers * OPEN_FILES_OF_A_WORKER
    if wanted < needed:
        raise RecipeError(
            f"a process may open {wanted} files (`ulimit -n`), but train.workers: {workers} needs {needed}; raise the "
            f"limit, e.g. `ulimit -n 1024`, or lower train.workers"
        )


def words(error: BaseException) -> str | None:
    """The limit that `error` or one of its causes has reached, and what to do; None for another error."""
    at: BaseException | None = error
    while at is not None:
        message = _words(at)
        if message is not None:
            return message
        at = at.__cause__ or at.__context__
    return None


def _words(error: BaseException) -> str | None:
    number, text = getattr(error, "errno", None), " ".join(str(error).split())
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        return f"too many open files (`ulimit -n` is {_limit('RLIMIT_NOFILE')}); raise the limit, e.g. `ulimit -n 4096`"
    if number == errno.EFBIG or re.search(_TOO_LARGE, text):
        return _file_too_large()
    if isinstance(error, RuntimeError) and "PytorchStreamWriter" in text and _limit("RLIMIT_FSIZE") != "unlimited":
        return _file_too_large()  # PyTorch's writer does not name the cause of a failed write
    if isinstance(error, MemoryError) or number == errno.ENOMEM or re.search(_NO_MEMORY, text):
        return _no_memory(text)
    return None


def _file_too_large() -> str:
    limit = _limit("RLIMIT_FSIZE")
    cause = "the file system's limit" if limit == "unlimited" else f"`ulimit -f` allows {limit} bytes"
    return f"a file grew too large ({cause}); raise the limit"


def _no_memory(text: str) -> str | None:
    """The message if the process has a memory limit; None without one, because then the run's own message is better."""
    memory = {"ulimit -v": _limit("RLIMIT_AS"), "ulimit -d": _limit("RLIMIT_DATA")}
    limits = [f"`{option}` is {value} bytes" for option, value in memory.items() if value != "unlimited"]
    if not limits and "thread" in text:
        limits = [f"`ulimit -u` is {_limit('RLIMIT_NPROC')} processes and threads"]
    if not limits:
        return None
    return f"the system gave the process no more memory or threads ({', '.join(limits)}); raise the limit"


def _limit(name: str) -> str:
    if resource is None:
        return "unlimited"
    soft = resource.getrlimit(getattr(resource, name))[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
