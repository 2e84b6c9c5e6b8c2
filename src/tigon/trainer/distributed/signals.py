"""SIGTERM and SIGINT: the first asks for a checkpoint at the end of the step, the second ends the process at once.

After the last step the first still waits for what is being written (run.py says what is left out then).

A handler runs between two bytecodes, when the optimizer may be half done, so it only takes a note, which the trainer
reads at step boundaries. All processes read it there together: one of them that stops alone would leave the others
waiting. The second signal has its default effect, which needs no bytecode to be reached; and where the first has found
the main thread in a call that does not return, such as a collective whose other end is gone, so that no handler ran, a
thread ends the process. There is no limit of time: a backward pass may take minutes, and is such a call too. Only
before training, where there is nothing to save, and without a launcher (launch.py) the first signal is enough.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import distributed

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT") if hasattr(signal, name))
NOTING_S = 1  # for a handler that can run; it takes microseconds
EXIT_OFFSET = 128  # as shells have it: 130 after SIGINT, 143 after SIGTERM


class Stopped(Exception):
    """A run ended after a step because a signal came, with nothing half-written."""

    def __init__(self, number: int, step: int, kept: str, *, together: bool) -> None:
        """kept: what there is now. together: every process raises it."""
        super().__init__(f"stopped by {signal_name(number)} after step {step}; {kept}")
        self.exit_code, self.together = EXIT_OFFSET + number, together


class Terminated(KeyboardInterrupt):
    """SIGTERM where there is no step to wait for: it ends a run as Ctrl-C does."""


class _SignalListener:
    """Rung by the system's own handler of a signal, so also while the main thread is in a call that does not return."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        """heard: called in a thread of its own, with each of SIGNALS that comes."""
        listened, self._rung = socket.socketpair()
        self._rung.setblocking(False)
        self._before = signal.set_wakeup_fd(self._rung.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_listen, args=(listened, on_signal), daemon=True).start()

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        self._rung.close()


def _listen(listened: socket.socket, on_signal: Callable[[int], None]) -> None:
    with listened:
        while number := int.from_bytes(listened.recv(1), "big"):
            if number in SIGNALS:
                on_signal(number)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise Terminated for SIGTERM, so that what is open is closed and something is said; out of the block comes
    SystemExit.

    One of several processes that cannot raise, being in a call that does not return, ends all the same, on Ctrl-C too:
    the one that its collective waits for may have ended.
    """
    noted: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def heard(number: int) -> None:
        time.sleep(NOTING_S)
        if not noted and not _alone():
            say(f"{signal_name(number)}: ended in a call that does not return")
            os._exit(EXIT_OFFSET + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    bell = _SignalListener(heard)
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, interrupt)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Terminated:
        raise SystemExit(EXIT_OFFSET + signal.SIGTERM) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        bell.close()


class StopRequest:
    """From `listen` to the end of the block, a signal is a wish to stop. In another thread than the main one it does
    nothing."""

    def __init__(self, *, speaks: bool = True) -> None:
        """speaks: say on stderr that the wish was heard; one process of several does."""
        self.number = 0
        """The signal that came; 0: none."""
        self.promise = "saving at the end of this step"
        """What is said to follow it."""
        self._speaks = speaks
        self._before: dict[int, Any] = {}
        self._bell: _SignalListener | None = None
        self._rings = 0

    def __enter__(self) -> StopRequest:
        return self

    def listen(self) -> None:
        global _listening
        if threading.current_thread() is threading.main_thread():
            _listening = self
            self._bell = _SignalListener(self._heard)
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._bell is not None:
            self._bell.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def _heard(self, number: int) -> None:
        """In a thread: say that a signal came, and end the process with the second if it finds the first unnoted."""
        self._rings += 1
        if self._rings == 1 and self._speaks:
            say(f"{signal_name(number)}: {self.promise}; a second signal ends at once")
        elif self._rings > 1:
            time.sleep(NOTING_S)
            if not self.number:
                os._exit(EXIT_OFFSET + number)

    def signal_in_any_process(self) -> int:
        """The signal that any process has had, asked by all of them at once; 0: none."""
        if _alone():
            return self.number
        signal_number = torch.tensor([self.number])  # on the CPU, where nothing waits for a GPU
        distributed.all_reduce(signal_number, op=distributed.ReduceOp.MAX)
        number = int(signal_number)
        if number:  # else a signal that came in the meantime is for the next time: it must not be lost
            self.number = number
        return number


_listening: StopRequest | None = None


def is_ending() -> bool:
    """Whether this process has had a signal, or another has and told it, so that a further one would end it at once."""
    return _listening is not None and _listening.number != 0


def _alone() -> bool:
    return not distributed.is_initialized() or distributed.get_world_size() == 1


def say(text: str) -> None:
    """On stderr, not by print, which may be what was interrupted; whoever read it may be gone."""
    with suppress(OSError):
        os.write(2, f"\ntigon: {text}\n".encode())


def signal_name(number: int) -> str:
    return signal.Signals(number).name


def ignore_signals(worker: int) -> None:
    """For processes that prepare batches: a signal to the whole group is the training process's to answer."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_children() -> None:
    """Kill the processes that prepare batches: Python would wait at exit for one that hangs.

    PyTorch raises from its handler, wherever the program is, when one of them dies; not for these.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    signal.signal(signal.SIGCHLD, before)
