"""Reads text and JSONL files as documents, each with the file and line it came from.

A document is a list of segments. A segment is either learned (its tokens count in the loss) or only read (a prompt).
Plain text is one learned segment. `LAYOUTS` lists the layouts of JSONL rows, with the keys that each needs and how the
row becomes segments. Chat messages stay messages here, because the tokenizer's chat template turns them into text.
"""

from __future__ import annotations

import io
import json
import math
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tigon._files import open_regular
from tigon.data import sources as named
from tigon.data.sources import BUILT_IN, TOY_ANSWERS, unreadable
from tigon.errors import DataError

MAX_ROW_BYTES = 2**28  # a row is one document; a longer line is not JSONL, or is text for a .txt file
ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant",
         "tool": "tool", "observation": "tool", "function_call": "assistant"}  # fmt: skip


@dataclass(frozen=True)
class Segment:
    """A stretch of text; `learned` says whether its tokens count in the loss."""

    text: str
    learned: bool


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Document:
    """Segments of text, or messages for the chat template. `origin` is `file` or `file:line`."""

    origin: str
    segments: tuple[Segment, ...] = ()
    messages: tuple[Message, ...] = ()
    at_least_bytes: int = 0
    """Bytes of text in a file that was not read because it is over the limit; 0 for a document that was read."""
    row: Mapping[str, Any] | None = None
    """The row of a data set for post-training, with the columns that its trainer takes."""
    texts: tuple[Document, ...] = ()
    """The texts of such a row, for example the prompt with either answer."""

    @property
    def is_text(self) -> bool:
        """Whether this is plain text, which may be cut anywhere. A prompt and its answer may not be cut."""
        return self.row is None and not self.messages and all(segment.learned for segment in self.segments)

    @property
    def text(self) -> str:
        """All text of the document, for counting and for training a tokenizer."""
        own = [s.text for s in self.segments] + [m.content for m in self.messages]
        return "".join([*own, *(text.text for text in self.texts)])


class RowReader(Protocol):
    """Reads the rows of a data set that is not text to continue."""

    def read(self, row: dict[str, Any], where: str) -> Document:
        """The document of a row. Raises DataError, with `where` in front, if the row cannot be used."""
        ...

    def toy_answers(self) -> Iterator[Document]:
        """The rows of the built-in data set in this format."""
        ...


@dataclass
class BadRows:
    """The policy for unusable rows: end the run, or skip and count them."""

    policy: str = "error"
    """The value of `data.bad_rows`."""
    problems: list[str] = field(default_factory=list)
    """One message per row left out, with its file and line."""

    def take(self, error: DataError) -> None:
        """Raise `error`, or count it if the policy is to skip rows."""
        if self.policy == "error":
            raise error
        self.problems.append(str(error))


def read(
    sources: Sequence[str], layout: str | RowReader, max_text_mib: float | None, bad: BadRows | None = None,
    key: str = "data.source",
) -> list[Document]:  # fmt: skip
    """Read the documents of `sources` in order, up to `max_text_mib` of text.

    Args:
        sources: Files, folders, or `python-docs`.
        layout: The value of `data.format`, or the reader of rows for post-training.
        max_text_mib: The value of `data.max_text_mib`; None: no limit.
        bad: The policy for unusable rows.
        key: The recipe key that names the sources, for messages.

    Raises:
        DataError: A file or row cannot be read, the first document is over the limit, or there is no text.
    """
    budget_bytes = math.inf if max_text_mib is None else max_text_mib * 2**20
    documents: list[Document] = []
    bad = bad or BadRows()
    named.check(sources, key)
    if max_text_mib is None:
        named.check_memory(sources, lambda error: None)
    for document in _all(sources, layout, max_text_mib, bad):
        size_bytes = document.at_least_bytes or len(document.text.encode("utf-8", errors="replace"))
        budget_bytes -= size_bytes
        if budget_bytes < 0 and documents:
            break
        if budget_bytes < 0:
            at_least = "at least " if document.at_least_bytes else ""
            raise DataError(
                f"{document.origin}: the first document has {at_least}{size_bytes / 2**20:.3g} MiB of text, over "
                f"data.max_text_mib {max_text_mib:g}, and a document is read whole; raise it, or split the file"
            )
        documents.append(document)
    if not documents:
        why = f"; {len(bad.problems)} rows were left out, the first: {bad.problems[0]}" if bad.problems else ""
        raise DataError(f"{', '.join(sources)}: no text in these files; name files that are not empty in {key}{why}")
    return documents


