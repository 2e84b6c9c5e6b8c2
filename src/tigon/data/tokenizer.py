"""The tokenizer of a run: the checkpoint's, one from a folder, or a byte-level BPE trained on the data and cached.

The BPE has all 256 bytes in its vocabulary, so every text round-trips exactly.

A chat is tokenised as one text, so its tokens are those of transformers' `apply_chat_template(tokenize=True)`. A token
is learned if it holds a character that is learned. The segments of other documents are tokenised separately: no token
crosses the border between a prompt and its answer, because a completion is generated after the prompt's own tokens.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon._files import refuse_odd_files
from tigon.data import cache
from tigon.data.chat import row_notes
from tigon.data.chat.chat_template import Rendering, is_chat, segments_of, special_tokens, template_of
from tigon.data.chat.row_notes import Note
from tigon.data.documents import BadRows, Document, Segment
from tigon.errors import DataError, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT, PADDING = "<|end|>", "<|pad|>"
IGNORE_INDEX = -100
BATCH = 512
"""Documents that are tokenised in one call. Offsets take several times the memory of the tokens."""
CACHE_FORMAT = 1  # part of the cache key; increase it when train_bpe changes


@dataclass(frozen=True)
class Encoded:
    """One document as tokens. Labels equal the learned tokens and are IGNORE_INDEX elsewhere."""

    tokens: list[int]
    labels: list[int]
    origin: str
    is_text: bool
    notes: tuple[Note, ...] = ()
    """What the row has that its text does not teach."""


def train_bpe(texts: Iterable[str], vocab_size: int, cache_folder: Path | None = None) -> Any:
    """Train a byte-level BPE of at most `vocab_size` tokens, as a transformers tokenizer.

    texts: They are iterated over twice, so no iterator.
    cache_folder: The tokenizer is stored there under a hash of texts and size. With a damaged or unwritable cache it is
        trained again.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    digest = hashlib.sha256(f"{CACHE_FORMAT} {vocab_size} ".encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode("utf-8", errors="replace")).digest())

    def trained(folder: Path) -> Tokenizer:
        file, scratch = folder / "bpe.json", folder / f"bpe.{os.getpid()}"
        if file.exists():
            return Tokenizer.from_file(str(file))
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
        with contextlib.suppress(Exception):  # the Rust package raises bare Exceptions, of a full disk too
            tokenizer.save(str(scratch))
            scratch.replace(file)
        return tokenizer

    tokenizer, _ = cache.made(cache_folder, digest.hexdigest()[:32], trained)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PADDING, clean_up_tokenization_spaces=False
    )


def load_tokenizer(name: str, *, revision: str | None, trust_remote_code: bool) -> Any:
    """Load the tokenizer from a folder or a hub id. Raises RecipeError if it cannot be loaded."""
    from transformers import AutoTokenizer

    _check_files(Path(name))
    try:
        loaded = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # the Rust package raises bare Exceptions for a file that it cannot read
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(
            f"{name}: no tokenizer could be loaded ({reason}); set data.tokenizer to a folder with one"
        ) from None
    forget_loading(loaded)
    return loaded


def forget_loading(tokenizer: PreTrainedTokenizerBase) -> None:
    """Forget how this machine has loaded a tokenizer, so that no saved tokenizer_config.json says it.

    transformers 5.23 saves both arguments with the tokenizer's own settings. With `local_files_only` in the file of an
    uploaded model, another machine might not download its other files.
    """
    for name in ("local_files_only", "is_local"):
        tokenizer.init_kwargs.pop(name, None)


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
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int | None = None,
    bad: BadRows | None = None,
    rendering: Rendering | None = None,
) -> list[Encoded]:
    """Tokenise every document. The end-of-text token follows, and is learned, unless a chat ends by itself.

    Args:
        documents: The documents.
        tokenizer: A tokenizer of transformers.
        vocab_size: The model's vocabulary; ids beyond it are refused. None allows any id.
        bad: The policy for rows that cannot be used.
        rendering: How rows become text; None: with the tokenizer's chat template if it has one.
    """
    bad, rendering = bad or BadRows(), rendering or Rendering()
    documents, segments, notes = _worded(documents, tokenizer, bad, rendering)
    chats = [is_chat(document, tokenizer, rendering) for document in documents]
    start = [tokenizer.bos_token_id] if _adds_bos(tokenizer) else []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ending = Ending(tokenizer, frozenset([*end, *rendering.ends]))
    result = []
    for i, (tokens, labels) in enumerate(_ids(segments, chats, tokenizer)):
        document = documents[i]
        if not chats[i]:  # a chat template writes the first token itself
            tokens, labels = [*start, *tokens], [*[IGNORE_INDEX] * len(start), *labels]
            ends = tokens[-1:] == end
        elif rendering.learn == "all":
            ends = ending.ends(tokens)
        else:
            labels = ending.with_ends(tokens, labels)
            last = document.messages[-1]
            # After a turn that is not learned, an end would be learned that nobody wrote.
            ends = last.role != "assistant" or not last.learned or ending.ends(_learned(labels))
        if not ends:
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
            result.append(Encoded(tokens, labels, document.origin, document.is_text, notes[i]))
    return result


def _worded(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, bad: BadRows, rendering: Rendering
) -> tuple[list[Document], list[tuple[Segment, ...]], list[tuple[Note, ...]]]:
    """The documents that the chat template accepts, their segments, and what is to be said about them."""
    marks = special_tokens(tokenizer, marks_only=True)
    kept, segments, notes = [], [], []
    for document in documents:
        try:
            parts = segments_of(document, tokenizer, rendering)
        except DataError as error:
            bad.take(error)
            continue
        texts = [part.text for part in parts]
        if is_chat(document, tokenizer, rendering):
            template = template_of(document, tokenizer, rendering)
            notes.append(row_notes.of_chat(document, "".join(texts), template, marks))
        else:
            notes.append(row_notes.of_text(texts, marks))
        segments.append(parts)
        kept.append(document)
    return kept, segments, notes


