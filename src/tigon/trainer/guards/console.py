"""Keeps a run alive when stdin, stdout or stderr is closed or cannot be written.

That happens when a reader such as `head` exits, when a log fills its disk, or when a shell starts the command with a
closed stream. The run continues without the stream, because its folder has all that it prints.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

STREAMS = {1: "stdout", 2: "stderr"}


def open_closed_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed.

    Otherwise the next file that is opened, perhaps a checkpoint, gets the descriptor number of the stream. A library's
    output to stdout or stderr would then go into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The system assigns the lowest free descriptor, which is `number`.
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # open until the process ends
    for name in STREAMS.values():
        if getattr(sys, name) is None:  # print(file=None) would write to stdout instead of stderr
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open until the process ends


def make_console(**options: Any) -> Console:
    """A console of rich on stdout that raises BrokenPipeError when the reader exits. rich would end with code 1.

    options: Those of `rich.console.Console`.
    """
    from rich.console import Console

    class Raising(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return Raising(highlight=False, **options)


@contextmanager
def survive_broken_streams() -> Iterator[None]:
    """Inside the block, a failed write to stdout or stderr is dropped, and the stream becomes /dev/null."""
    before = {name: getattr(sys, name) for name in STREAMS.values()}
    for number, name in STREAMS.items():
        setattr(sys, name, _SurvivingStream(before[name], number))
    try:
        yield
    finally:
        for name in STREAMS.values():
            with suppress(OSError):
                getattr(sys, name).flush()
        for name, stream in before.items():
            setattr(sys, name, stream)


def drop(number: int) -> None:
    """Redirect a descriptor to /dev/null, so that what a stream still holds can be flushed at exit."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


class _SurvivingStream:
    """A text stream whose writes never fail."""

    def __init__(self, stream: TextIO, number: int) -> None:
        self._stream, self._number = stream, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Redirect the stream's descriptor to /dev/null.

        Libraries and child processes write to the same descriptor, and Python flushes its buffer to it at exit.
        """
        drop(self._number)
        if self._number == 1:
            why = error.strerror or str(error)
            print(f"tigon: stdout: {why}; the command continues without output", file=sys.stderr, flush=True)
