"""SIGTERM and SIGINT: the first saves a checkpoint at the end of the step, the second ends the process at once.

After the last step, the first signal lets the run finish the files that it is writing (see run.py).

A Python handler runs between two bytecodes, when an optimizer step may be half done. So the handler only stores the
signal, and the trainer reads it at the end of a step. All processes read it there together, because a process that
stops alone would leave the others waiting.

The second signal has its default effect, which needs no Python code. If the first signal arrived in a call that does
not return, such as a collective whose peer is gone, the handler could not run. Then a thread ends the process at the
second signal. There is no time limit, because a backward pass is such a call too and may take minutes.

The first signal alone ends the process in two cases: before training, when there is nothing to save, and after the
launcher has died (see launch.py).
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
HANDLER_GRACE_S = 1  # time for the handler to run, which takes microseconds if it can
EXIT_OFFSET = 128  # the shells' convention: 130 after SIGINT, 143 after SIGTERM


class Stopped(Exception):
    """A signal ended a run after a step. No file is half-written."""

    def __init__(self, number: int, step: int, kept: str, *, on_every_rank: bool) -> None:
        """Make the exception of a signal.

        Args:
            number: The signal.
            step: The last step.
            kept: The part of the message that says what was saved.
            on_every_rank: Whether every process raises it.
        """
        super().__init__(f"stopped by {signal_name(number)} after step {step}; {kept}")
        self.exit_code, self.on_every_rank = EXIT_OFFSET + number, on_every_rank


class Terminated(KeyboardInterrupt):
    """SIGTERM outside of training: it ends a run at once, as Ctrl-C does."""


class _SignalListener:
    """A thread that receives signals through set_wakeup_fd, also while the main thread is in a call that blocks."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        """Start the thread, which calls `on_signal` with the number of each of SIGNALS."""
        receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_listen, args=(receiver, on_signal), daemon=True).start()

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        self._sender.close()


def _listen(receiver: socket.socket, on_signal: Callable[[int], None]) -> None:
    with receiver:
        while number := int.from_bytes(receiver.recv(1), "big"):
            if number in SIGNALS:
                on_signal(number)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside the block, SIGTERM raises Terminated, so that files are closed and messages printed.

    If one of several processes is blocked in a call, a thread ends it on SIGTERM or Ctrl-C, because its peer may be
    gone.

    Raises:
        SystemExit: The block raised Terminated.
    """
    handled: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        handled.append(number)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def end_if_blocked(number: int) -> None:
        time.sleep(HANDLER_GRACE_S)
        if not handled and not _is_single_process():
            write_stderr(f"{signal_name(number)}: ended in a call that did not return")
            os._exit(EXIT_OFFSET + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listener = _SignalListener(end_if_blocked)
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
        listener.close()


class StopRequest:
    """Stores the first signal, from `listen` to the end of the block, so that the trainer can stop after a step.

    It has no effect outside of the main thread.
    """

    def __init__(self, *, confirms: bool = True) -> None:
        """confirms: Confirm the signal on stderr; only the main process does."""
        self.number = 0
        """The signal that came; 0: none."""
        self.confirmation = "saving at the end of this step"
        """The text of the confirmation."""
        self._confirms = confirms
        self._before: dict[int, Any] = {}
        self._listener: _SignalListener | None = None
        self._n_signals = 0

    def __enter__(self) -> StopRequest:
        return self

    def listen(self) -> None:
        global _last_request
        if threading.current_thread() is threading.main_thread():
            _last_request = self
            self._listener = _SignalListener(self._on_signal_in_thread)
            self._before = {number: signal.signal(number, self._handler) for number in SIGNALS}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._listener is not None:
            self._listener.close()

    def _handler(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def _on_signal_in_thread(self, number: int) -> None:
        """Confirm the first signal. End the process at the second if no handler could run."""
        self._n_signals += 1
        if self._n_signals == 1 and self._confirms:
            write_stderr(f"{signal_name(number)}: {self.confirmation}; a second signal ends the run at once")
        elif self._n_signals > 1:
            time.sleep(HANDLER_GRACE_S)
            if not self.number:
                os._exit(EXIT_OFFSET + number)

    def signal_in_any_process(self) -> int:
        """The signal that any process has received; 0: none. Every process has to call it at the same point."""
        if _is_single_process():
            return self.number
        signal_number = torch.tensor([self.number])  # on the CPU, so that the host does not wait for the GPU
        distributed.all_reduce(signal_number, op=distributed.ReduceOp.MAX)
        number = int(signal_number)
        if number:  # if no process has a signal, do not overwrite one that came during the all-reduce
            self.number = number
        return number


_last_request: StopRequest | None = None


def stop_requested() -> bool:
    """Whether this process knows of a signal, its own or another process's, so that a further one ends it at once."""
    return _last_request is not None and _last_request.number != 0


def _is_single_process() -> bool:
    return not distributed.is_initialized() or distributed.get_world_size() == 1


def write_stderr(text: str) -> None:
    """Write a line to stderr, by os.write, because print may be what the signal interrupted. Errors are ignored."""
    with suppress(OSError):
        os.write(2, f"\ntigon: {text}\n".encode())


def signal_name(number: int) -> str:
    return signal.Signals(number).name


def ignore_signals(worker: int) -> None:
    """Ignore signals in a data loader process. The training process responds to a signal to their process group."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_child_processes() -> None:
    """Kill all multiprocessing children, data loaders and others. At exit, Python would wait for one that hangs.

    PyTorch's SIGCHLD handler raises an error when one of them dies, so it is disabled meanwhile.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    signal.signal(signal.SIGCHLD, before)