def split_eval(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, eval) documents. The eval split takes documents at even spacing, so that both parts have every kind.

    If there is only one text document, its last lines are the eval split.

    Raises:
        DataError: There is only one document, and it is not plain text or too short to split.
    """
    if fraction == 0:
        return list(documents), []
    if len(documents) == 1:
        only = documents[0]
        cut = only.text.rfind("\n", 0, int(len(only.text) * (1 - fraction))) + 1
        if not only.is_text or not 0 < cut < len(only.text):
            raise DataError(
                f"{only.origin}: one document cannot be split; set data.eval_source, or data.eval_fraction: 0"
            )
        parts = (only.text[:cut], only.text[cut:])
        kept, held = ([Document(only.origin, (Segment(part, True),))] for part in parts)
        return kept, held
    count = max(1, round(len(documents) * fraction))
    chosen = {(2 * i + 1) * len(documents) // (2 * count) for i in range(count)}
    return (
        [document for i, document in enumerate(documents) if i not in chosen],
        [document for i, document in enumerate(documents) if i in chosen],
    )


def _all(
    sources: Sequence[str], layout: str | RowReader, max_text_mib: float | None, bad: BadRows
) -> Iterator[Document]:
    for source in sources:
        if source == BUILT_IN:
            if not isinstance(layout, str):
                raise DataError(f"{source} is text, and this objective takes rows; name .jsonl files, or {TOY_ANSWERS}")
            yield from _python_docs()
        elif source == TOY_ANSWERS:
            if isinstance(layout, str):
                raise DataError(f"{source} is for post-training; set train.objective, for example dpo")
            yield from layout.toy_answers()
        else:
            for path in named.files(source, bad.take):
                yield from _file(path, layout, max_text_mib, bad)


def _python_docs() -> Iterator[Document]:
    """The language reference that `help()` prints, then the sources of the standard library, both sorted."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(f"pydoc_data.topics[{name}]", (Segment(topics[name], True),))
    root = Path(sysconfig.get_path("stdlib"))
    # tests repeat one another, and the two package folders contain third-party code
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in skipped)
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix != ".py" or not path.is_file():
                continue
            try:
                with tokenize.open(path) as handle:  # honours the file's coding line
                    text = handle.read()
            except (SyntaxError, UnicodeDecodeError, OSError):  # a few files are invalid on purpose
                continue
            if text.strip():
                yield Document(path.relative_to(root).as_posix(), (Segment(text, True),))


def _file(path: Path, layout: str | RowReader, max_text_mib: float | None, bad: BadRows) -> Iterator[Document]:
    if path.suffix == ".jsonl" or layout not in ("auto", "text"):
        yield from _jsonl(path, layout, bad)
        return
    if path.suffix == ".json":
        raise DataError(f"{path}: JSON files are not supported; write one object per line to {path.stem}.jsonl")
    try:
        with open_regular(path) as handle:
            size_bytes = os.fstat(handle.fileno()).st_size
            # Windows newlines do not count as text; at most half of a file can be such newlines
            if max_text_mib is not None and size_bytes // 2 > max_text_mib * 2**20:
                yield Document(str(path), at_least_bytes=size_bytes // 2)
                return
            content = handle.read(size_bytes)  # the file may still be growing
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        text = io.IncrementalNewlineDecoder(None, translate=True).decode(content.decode("utf-8"), final=True)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        bad.take(DataError(f"{path}:{line}: not UTF-8 text (byte {error.start}); convert the file to UTF-8"))
        return
    if text.strip():
        yield Document(str(path), (Segment(text, True),))


def _jsonl(path: Path, layout: str | RowReader, bad: BadRows) -> Iterator[Document]:
    """One document per row. Blank lines are allowed."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = _parse_row(line, where)
            if layout == "auto":
                layout = _detect(row, where)
            document = (LAYOUTS[layout] if isinstance(layout, str) else layout).read(row, where)
        except DataError as error:
            bad.take(error)
        else:
            yield document


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of the file up to its size at opening. A file that grows while it is read might never end."""
    try:
        with open_regular(path) as handle:
            left_bytes = os.fstat(handle.fileno()).st_size
            number = 0
            while left_bytes > 0 and (line := handle.readline(min(left_bytes, MAX_ROW_BYTES + 1))):
                number += 1
                if len(line) > MAX_ROW_BYTES:
                    raise DataError(
                        f"{path}:{number}: a row of more than {MAX_ROW_BYTES // 2**20} MiB; a row is one document, so "
                        "split it, or name plain text .txt"
                    )
                left_bytes -= len(line)
                yield line
    except OSError as error:
        raise unreadable(path, error) from None


def _parse_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text (byte {error.start} of the line); convert the file") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON at column {error.colno}: {error.msg}; fix or remove it") from None
    except RecursionError:
        raise DataError(f"{where}: JSON nested too deeply; fix or remove the row") from None
    except ValueError as error:  # a number with more digits than Python reads
        raise DataError(f"{where}: not a JSON row: {str(error)[:120]}; fix or remove the row") from None
    if not isinstance(row, dict):
        raise DataError(f'{where}: a row is a JSON object such as {{"text": ...}}, not {type(row).__name__}')
    return row


