"""Starts the processes that points run in, sends them their orders, and ends them with all their children.

Importing PyTorch and transformers takes longer than many points. On a machine with a GPU, several processes therefore
start together, import, and wait. Each then runs one point, or one rank of a point, and ends. All finish importing
before the first of them gets its order, so that nothing runs during a measurement. Until then they do not touch the
GPU. A launcher such as torchrun could not make the ranks of a point with several GPUs wait, so none is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tigon.trainer.distributed import launch

WORKER = ("-m", "tigon.sweep.worker.worker")
AHEAD = 4
"""How many processes import at a time on a machine with a GPU. A point with more GPUs starts more."""
_IMPORT_TIMEOUT_S = 120.0
_GRACE_S = 5.0
"""Time that the other ranks get after one failed: they may be writing their own error, or hang in a collective."""

Member = tuple[subprocess.Popen[bytes], Path]


class Group:
    """The processes that run one point, by rank."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the processes. Returns 0 if all succeed, None after `timeout_s`, else the exit code of a failed one.

        -SIGKILL takes precedence over other codes.
        """
        until_s = time.perf_counter() + timeout_s
        while None in (codes := self._codes()) and not any(codes):
            if time.perf_counter() > until_s:
                return None
            time.sleep(0.02)
        until_s = time.perf_counter() + _GRACE_S
        while None in (codes := self._codes()) and time.perf_counter() < until_s:
            time.sleep(0.02)
        bad = [code for code in codes if code]
        return -signal.SIGKILL if -signal.SIGKILL in bad else (bad or [0])[0]

    def _codes(self) -> list[int | None]:
        return [process.poll() for process, _ in self._members]

    def end(self, log: Path) -> None:
        """Kill the remaining processes and their children, and append the other ranks' logs to that of rank 0."""
        for process, _ in self._members:
            _end(process)
        for rank, (_, own) in enumerate(self._members[1:], 1):
            with log.open("a", encoding="utf-8") as handle:
                handle.write(f"\n--- process {rank}\n{own.read_text(encoding='utf-8', errors='replace')}")
            own.unlink()


class Workers:
    """The processes of a sweep.

    Each process ends when its standard input closes, so that a killed sweep leaves no process behind.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._ready: list[Member] = []
        self._number = 0

    def prepare(self, count: int) -> None:
        """Start `count` processes, and return when all have imported what a point needs."""
        waiting = []
        for _ in range(count):
            ready, told = os.pipe()
            self._ready.append(self._start(told))
            os.close(told)
            waiting.append(ready)
        until_s = time.perf_counter() + _IMPORT_TIMEOUT_S
        for ready in waiting:  # it can be read when the process has written there, or has ended
            select.select([ready], [], [], max(0.0, until_s - time.perf_counter()))
            os.close(ready)

    def _start(self, told: int | None = None) -> Member:
        """told: the file descriptor on which the process says that it has imported what it needs."""
        self._number += 1
        log = self._logs / f".worker-{os.getpid()}-{self._number}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *WORKER, *([] if told is None else [str(told)])], stdin=subprocess.PIPE,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                pass_fds=() if told is None else (told,),
            )  # fmt: skip
        return process, log

    @property
    def n_ready(self) -> int:
        return len(self._ready)

    @contextlib.contextmanager
    def carry_out(self, order: Mapping[str, Any], log: Path, *, processes: int = 1) -> Iterator[Group]:
        """Run `order` in this many processes, which are killed at the end of the block."""
        members = [self._ready.pop(0) if self._ready else self._start() for _ in range(processes)]
        members[0][1].replace(log)
        with launch.reserved_address() as meeting:
            ranks = _environments(processes, meeting) if processes > 1 else [{}]
            for (process, _), environment in zip(members, ranks, strict=True):
                with contextlib.suppress(BrokenPipeError):
                    assert process.stdin is not None
                    process.stdin.write(json.dumps({"order": order, "environment": environment}).encode() + b"\n")
                    process.stdin.flush()
            group = Group(members)
            try:
                yield group
            finally:
                group.end(log)

    def close(self) -> None:
        """End the processes that have no order yet."""
        while self._ready:
            process, log = self._ready.pop()
            _end(process)
            log.unlink(missing_ok=True)


def _environments(processes: int, meeting: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment variables that a launcher sets for each process of one machine."""
    size = str(processes)
    return [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **meeting}
        for rank in range(processes)
    ]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
