"""The lock file of operators that DeepSpeed compiles, after a kill, between processes, and of other programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from forks import forks
from tigon.trainer.distributed import extension_lock
from tigon.trainer.distributed.extension_lock import ExtensionLock

pytest.importorskip("fcntl")
pytestmark = forks


@pytest.fixture
def holder(tmp_path):
    """The id of a process that compiles, as far as its lock file shows."""
    child = os.fork()
    if not child:
        ExtensionLock(str(tmp_path / "lock")).try_acquire()
        (tmp_path / "held").touch()
        time.sleep(600)
        os._exit(0)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    yield child
    kill(child)


def kill(child: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def acquired(path: Path) -> threading.Thread:
    """A thread that gets the lock when it can, and releases it."""

    def run() -> None:
        lock = ExtensionLock(str(path), wait_seconds=0.01)
        assert lock.try_acquire()
        lock.release()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_lock_of_a_killed_process_is_removed_and_said(holder, tmp_path, capfd):
    path = tmp_path / "lock"
    kill(holder)
    assert path.exists()
    thread = acquired(path)
    thread.join(30)
    assert not thread.is_alive() and not path.exists()
    said = capfd.readouterr().err.strip()
    assert said == f"tigon: {path}: left by a process that was killed while it compiled; removed"


def test_lock_of_a_living_process_is_waited_for(holder, tmp_path):
    lock = ExtensionLock(str(tmp_path / "lock"))
    assert not lock._make() and not lock._remove_stale()
    assert (tmp_path / "lock").exists()


def test_compiler_that_outlived_its_killed_parent_is_waited_for(holder, tmp_path):
    kill(holder)
    lock = ExtensionLock(str(tmp_path / "lock"))
    compiler = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=tmp_path)
    try:
        if not Path("/proc/self/cwd").exists():
            pytest.skip("no /proc here")
        assert not lock._remove_stale()
        assert f"process {compiler.pid} compiles there" in lock._waiting()
    finally:
        compiler.communicate()
    assert lock._remove_stale()


def test_lock_of_another_program_is_left_and_named(tmp_path, monkeypatch, capfd):
    from torch.utils.file_baton import FileBaton

    path = tmp_path / "lock"
    theirs = FileBaton(str(path))
    assert theirs.try_acquire()
    monkeypatch.setattr(extension_lock, "SAY_AFTER_S", 0)
    thread = acquired(path)
    said = ""
    while not said and thread.is_alive():
        said = capfd.readouterr().err.strip()
        time.sleep(0.01)
    assert said.startswith(f"tigon: waiting for {path}: another process compiles there or was killed")
    assert path.exists()
    theirs.release()
    thread.join(30)
    assert not thread.is_alive() and not path.exists()


def test_one_at_a_time_has_the_lock(tmp_path):
    path, inside, most = tmp_path / "lock", [], []

    def run() -> None:
        for _ in range(20):
            lock = ExtensionLock(str(path), wait_seconds=0.001)
            lock.try_acquire()
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            lock.release()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 60 and max(most) == 1 and not path.exists()


def test_lock_file_that_its_owner_has_not_locked_yet_is_not_stale(tmp_path):
    path = tmp_path / "lock"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, extension_lock.OURS))
    assert not ExtensionLock(str(path))._remove_stale()
    os.utime(path, (0, 0))
    assert ExtensionLock(str(path))._remove_stale()


def test_release_leaves_a_lock_that_another_process_has_made_meanwhile(tmp_path):
    path = tmp_path / "lock"
    first = ExtensionLock(str(path))
    assert first.try_acquire()
    path.unlink()  # by a user, who follows the advice that a waiting process prints
    second = ExtensionLock(str(path))
    assert second.try_acquire()
    first.release()
    assert path.exists()
    second.release()
    assert not path.exists()


def test_pytorch_compiles_with_this_lock_once_it_is_taken_over(monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "FileBaton", cpp_extension.FileBaton)
    extension_lock.install()
    assert cpp_extension.FileBaton is ExtensionLock
    assert "FileBaton(" in Path(cpp_extension.__file__).read_text(encoding="utf-8")