def _detect(row: dict[str, Any], where: str) -> str:
    for name, layout in LAYOUTS.items():
        if any(all(key in row for key in keys) for keys in layout.needs):
            return name
    wanted = "; ".join(f"{name}: {_needs(layout)}" for name, layout in LAYOUTS.items())
    raise DataError(f"{where}: keys {', '.join(map(str, row)) or 'none'} fit no known layout ({wanted})")


# --- layouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """A JSONL layout: sets of keys, any of which identifies it, and how a row becomes a document."""

    needs: tuple[tuple[str, ...], ...]
    segments: Callable[[dict[str, Any], str], Document]

    def read(self, row: dict[str, Any], where: str) -> Document:
        if not any(all(key in row for key in keys) for keys in self.needs):
            raise DataError(f"{where}: keys {', '.join(map(str, row)) or 'none'}, but this layout needs {_needs(self)}")
        document = self.segments(row, where)
        learned = [s.text for s in document.segments if s.learned]
        learned += [m.content for m in document.messages if m.role == "assistant"]
        if not any(text.strip() for text in learned):
            raise DataError(
                f"{where}: nothing to learn from, because the answer is empty; fill it in or remove the row"
            )
        return document


def _needs(layout: Layout) -> str:
    return " or ".join(" and ".join(keys) for keys in layout.needs)


def string(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} is {type(value).__name__}, not text; write it as a JSON string")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # "\ud83d" alone, half of a character
        raise DataError(
            f"{where}: {key} has half a surrogate pair at {error.start}; write the whole character, or remove it"
        ) from None
    return value


def _text(row: dict[str, Any], where: str) -> Document:
    return Document(where, (Segment(string(row, "text", where), True),))


def _prompt_completion(row: dict[str, Any], where: str) -> Document:
    prompt, completion = string(row, "prompt", where), string(row, "completion", where)
    return Document(where, (Segment(prompt, False), Segment(completion, True)))


def _alpaca(row: dict[str, Any], where: str) -> Document:
    instruction, answer = string(row, "instruction", where), string(row, "output", where)
    extra = string(row, "input", where) if row.get("input") else ""
    prompt = f"### Instruction:\n{instruction}\n\n" + (f"### Input:\n{extra}\n\n" if extra else "") + "### Response:\n"
    return Document(where, (Segment(prompt, False), Segment(answer, True)))


def chat_document(row: dict[str, Any], where: str) -> Document:
    """OpenAI's `messages: [{role, content}]` and ShareGPT's `conversations: [{from, value}]`."""
    turns = row.get("messages", row.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise DataError(f'{where}: messages is not a list of turns; write [{{"role": ..., "content": ...}}]')
    messages = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise DataError(f"{where}: message {i} is {type(turn).__name__}, not an object with role and content")
        names = ("from", "value") if "from" in turn else ("role", "content")
        role, content = (string(turn, name, f"{where}: message {i}") for name in names)
        if role not in ROLES:
            raise DataError(f"{where}: message {i} has role {role!r}; known roles are {', '.join(ROLES)}")
        messages.append(Message(ROLES[role], content))
    return Document(where, messages=tuple(messages))


LAYOUTS = {
    "messages": Layout((("messages",), ("conversations",)), chat_document),
    "alpaca": Layout((("instruction", "output"),), _alpaca),
    "prompt-completion": Layout((("prompt", "completion"),), _prompt_completion),
    "text": Layout((("text",),), _text),
}
