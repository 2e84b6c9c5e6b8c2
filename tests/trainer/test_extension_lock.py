"""The lock file of operators that DeepSpeed compiles: after a kill, and while a process or a compiler works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from forks import forks
from tigon.trainer.distributed import extension_lock

pytestmark = [forks, pytest.mark.skipif(sys.platform != "linux", reason="open files are read from /proc")]


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of an operator's lock file."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(extension_lock, "IDLE_S", 0)
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


@pytest.fixture
def holder(lock: Path) -> Iterator[int]:
    """The id of a process that compiles, as far as PyTorch's lock file shows."""
    from torch.utils.file_baton import FileBaton

    child = os.fork()
    if not child:
        baton = FileBaton(str(lock))
        baton.try_acquire()
        time.sleep(600)
        os._exit(0)
    while not lock.exists():
        time.sleep(0.01)
    yield child
    kill(child)


def kill(child: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def waiting() -> threading.Thread:
    thread = threading.Thread(target=extension_lock.wait_for_compilers, daemon=True)
    thread.start()
    return thread


def test_lock_of_a_killed_process_is_removed_and_said(holder, lock, capfd):
    kill(holder)
    assert lock.exists()
    extension_lock.wait_for_compilers()
    assert not lock.exists()
    assert capfd.readouterr().err.strip() == (
        f"tigon: {lock}: left by a process that was killed while it compiled; removed"
    )


def test_lock_of_a_living_process_is_waited_for_and_named(holder, lock, monkeypatch, capfd):
    monkeypatch.setattr(extension_lock, "SAY_AFTER_S", 0)
    thread, said = waiting(), ""
    while not said and thread.is_alive():
        said = capfd.readouterr().err.strip()
        time.sleep(0.01)
    assert said == f"tigon: waiting for {lock}: process {holder} compiles there; if no process compiles there, " + (
        "remove this file"
    )
    assert lock.exists()
    lock.unlink()  # as the process does when it has compiled
    thread.join(30)
    assert not thread.is_alive()


def test_compiler_that_outlived_its_killed_parent_is_waited_for(holder, lock):
    kill(holder)
    compiler = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=lock.parent)
    try:
        assert not extension_lock._is_stale(lock)
        assert f"process {compiler.pid} compiles there" in extension_lock._who(lock)
    finally:
        compiler.communicate()
    assert extension_lock._is_stale(lock)


def test_folder_that_an_unseen_process_changes_is_waited_for(holder, lock, monkeypatch):
    """It may be on another machine that shares the folder."""
    kill(holder)
    monkeypatch.setattr(extension_lock, "IDLE_S", 60)
    assert not extension_lock._is_stale(lock)
    for path in (lock, lock.parent):
        os.utime(path, (0, 0))
    assert extension_lock._is_stale(lock)
    (lock.parent / "cpu_adam.o").touch()
    assert not extension_lock._is_stale(lock)
