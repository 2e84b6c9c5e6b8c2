"""Says what a row has that its text does not teach: parts that the chat template leaves out, and special tokens.

A chat template writes what it knows and drops the rest without a word. A note names one such part of one row. The run
prints one warning for each kind of note, with the number of rows.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tigon.data.chat.messages import REASONING
from tigon.data.documents import Document, Message

Note = tuple[str, str]
"""(kind, what it is about). Both are text, so that the token cache can store them."""
KEY, CONTENT, TOOLS, MARK_IN_TEXT, MARK_IN_CHAT = "key", "content", "tools", "mark in text", "mark in chat"
_STRUCTURE = frozenset({"type", "function", "name", "description", "parameters", "properties", "required", "items"})
"""Keys of a JSON schema that every description of a tool has. A template may write schemas in another language."""
_PIECES = re.compile(r"[\n]|<[^<>\n]{1,40}>")
"""Where the content of a message is divided to find which part of it is missing."""


class Noted(Protocol):
    """An encoded document."""

    @property
    def origin(self) -> str: ...
    @property
    def notes(self) -> Sequence[Note]: ...


def of_chat(document: Document, text: str, template: str, marks: re.Pattern[str] | None) -> tuple[Note, ...]:
    """The notes of a row of messages.

    Args:
        document: The row.
        text: What the template made of it.
        template: The source of the template; empty for plain headers.
        marks: Finds the tokenizer's special tokens.
    """
    notes: dict[Note, None] = {}
    for message in document.messages:
        for key, value in _parts(message):
            known = key in REASONING or re.search(rf"\b{re.escape(key)}\b", template)
            if not known or not all(_is_in(leaf, text) for leaf in _leaves(value)):
                notes[KEY, key] = None
        if (share := _missing_share(message, text)) is not None:
            notes[CONTENT, f"{message.role} {share[0]} {share[1]}"] = None
        if marks and (found := marks.search(message.content)):
            notes[MARK_IN_CHAT, found.group()] = None
    for leaf in _leaves([_schema(tool) for tool in document.tools]):
        if not _is_in(leaf, text):
            notes[TOOLS, leaf[:40]] = None
    return tuple(notes)


def of_text(texts: Iterable[str], marks: re.Pattern[str] | None) -> tuple[Note, ...]:
    """The notes of a row that is no chat."""
    found = next((match.group() for text in texts if marks and (match := marks.search(text))), None)
    return () if found is None else ((MARK_IN_TEXT, found),)


_SENTENCES = {
    KEY: "the chat template leaves out these keys of messages, first at {first}: {names}. The model does not see them; "
    "name a data.template that writes them, or remove the keys",
    CONTENT: "the chat template leaves out parts of messages, first at {first}: {names}. Templates of reasoning models "
    "drop what stands before </think>; name a data.template that keeps it, or give the reasoning as reasoning_content "
    "if the template reads that",
    TOOLS: "the chat template leaves out parts of the tools' descriptions in {rows}, first at {first}: {names}",
    MARK_IN_TEXT: "{rows} of text contain special tokens of the tokenizer, such as {names} in {first}. They are read "
    "as plain characters. Give chats as messages, and the chat template writes the tokens",
    MARK_IN_CHAT: "messages of {rows} contain special tokens of the tokenizer, such as {names} in {first}. The model "
    "reads them as if the chat template had written them, so they can begin or end a turn; remove them, unless you "
    "want that",
}
"""Kind -> the warning about its rows."""


def warnings_of(encoded: Sequence[Noted], *, without: Collection[str] = ()) -> tuple[str, ...]:
    """One sentence for each kind of note in the data set, except the kinds in `without`."""
    rows: dict[str, dict[str, list[Noted]]] = defaultdict(lambda: defaultdict(list))
    for each in encoded:
        for kind, what in each.notes:
            rows[kind][what].append(each)
    made = []
    for kind in (kind for kind in _SENTENCES if rows[kind] and kind not in without):
        every = [each for of in rows[kind].values() for each in of]
        names = _names(kind, rows[kind])
        made.append(_SENTENCES[kind].format(rows=_n_rows(every), first=every[0].origin, names=names))
    return tuple(made)


def _names(kind: str, rows: Mapping[str, Sequence[Noted]]) -> str:
    """What the notes of a kind are about."""
    if kind == KEY:
        return ", ".join(f"{key} ({_n_rows(of)})" for key, of in rows.items())
    if kind == TOOLS:
        return ", ".join(f"{leaf!r}" for leaf in list(rows)[:5])
    if kind != CONTENT:
        return next(iter(rows))
    by_role: dict[str, list[tuple[int, int, Noted]]] = defaultdict(list)
    for what, of in rows.items():
        role, missing, total = what.split()
        by_role[role] += [(int(missing), int(total), each) for each in of]
    parts = []
    for role, found in by_role.items():
        share = sum(missing for missing, _, _ in found) / sum(total for _, total, _ in found)
        parts.append(f"{role} ({_n_rows([each for *_, each in found])}, {share:.0%} of their characters)")
    return ", ".join(parts)


def no_end(n_documents: int) -> str:
    """The warning of a data set in which no end of an answer is learned."""
    return (
        f"none of {n_documents:,} documents teaches the model to end its answer: no end token is learned. The model "
        "may write on without an end. Use a data.template that ends the assistant's turn inside its learned part, or a "
        "tokenizer with an eos_token"
    )


def _n_rows(rows: Sequence[Noted]) -> str:
    n = len({each.origin for each in rows})
    return f"{n:,} {'row' if n == 1 else 'rows'}"


def _parts(message: Message) -> Iterator[tuple[str, Any]]:
    """The keys of a message besides role and content. A tool call is its name and arguments, and its `id` a key."""
    for key, value in message.more.items():
        if key != "tool_calls":
            yield key, value
            continue
        yield key, [[call["function"]["name"], call["function"]["arguments"]] for call in value]
        for call in value:
            yield from ((f"{key}.{name}", call[name]) for name in call if name not in ("type", "function"))


def _schema(value: object) -> object:
    """A tool's description without the words that only its form needs: keys of `_STRUCTURE` and names of types."""
    if isinstance(value, Mapping):
        kept = [_schema(item) for key, item in value.items() if key in _STRUCTURE and key != "type"]
        return [*kept, {key: _schema(item) for key, item in value.items() if key not in _STRUCTURE}]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_schema(item) for item in value]
    return value


def _missing_share(message: Message, text: str) -> tuple[int, int] | None:
    """(characters of the content that are not in the text, all of them); None if nothing is missing."""
    if _is_in(message.content, text):
        return None
    pieces = [piece.strip() for piece in _PIECES.split(message.content)]
    missing = sum(len(piece) for piece in pieces if not _is_in(piece, text))
    return (missing, sum(map(len, pieces))) if missing else None


def _leaves(value: object) -> Iterator[str]:
    """Every text and number in a value, and the keys of its objects."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield json.dumps(value)


def _is_in(leaf: str, text: str) -> bool:
    """Whether the text has the leaf, as it is or as JSON writes it."""
    leaf = leaf.strip()
    forms = (leaf, json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1])
    return any(form in text for form in forms)
