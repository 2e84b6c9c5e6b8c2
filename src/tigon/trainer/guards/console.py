"""The three standard streams of a command that runs for hours: none of them may end it.

A reader such as `head` goes away, a log fills its disk, a shell starts the command with a stream closed. What a run
prints is also in its folder, so the run goes on without the stream.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

STREAMS = {1: "stdout", 2: "stderr"}


def open_closed_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed.

    Otherwise the next file that is opened, perhaps a checkpoint, gets the stream's number, and what a library writes to
    stdout or stderr goes into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest free number, which is this one.
            found = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(found, True)
    for name in STREAMS.values():
        if getattr(sys, name) is None:  # print(file=None) would take stdout instead of stderr
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # as long as the process


@contextmanager
def survive_broken_streams() -> Iterator[None]:
    """Within the block, a write to stdout or stderr that fails is dropped, and the stream becomes /dev/null."""
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

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Give the stream's number to /dev/null: Python flushes what it still holds at exit, and libraries and
        processes that this one starts write there too."""
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._number)
            os.close(null)
        if self._number == 1:
            why = error.strerror or str(error)
            print(f"tigon: stdout: {why}; the command goes on, and prints nothing more", file=sys.stderr, flush=True)
