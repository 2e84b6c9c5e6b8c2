"""The tokenizer of a run: the checkpoint's, one from a folder, or a byte-level BPE trained on the data and cached.

The BPE has all 256 bytes in its vocabulary, so every text round-trips exactly. The segments of a document are tokenised
separately. No token then crosses the border between a prompt and its answer, which makes the loss mask exact.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon._files import refuse_odd_files
from tigon.data.chat_template import Rendering, is_chat, segments_of
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
    """Raise RecipeError for a path that is not a folder, or a folder with files that transformers must not open."""
    if not folder.exists():  # a hub id
        return
    fix = "set data.tokenizer to a folder with a tokenizer"
    if not folder.is_dir():
        raise RecipeError(f"{folder}: a tokenizer is a folder, and this is not a folder; {fix}")
    try:
        refuse_odd_files(folder)
    except OSError as error:
        raise RecipeError(f"{error.filename}: cannot be read as part of a tokenizer: {error.strerror}; {fix}") from None


def encode(
    documents: Sequence[Document], tokenizer: Any, *, vocab_size: int | None = None, bad: BadRows | None = None,
    rendering: Rendering | None = None,
) -> list[Encoded]:  # fmt: skip
    """Tokenise every document and append the end-of-text token, which is learned.

    Args:
        documents: The documents.
        tokenizer: A tokenizer of transformers.
        vocab_size: The model's vocabulary; ids beyond it are refused. None allows any id.
        bad: The policy for rows that cannot be used.
        rendering: How rows become text; None: with the tokenizer's chat template if it has one.
    """
    bad, rendering = bad or BadRows(), rendering or Rendering()
    documents, segments = _worded(documents, tokenizer, bad, rendering)
    chats = [is_chat(document, tokenizer, rendering) for document in documents]
    ids = _ids(segments, chats, tokenizer)
    start = [tokenizer.bos_token_id] if _adds_bos(tokenizer) else []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    result = []
    for document, chat, (tokens, labels) in zip(documents, chats, ids, strict=True):
        if not chat:  # a chat template writes the first token itself
            tokens, labels = [*start, *tokens], [*[IGNORE_INDEX] * len(start), *labels]
        if not (_has_ended(tokens, tokenizer) if chat else tokens[-1:] == end):
            tokens, labels = [*tokens, *end], [*labels, *end]
        if rendering.learn == "all":
            labels = tokens
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
    documents: Sequence[Document], tokenizer: Any, bad: BadRows, rendering: Rendering
) -> tuple[list[Document], list[tuple[Segment, ...]]]:
    """The documents that the chat template accepts, and their segments."""
    kept, segments = [], []
    for document in documents:
        try:
            segments.append(segments_of(document, tokenizer, rendering))
            kept.append(document)
        except DataError as error:
            bad.take(error)
    return kept, segments


def _ids(
    segments: Sequence[tuple[Segment, ...]], chats: Sequence[bool], tokenizer: Any
) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens, labels) of every document. Segments are tokenised separately, so no token crosses their border."""
    # A chat template writes special tokens as text. In other documents "<|end|>" is plain text.
    encoded: dict[bool, Iterator[list[int]]] = {}
    whole = _adds_space(tokenizer)
    for chat in (False, True):
        same = [parts for parts, of_chat in zip(segments, chats, strict=True) if of_chat == chat]
        texts = [segment.text for parts in same for segment in parts if not (whole and len(parts) > 1)]
        options = {"add_special_tokens": False, "split_special_tokens": not chat}
        encoded[chat] = iter(tokenizer(texts, **options)["input_ids"] if texts else [])
    for parts, chat in zip(segments, chats, strict=True):
        if whole and len(parts) > 1:
            yield _ids_of_whole(parts, chat, tokenizer)
            continue
        tokens: list[int] = []
        labels: list[int] = []
        for part in parts:
            ids = next(encoded[chat])
            tokens += ids
            labels += ids if part.learned else [IGNORE_INDEX] * len(ids)
        yield tokens, labels


def _ids_of_whole(parts: Sequence[Segment], chat: bool, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens and labels of the joined segments, for tokenizers that put a space before each text.

    A token is learned if its last character is. Only there may a token cross the border of two segments.
    """
    encoded = tokenizer(
        "".join(part.text for part in parts), add_special_tokens=False, split_special_tokens=not chat,
        return_offsets_mapping=True,
    )  # fmt: skip
    ends = list(itertools.accumulate(len(part.text) for part in parts))
    labels = []
    for token, (begin, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        part = parts[min(bisect.bisect_right(ends, max(begin, end - 1)), len(parts) - 1)]
        labels.append(token if part.learned else IGNORE_INDEX)
    return encoded["input_ids"], labels


def _adds_space(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a space before every text, as Llama 2's does. Only fast ones tell where tokens are."""
    if not getattr(tokenizer, "is_fast", False):
        return False
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(ids) and str(tokenizer.convert_ids_to_tokens(ids[0])).startswith("▁")


def _has_ended(tokens: Sequence[int], tokenizer: Any) -> bool:
    """Whether a chat's text ends with the end-of-text token. Templates often write a line break after it."""
    if tokenizer.eos_token_id is None or tokenizer.eos_token_id not in tokens:
        return tokenizer.eos_token_id is None
    last = len(tokens) - 1 - list(reversed(tokens)).index(tokenizer.eos_token_id)
    return not tokenizer.decode(list(tokens[last + 1 :])).strip()


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
