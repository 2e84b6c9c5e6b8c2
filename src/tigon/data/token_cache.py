"""Tokenised documents in a cache, so that the next start with the same data does not tokenise them again.

A file's name is a hash of everything that the tokens depend on: the documents' text, the tokenizer, the chat template
and the options. Changed data has another name, so no file is ever out of date. A damaged file is made again.

The fingerprint cache of `datasets` is not used, because tigon reads local files without that package. Its keys also
hash pickled functions, so they differ between versions of Python for the same rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tigon.data.chat_template import Rendering
from tigon.data.documents import BadRows, Document
from tigon.data.tokenizer import IGNORE_INDEX, Encoded, encode
from tigon.errors import DataError

FORMAT = 2  # part of the key; increase it when `tokenizer.encode` or `chat_template` gives other tokens
MAX_CACHE_BYTES = 20 * 2**30
"""When the cache is larger, the files that were not used for longest are removed."""


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/tigon/tokens`, else under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tigon" / "tokens"


@dataclass
class TokenCache:
    """Tokenises documents, or reads their tokens from files in a folder."""

    folder: Path | None
    """None: always tokenise."""
    tokenizer: Any
    vocab_size: int | None
    bad: BadRows
    rendering: Rendering
    n_read: int = 0
    """How many documents' tokens came from the cache."""

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """As `tokenizer.encode`.

        Raises:
            DataError: A document cannot be used, and `bad` does not skip it.
        """
        path = self._path(documents)
        if path is not None and (stored := _read(path, documents, self.vocab_size)) is not None:
            encoded, problems = stored
            for problem in problems:
                self.bad.take(DataError(problem))
            self.n_read += len(encoded)
            return encoded
        n_before = len(self.bad.problems)
        encoded = encode(documents, self.tokenizer, vocab_size=self.vocab_size, bad=self.bad, rendering=self.rendering)
        if path is not None:
            _write(path, encoded, self.bad.problems[n_before:])
        return encoded

    def _path(self, documents: Sequence[Document]) -> Path | None:
        """The file for these documents. None without a cache, or if the tokenizer cannot be written as text."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if self.folder is None or backend is None or not documents:
            return None
        template = str(self.tokenizer.chat_template)
        parts: Iterator[Any] = itertools.chain(
            (
                FORMAT, importlib.metadata.version("tokenizers"), importlib.metadata.version("transformers"),
                type(self.tokenizer).__name__, backend.to_str(), self.tokenizer.special_tokens_map, template,
                # Llama 3's template writes the date into a chat.
                time.strftime("%Y-%m-%d") if "strftime_now" in template else "", self.rendering, self.vocab_size,
                self.bad.policy,
            ),
            (
                (each.origin, each.segments, each.messages, each.tools, each.format, each.as_chat, each.is_text)
                for each in documents
            ),
        )  # fmt: skip
        digest = hashlib.sha256()
        for part in parts:
            text = repr(part).encode("utf-8", errors="surrogatepass")
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
        return self.folder / f"{digest.hexdigest()[:32]}.safetensors"


def _read(path: Path, documents: Sequence[Document], vocab_size: int | None) -> tuple[list[Encoded], list[str]] | None:
    """(the documents' tokens, the problems of documents that were left out); None if there is no intact file.

    The hash in the file shows accidents. The file is also compared with the documents: it must have the tokens of each,
    or the reason why it was left out, and no token beyond the vocabulary.
    """
    from safetensors import safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors, digest = {name: file.get_tensor(name) for name in _NAMES}, file.metadata()["sha256"]
        if _digest(tensors) != digest:
            return None
        origins, problems, notes = json.loads(bytes(tensors["texts"].tolist()))
        notes = [tuple((kind, what) for kind, what in of) for of in notes]
        tokens = tensors["tokens"].tolist()
        labels = torch.where(tensors["learned"].bool(), tensors["tokens"], IGNORE_INDEX).tolist()
        lengths = tensors["lengths"].tolist()
        if min(lengths, default=0) < 0 or sum(lengths) != len(tokens) or min(tokens, default=0) < 0:
            return None
        if vocab_size is not None and max(tokens, default=0) >= vocab_size:
            return None
        if len(origins) + len(problems) != len(documents) or not _is_part(origins, [each.origin for each in documents]):
            return None
        ends = list(itertools.accumulate(lengths))
        spans = zip([0, *ends][: len(ends)], ends, origins, tensors["is_text"].bool().tolist(), notes, strict=True)
        encoded = [Encoded(tokens[a:b], labels[a:b], origin, is_text, of) for a, b, origin, is_text, of in spans]
        with contextlib.suppress(OSError):  # a cache that may only be read
            os.utime(path)
    except Exception:  # whatever a damaged file raises; the documents are then tokenised and the file made again
        return None
    return encoded, problems


def _is_part(some: Sequence[str], of: Sequence[str]) -> bool:
    """Whether `some` are of `of`, in the same order."""
    rest = iter(of)
    return all(origin in rest for origin in some)


def _write(path: Path, encoded: Sequence[Encoded], problems: Sequence[str]) -> None:
    from safetensors.torch import save_file

    texts = json.dumps([[each.origin for each in encoded], list(problems), [each.notes for each in encoded]]).encode()
    tokens = torch.tensor([token for each in encoded for token in each.tokens], dtype=torch.int32)
    labels = torch.tensor([label for each in encoded for label in each.labels], dtype=torch.int32)
    tensors = {
        "tokens": tokens,
        "learned": (labels != IGNORE_INDEX).to(torch.uint8),
        "lengths": torch.tensor([len(each.tokens) for each in encoded], dtype=torch.int64),
        "is_text": torch.tensor([each.is_text for each in encoded], dtype=torch.uint8),
        "texts": torch.frombuffer(bytearray(texts), dtype=torch.uint8),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = path.with_suffix(f".{os.getpid()}")
        try:
            save_file(tensors, scratch, {"sha256": _digest(tensors)})
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        _prune(path.parent)
    except Exception:  # a read-only home or a full disk: the next run tokenises again
        return


_NAMES = ("tokens", "learned", "lengths", "is_text", "texts")


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in _NAMES:
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def _prune(folder: Path) -> None:
    files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("*.safetensors"))
    total_bytes = sum(size_bytes for _, size_bytes, _ in files)
    for _, size_bytes, path in files[:-1]:
        if total_bytes <= MAX_CACHE_BYTES:
            return
        path.unlink(missing_ok=True)
        total_bytes -= size_bytes
