"""Opens files that a user names, but only regular files on a disk.

Reading a FIFO waits forever for a writer, `/dev/zero` never ends, and some files under `/proc` and `/sys` block. A
refused path raises an OSError whose `strerror` names the kind of file, so callers handle it like any other OSError.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_TEXT_BYTES = 2**28  # records and configs; the largest results.json of a sweep here has 4 MB
TEMPLATES = "additional_chat_templates"  # transformers reads every template in this folder of a tokenizer
_TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_KERNEL_FOLDERS = ("proc", "sys")
_SPECIAL = (
    (stat.S_ISDIR, "a folder, not a file"),
    (
        stat.S_ISFIFO,
        "a named pipe or the output of another command (`<(...)`), which can be read only once; write it to a file "
        "and name that file",
    ),
    (stat.S_ISCHR, "a character device, not a file"),
    (stat.S_ISBLK, "a block device, not a file"),
    (stat.S_ISSOCK, "a socket, not a file"),
)


def is_of_kernel(path: Path) -> bool:
    """Whether `path` leads into /proc or /sys, whose files the kernel generates on reading."""
    return os.path.realpath(path).split(os.sep)[1:2] in [[name] for name in _KERNEL_FOLDERS]


def open_regular(path: Path) -> BinaryIO:
    """Open the regular file `path` for reading. Raises OSError at once for any other kind of file."""
    refuse_special(path)  # before the open, which has effects on some devices
    handle = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb")
    try:
        _refuse(path, os.fstat(handle.fileno()))  # the path may name something else by now
    except OSError:
        handle.close()
        raise
    return handle


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The UTF-8 text of the regular file `path`.

    Raises:
        OSError: The path cannot be read, is not a regular file, or has more than `max_bytes` bytes.
        UnicodeDecodeError: The text is not UTF-8.
    """
    with open_regular(path) as handle:
        content = handle.read(max_bytes + 1)
    if len(content) > max_bytes:
        size_bytes = os.stat(path).st_size
        raise OSError(errno.EFBIG, f"{size_bytes} bytes is over the limit of {max_bytes} bytes", str(path))
    return content.decode("utf-8")


def refuse_odd_files(folder: Path) -> None:
    """Raise OSError for a file that transformers must not open when it reads a model or a tokenizer from `folder`.

    It would wait for a pipe, and read a device or a text file of many gigabytes into memory.
    """
    for path in (*sorted(folder.iterdir()), *sorted((folder / TEMPLATES).glob("*"))):
        if not path.exists() or path.is_dir():
            continue
        refuse_special(path)
        size_bytes = path.stat().st_size
        if path.suffix in _TEXT_SUFFIXES and size_bytes > MAX_TEXT_BYTES:
            raise OSError(errno.EFBIG, f"{size_bytes} bytes is over the limit of {MAX_TEXT_BYTES} bytes", str(path))


def refuse_special(path: Path) -> None:
    """Raise OSError unless `path` names a regular file."""
    _refuse(path, os.stat(path))


def _refuse(path: Path, status: os.stat_result) -> None:
    for is_special, words in _SPECIAL:
        if is_special(status.st_mode):
            raise OSError(errno.EINVAL, words, str(path))
    if is_of_kernel(path):
        raise OSError(errno.EINVAL, "a file that the kernel generates; copy its content to a file on a disk", str(path))