# --- segments as tokens ----------------------------------------------------------------------------------------------


def _ids(
    segments: Sequence[tuple[Segment, ...]], chats: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens, labels) of every document."""
    adds_space = _adds_space(tokenizer)
    for first in range(0, len(segments), BATCH):
        batch = list(zip(segments[first : first + BATCH], chats[first : first + BATCH], strict=True))
        # A chat template writes special tokens as text. In other documents "<|end|>" is plain text.
        wholes = {
            chat: iter(_wholes([parts for parts, c in batch if c == chat and (c or adds_space)], chat, tokenizer))
            for chat in (True, False)
        }
        apart = [part.text for parts, chat in batch if not chat and not adds_space for part in parts]
        ids = iter(tokenizer(apart, add_special_tokens=False, split_special_tokens=True)["input_ids"] if apart else [])
        for parts, chat in batch:
            if chat or adds_space:
                yield next(wholes[chat])
                continue
            tokens: list[int] = []
            labels: list[int] = []
            for part, own in zip(parts, ids, strict=False):
                tokens += own
                labels += own if part.learned else [IGNORE_INDEX] * len(own)
            yield tokens, labels


def _wholes(
    documents: Sequence[tuple[Segment, ...]], chat: bool, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens and labels of documents whose segments are tokenised as one text."""
    if not documents:
        return
    texts = ["".join(part.text for part in parts) for parts in documents]
    is_fast = bool(getattr(tokenizer, "is_fast", False))
    options = {"add_special_tokens": False, "split_special_tokens": not chat}
    encoded = tokenizer(texts, **options, **({"return_offsets_mapping": True} if is_fast else {}))
    for i, parts in enumerate(documents):
        tokens = encoded["input_ids"][i]
        if is_fast:
            learned = _by_offsets(encoded["offset_mapping"][i], [part for part in parts if part.text])
        else:
            learned = _by_prefixes(tokens, parts, lambda text: tokenizer(text, **options)["input_ids"])
        yield tokens, [token if is_learned else IGNORE_INDEX for token, is_learned in zip(tokens, learned, strict=True)]


def _by_offsets(offsets: Sequence[tuple[int, int]], parts: Sequence[Segment]) -> list[bool]:
    """Whether each token holds a character of a learned segment.

    Args:
        offsets: The characters [begin, end) of each token. A token of a trimmed space has none of its own, and stands
            for the first character that no token before it has.
        parts: The segments of the text, none of them empty.
    """
    ends = list(itertools.accumulate(len(part.text) for part in parts))
    learned, done = [], 0
    for begin, end in offsets:
        if begin == end:
            begin, end = (done, done + 1) if done < end else (end, end + 1)
        done = max(done, end)
        first, last = (min(bisect.bisect_right(ends, at), len(parts) - 1) for at in (begin, end - 1))
        learned.append(any(part.learned for part in parts[first : last + 1]))
    return learned


def _by_prefixes(tokens: Sequence[int], parts: Sequence[Segment], encode: Callable[[str], Sequence[int]]) -> list[bool]:
    """As `_by_offsets`, for tokenizers that do not tell where their tokens are.

    The tokens that the text before a border has in common with the whole text are before the border. If the text before
    it has one more, a token of the whole text crosses the border.
    """
    learned = [False] * len(tokens)
    done, first = "", 0
    for part in parts:
        done += part.text
        before = encode(done)
        stop = next((i for i, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), len(before))
        crosses = stop < len(before)
        if part.learned:
            learned[first : stop + crosses] = [True] * len(learned[first : stop + crosses])
        first = stop
    return learned


class Ending:
    """Finds the ends of answers among tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> None:
        self.tokenizer, self.ids = tokenizer, ends
        self._blank: dict[int, bool] = {}

    def is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = not self.tokenizer.decode([token]).strip()
        return self._blank[token]

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens end with an end token. Templates often write a line break after it."""
        last = next((token for token in reversed(tokens) if not self.is_blank(token)), None)
        return last in self.ids or not self.ids

    def ends_text(self, text: str) -> bool:
        """Whether a text ends with an end token."""
        return text.rstrip().endswith(tuple(self.tokenizer.convert_ids_to_tokens(sorted(self.ids))))

    def with_ends(self, tokens: Sequence[int], labels: Sequence[int]) -> list[int]:
        """The labels with the end token after each learned stretch learned too.

        GLM ends an answer with the mark of the next turn, and some templates mark the answer without its end.
        """
        labels = list(labels)
        for i in range(1, len(tokens)):
            if labels[i] != IGNORE_INDEX or labels[i - 1] == IGNORE_INDEX or labels[i - 1] in self.ids:
                continue
            stop = i
            while stop < len(tokens) and tokens[stop] not in self.ids and self.is_blank(tokens[stop]):
                stop += 1
            if stop < len(tokens) and tokens[stop] in self.ids:
                labels[i : stop + 1] = tokens[i : stop + 1]
        return labels


def _learned(labels: Sequence[int]) -> list[int]:
    return [label for label in labels if label != IGNORE_INDEX]


def _adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a space before every text, as Llama 2's does. Only fast ones tell where tokens are."""
    if not getattr(tokenizer, "is_fast", False):
        return False
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(ids) and str(tokenizer.convert_ids_to_tokens(ids[0])).startswith("▁")


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
