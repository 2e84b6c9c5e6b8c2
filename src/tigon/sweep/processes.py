"""The processes that points run in: started, given their order, ended with all their children.

Importing PyTorch and transformers takes longer than many a point. Where there is a GPU several processes are therefore
started at once, and wait when they have imported; each then carries out one point and ends. They import before the
first of them begins, so that nothing runs beside a measurement, and have touched no GPU by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tigon.sweep.folder import LOGS, SweepFolder

WORKER = ("-m", "tigon.sweep.worker")
AHEAD = 4
"""Processes that import at a time, where there is a GPU."""
_IMPORT_TIMEOUT_S = 120.0


class Workers:
    """The processes of a sweep. Each has a standard input that stays open as long as it should live: a killed sweep
    leaves none behind."""

    def __init__(self, folder: SweepFolder) -> None:
        self._folder = folder
        self._ready: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._number = 0

    def prepare(self, count: int) -> None:
        """Start `count` processes, and come back when all have imported what a point needs."""
        waiting = []
        for _ in range(count):
            self._number += 1
            log = self._folder.path / LOGS / f".worker-{os.getpid()}-{self._number}.log"
            sign = self._folder.path / LOGS / f".ready-{os.getpid()}-{self._number}"
            self._ready.append((_start((), {"TIGON_SWEEP_READY": str(sign)}, log), log))
            waiting.append((self._ready[-1][0], sign))
        until_s = time.perf_counter() + _IMPORT_TIMEOUT_S
        for process, sign in waiting:
            while not sign.exists() and process.poll() is None and time.perf_counter() < until_s:
                time.sleep(0.05)
            sign.unlink(missing_ok=True)

    @property
    def n_ready(self) -> int:
        return len(self._ready)

    @contextlib.contextmanager
    def carry_out(
        self, order: Mapping[str, Any], log: Path, *, processes: int = 1
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A process, or several under PyTorch's launcher, at work on `order`; ended when the block is left."""
        file = self._folder.scratch / "order.json"
        file.write_text(json.dumps(order), encoding="utf-8")
        if processes == 1 and self._ready:
            process, own_log = self._ready.pop(0)
            own_log.replace(log)
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write(f"{file}\n".encode())
                process.stdin.flush()
        else:
            environment = {}
            if processes > 1 and "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it to 1 with a warning
                environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
            launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
            process = _start((str(file),), environment, log, launcher=launcher if processes > 1 else ())
        try:
            yield process
        finally:
            _end(process)

    def close(self) -> None:
        """End what waits."""
        while self._ready:
            process, log = self._ready.pop()
            _end(process)
            log.unlink(missing_ok=True)


def _start(
    words: tuple[str, ...], environment: Mapping[str, str], log: Path, *, launcher: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    with log.open("wb") as said:
        return subprocess.Popen(
            [sys.executable, *launcher, *WORKER, *words], stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT,
            start_new_session=True, env={**os.environ, **environment},
        )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
