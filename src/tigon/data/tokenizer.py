"""The tokenizer of a run: the checkpoint's, one from a folder, or a byte-level BPE trained on the data and cached.

The BPE has all 256 bytes in its vocabulary, so every text round-trips exactly. The segments of a document are tokenised
separately. No token then crosses the border between a prompt and its answer, which makes the loss mask exact.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon._files import refuse_special
from tigon.data.documents import BadRows, Document, Segment
from tigon.errors import DataError, RecipeError

END_OF_TEXT, PADDING = "<|end|>", "<|pad|>"
IGNORE_INDEX = -100
CACHE_FORMAT = 1  # part of the cache key; increase it when train_bpe changes


@dataclass(frozen=True)
class Encoded:
    """One document as tokens. Labels equal the learned tokens and are IGNORE_INDEX elsewhere."""

    tokens: list[int]
    labels: list[int]
    origin: str
    is_text: bool


def train_bpe(texts: Sequence[str], vocab_size: int, cache_folder: Path | None = None) -> Any:
    """Train a byte-level BPE of at most `vocab_size` tokens, as a transformers tokenizer.

    cache_folder: stores it under a hash of texts and size. With a damaged or unwritable cache it is trained again.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    digest = hashlib.sha256(f"{CACHE_FORMAT} {vocab_size} ".encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode("utf-8", errors="replace")).digest())
    cached = cache_folder / f"bpe-{digest.hexdigest()[:24]}.json" if cache_folder else None
    tokenizer = _read_cache(cached)
    if tokenizer is None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT, PADDING],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        _write_cache(cached, tokenizer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PADDING, clean_up_tokenization_spaces=False
    )


def default_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/tigon/tokenizers`, else under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tigon" / "tokenizers"


def load_tokenizer(name: str, *, revision: str | None, trust_remote_code: bool) -> Any:
    """Load the tokenizer from a folder or a hub id. Raises RecipeError if it cannot be loaded."""
    from transformers import AutoTokenizer

    _check_files(Path(name))
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # the Rust package raises bare Exceptions for a file that it cannot read
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(
            f"{name}: no tokenizer could be loaded ({reason}); set data.tokenizer to a folder with one"
        ) from None


def _check_files(folder: Path) -> None:
    """Raise RecipeError for a path that is not a folder, or a folder with special files.

    transformers would wait for special files, or read them without end.
    """
    if not folder.exists():  # a hub id
        return
    fix = "set data.tokenizer to a folder with a tokenizer"
    if not folder.is_dir():
        raise RecipeError(f"{folder}: a tokenizer is a folder, and this is not a folder; {fix}")
    try:
        for path in sorted(folder.iterdir()):
            if path.exists() and not path.is_dir():
                refuse_special(path)
    except OSError as error:
        raise RecipeError(f"{error.filename}: cannot be read as part of a tokenizer: {error.strerror}; {fix}") from None


def encode(
    documents: Sequence[Document], tokenizer: Any, *, vocab_size: int | None = None, bad: BadRows | None = None
) -> list[Encoded]:
    """Tokenise every document and append the end-of-text token, which is learned.

    vocab_size: the model's vocabulary; ids beyond it are refused. None allows any id.
    """
    bad = bad or BadRows()
    documents, segments = _worded(documents, tokenizer, bad)
    # A chat template writes special tokens as text. In other documents "<|end|>" is plain text.
    encoded: dict[bool, list[list[int]]] = {}
    for chat in (False, True):
        same = (parts for d, parts in zip(documents, segments, strict=True) if bool(d.messages) == chat)
        texts = [segment.text for parts in same for segment in parts]
        options = {"add_special_tokens": False, "split_special_tokens": not chat}
        encoded[chat] = tokenizer(texts, **options)["input_ids"] if texts else []
    streams = {chat: iter(ids) for chat, ids in encoded.items()}
    start = [tokenizer.bos_token_id] if _adds_bos(tokenizer) else []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    result = []
    for document, parts in zip(documents, segments, strict=True):
        chat = bool(document.messages)
        tokens, labels = ([], []) if chat else (list(start), [IGNORE_INDEX] * len(start))
        for part in parts:
            ids = next(streams[chat])
            tokens += ids
            labels += ids if part.learned else [IGNORE_INDEX] * len(ids)
        if tokens[-1:] != end:
            tokens += end
            labels += end
        if vocab_size is not None and (largest := max(tokens, default=0)) >= vocab_size:
            bad.take(
                DataError(
                    f"{document.origin}: the tokenizer gives id {largest}, but the model's vocabulary has "
                    f"{vocab_size}; use the model's own tokenizer"
                )
            )
        else:
            result.append(Encoded(tokens, labels, document.origin, document.is_text))
    return result


def _worded(
    documents: Sequence[Document], tokenizer: Any, bad: BadRows
) -> tuple[list[Document], list[tuple[Segment, ...]]]:
    """The documents that the chat template accepts, and their segments."""
    kept, segments = [], []
    for document in documents:
        try:
            segments.append(document.segments or chat_segments(document, tokenizer))
            kept.append(document)
        except DataError as error:
            bad.take(error)
    return kept, segments


def chat_segments(document: Document, tokenizer: Any) -> tuple[Segment, ...]:
    """Render messages with the tokenizer's chat template, or with a plain one if it has none.

    Only the assistant's turns are learned, with the template's closing mark. Headers and other turns are only read.
    """
    messages = [{"role": m.role, "content": m.content} for m in document.messages]

    def render(count: int, opened: bool) -> str:
        if getattr(tokenizer, "chat_template", None):
            if count == 0 and not opened:
                return ""
            return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=opened))
        turns = "".join(f"### {m['role'].capitalize()}:\n{m['content']}\n\n" for m in messages[:count])
        return turns + ("### Assistant:\n" if opened else "")

    segments: list[Segment] = []
    done = ""
    for i, message in enumerate(messages):
        try:
            before = render(i, True) if message["role"] == "assistant" else done
            after = render(i + 1, False)
        except Exception as error:  # templates report violations of their rules as jinja errors
            raise DataError(f"{document.origin}: the chat template refuses message {i}: {error}") from None
        if not (before.startswith(done) and after.startswith(before)):
            raise DataError(
                f"{document.origin}: the chat template rewrites earlier turns at message {i}, so the prompt cannot be "
                "masked; give prompt and completion instead"
            )
        if message["role"] == "assistant":
            segments += [Segment(before[len(done) :], False), Segment(after[len(before) :], True)]
        else:
            segments.append(Segment(after[len(done) :], False))
        done = after
    return tuple(segments)


def _adds_bos(tokenizer: Any) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def _read_cache(path: Path | None) -> Any:
    from tokenizers import Tokenizer

    if path is None or not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises bare Exceptions for a damaged file; the BPE is then trained again
        return None


def _write_cache(path: Path | None, tokenizer: Any) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = path.with_suffix(f".{os.getpid()}")
        tokenizer.save(str(scratch))
        scratch.replace(path)
    except Exception:  # a read-only home: the next run trains again
        return
