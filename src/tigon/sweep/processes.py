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

    def __init__(
        self, logs: Path, *, worker: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        """worker: Python's arguments for a process; None: WORKER. environment: its variables besides this process's."""
        self._logs, self._worker = logs, WORKER if worker is None else worker
        self._environment = {**os.environ, **(environment or {})}
        self._ready: list[Member] = []
        self._number = 0

    def prepare(self, count: int) -> None:
        """Start `count` processes, and return when all have imported what a point needs, or have ended."""
        pipes = [os.pipe() for _ in range(count)]
        for _, told in pipes:
            self._ready.append(self._start(told))
            os.close(told)
        until_s = time.perf_counter() + _IMPORT_TIMEOUT_S
        for ready, _ in pipes:
            select.select([ready], [], [], max(0.0, until_s - time.perf_counter()))
            os.close(ready)

    def _start(self, told: int) -> Member:
        """told: the file descriptor on which the process says that it has imported what it needs."""
        self._number += 1
        log = self._logs / f".worker-{os.getpid()}-{self._number}.log"
        command = [sys.executable, *self._worker, str(told)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(told,),
                env=self._environment,
            )
        return process, log

    @property
    def n_ready(self) -> int:
        return len(self._ready)

    @contextlib.contextmanager
    def carry_out(self, order: Mapping[str, Any], log: Path, *, processes: int = 1) -> Iterator[Group]:
        """Run `order` in this many processes, which are killed at the end of the block."""
        if (missing := processes - self.n_ready) > 0:
            self.prepare(missing)
        members, self._ready = self._ready[:processes], self._ready[processes:]
        members[0][1].replace(log)
        size = str(processes)
        with launch.reserved_address() as meeting:
            group = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **meeting} if processes > 1 else {}
            for rank, (process, _) in enumerate(members):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **group} if group else {}
                with contextlib.suppress(BrokenPipeError):
                    assert process.stdin is not None
                    process.stdin.write(json.dumps({"order": order, "environment": own}).encode() + b"\n")
                    process.stdin.flush()
            try:
                yield (running := Group(members))
            finally:
                running.end(log)

    def close(self) -> None:
        """End the processes that have no order yet."""
        while self._ready:
            process, log = self._ready.pop()
            _end(process)
            log.unlink(missing_ok=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
