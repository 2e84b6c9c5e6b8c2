"""Traces, weights and answers of earlier plans, in files of the user's cache folder.

A file's name is the hash of everything that its content depends on: the question, tigon's own sources, and the versions
of Python and of the packages that a plan runs. After a change of these, old files are no longer used. The oldest ones
are deleted when the folder grows beyond `MAX_BYTES`. Each file is written under another name and then renamed, so a
reader never sees half of one. Two processes that write the same file write the same content.

Any file that cannot be read is traced again and rewritten. A folder that cannot be written is not an error. With
`TIGON_CACHE=0` nothing is read or written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tigon._files import open_regular

MAX_BYTES = 64 << 20
"""A plan writes 0.1 to 1 MB."""
_PACKAGES = ("torch", "transformers", "peft", "accelerate", "triton", "trl", "rich")


def folder() -> Path | None:
    """`$XDG_CACHE_HOME/tigon/plans`, else under ~/.cache; None if TIGON_CACHE is 0 or there is no home."""
    if os.environ.get("TIGON_CACHE") == "0":
        return None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tigon" / "plans"
    except RuntimeError:  # a user without a home
        return None


@functools.cache
def _versions() -> str:
    """The hash of tigon's sources, and the versions of Python and of the packages."""
    sources = hashlib.sha256()
    root = Path(__file__).parents[3]
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        sources.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    versions = {"python": platform.python_version(), "tigon": sources.hexdigest()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return json.dumps(versions)


def _file(kind: str, question: str) -> Path | None:
    where = folder()
    if where is None:
        return None
    name = hashlib.sha256(f"{kind}\n{_versions()}\n{question}".encode()).hexdigest()
    return where / f"{kind}-{name[:40]}"


def read(kind: str, question: str) -> Any:
    """The remembered answer, made of JSON's types; None if there is none, or if its file is damaged."""
    path = _file(kind, question)
    if path is None:
        return None
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES)
        stored: Mapping[str, Any] = json.loads(zlib.decompress(content))
        return stored["answer"] if stored["question"] == question else None
    except (OSError, ValueError, zlib.error, KeyError, TypeError):
        return None


def write(kind: str, question: str, answer: object) -> None:
    """Remember an answer that is made of JSON's types."""
    path = _file(kind, question)
    if path is None:
        return
    content = zlib.compress(json.dumps({"question": question, "answer": answer}).encode(), 1)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a full disk, or a home that is read-only
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            scratch.write_bytes(content)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        _limit(path.parent)


def _limit(where: Path) -> None:
    """Delete the oldest files beyond MAX_BYTES. Another process may delete them at the same time."""
    entries = []
    with os.scandir(where) as files:
        for entry in files:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                entries.append((status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= MAX_BYTES:
            return
        Path(path).unlink(missing_ok=True)
        total -= size
