"""The formats of rows that are recognised, and how a row of each becomes a document.

A format is a row of `FORMATS`. The first one whose columns a row has is taken. Formats of rows for post-training are in
`preferences.py`; the recipe's objective chooses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tigon.data.chat.messages import read_messages, read_tools
from tigon.data.documents import Document, Message, Segment, string
from tigon.data.source.sources import Source
from tigon.errors import DataError


@dataclass(frozen=True)
class Format:
    """One format of rows."""

    needs: tuple[str, ...]
    """The columns that identify it."""
    optional: tuple[str, ...]
    document: Callable[[dict[str, Any], str], Document]
    """Makes the document of a row and its place in the file."""
    instead: str | None = None
    """A column that may stand for the only one of `needs`."""

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether the row has the columns of this format."""
        return all(name in row for name in self.needs) or self.instead in row

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in (*self.needs, self.instead, *self.optional) if name)

    @property
    def wanted(self) -> str:
        """The columns that the format needs, for messages."""
        return " and ".join(self.needs) + (f" or {self.instead}" if self.instead else "")


def read_row(name: str, row: dict[str, Any], where: str) -> Document:
    """The document of a row in the format `name`.

    Raises:
        DataError: The row lacks a column or has nothing to learn from; the message begins with `where`.
    """
    row_format = FORMATS[name]
    if not row_format.fits(row):
        raise DataError(f"{where}: columns {_columns(row)}, but data.format: {name} needs {row_format.wanted}")
    document = row_format.document(row, where)
    answers = [s.text for s in document.segments if s.learned]
    answers += [m.content for m in document.messages if m.role == "assistant" and m.learned]
    calls = any(m.more.get("tool_calls") for m in document.messages if m.learned)
    if document.messages and not any(m.role == "assistant" and m.learned for m in document.messages):
        raise DataError(
            f"{where}: nothing to learn from: no message is the assistant's, or all of its messages have weight 0 or "
            "train: false; add an answer, or remove the row"
        )
    if not calls and not any(text.strip() for text in answers):
        raise DataError(f"{where}: nothing to learn from, because the answer is empty; fill it in or remove the row")
    unread = tuple(str(column) for column in row if column not in _read_columns(row_format, row))
    return replace(document, format=name, unread=unread)


def _read_columns(row_format: Format, row: Mapping[str, Any]) -> set[str]:
    """The columns that the format reads from this row."""
    has_needed = all(column in row for column in row_format.needs)
    return {*(row_format.needs if has_needed else (str(row_format.instead),)), *row_format.optional}


def detect(row: Mapping[str, Any], where: str, mapped: Mapping[str, str]) -> str:
    """The name of the row's format.

    Args:
        row: The row, with the columns that `mapped` names.
        where: Its file and line.
        mapped: The value of `data.columns`. The format is one that has all of its columns.

    Raises:
        DataError: No format fits; the message names all of them.
    """
    for format_name, row_format in FORMATS.items():
        if row_format.fits(row) and all(name in row_format.columns for name in mapped):
            return format_name
    if "chosen" in row and "rejected" in row:
        raise DataError(
            f"{where}: a preference pair (chosen, rejected); set train.objective to dpo, orpo or reward, or train on "
            "the better answer with data.columns: {completion: chosen}"
        )
    known = "; ".join(f"{name}: {row_format.wanted}" for name, row_format in FORMATS.items())
    raise DataError(
        f"{where}: columns {_columns(row)} fit no known format ({known}); rename them, or map them with data.columns, "
        "such as {prompt: question, completion: answer}"
    )


def mapped_row(row: dict[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """The row with the columns that `data.columns` renames (new name -> name in the row) under their new names."""
    if not columns:
        return row
    for new, column in columns.items():
        if column not in row:
            raise DataError(
                f"{where}: no column {column!r}, which data.columns maps to {new}; the row has {_columns(row)}"
            )
    kept = {name: value for name, value in row.items() if name not in columns.values()}
    return {**kept, **{new: row[column] for new, column in columns.items()}}


def _columns(row: Mapping[str, Any]) -> str:
    names = [str(name) for name in row]
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") or "none"


def _text(row: dict[str, Any], where: str) -> Document:
    return Document(where, (Segment(string(row, "text", where), True),))


def _prompt_completion(row: dict[str, Any], where: str) -> Document:
    if isinstance(row["prompt"], list) and isinstance(row["completion"], list):  # messages, as TRL takes them
        turns = read_messages(row["prompt"], f"{where}: prompt", learned=False)
        return Document(
            where,
            messages=(*turns, *read_messages(row["completion"], f"{where}: completion")),
            tools=read_tools(row, where),
        )
    prompt, completion = string(row, "prompt", where), string(row, "completion", where)
    turns = (Message("user", prompt), Message("assistant", completion))
    return Document(where, (Segment(prompt, False), Segment(completion, True)), turns, as_chat=False)


def _alpaca(row: dict[str, Any], where: str) -> Document:
    instruction, answer = string(row, "instruction", where), string(row, "output", where)
    extra = string(row, "input", where) if row.get("input") else ""
    prompt = f"### Instruction:\n{instruction}\n\n" + (f"### Input:\n{extra}\n\n" if extra else "") + "### Response:\n"
    question = f"{instruction}\n\n{extra}" if extra else instruction
    turns = (*_system(row, where), Message("user", question), Message("assistant", answer))
    return Document(where, (Segment(prompt, False), Segment(answer, True)), turns)


def _system(row: dict[str, Any], where: str) -> tuple[Message, ...]:
    return (Message("system", string(row, "system", where)),) if row.get("system") else ()


def _messages(row: dict[str, Any], where: str) -> Document:
    turns = read_messages(row.get("messages", row.get("conversations")), where)
    if turns[0].role not in ("system", "developer"):
        turns = (*_system(row, where), *turns)
    return Document(where, messages=turns, tools=read_tools(row, where))


FORMATS: Mapping[str, Format] = {
    "sharegpt": Format(("conversations",), ("system", "tools"), _messages),
    "messages": Format(("messages",), ("system", "tools"), _messages, instead="conversations"),
    "alpaca": Format(("instruction", "output"), ("input", "system"), _alpaca),
    "prompt-completion": Format(("prompt", "completion"), ("tools",), _prompt_completion),
    "text": Format(("text",), (), _text),
}
OBJECTIVE_COLUMNS = ("chosen", "rejected", "label", "tokens", "labels")
"""Columns of rows for post-training and classification that `data.columns` may name too."""
COLUMNS = (*dict.fromkeys(name for row_format in FORMATS.values() for name in row_format.columns), *OBJECTIVE_COLUMNS)


def check_source(source: Source) -> None:
    """Raise DataError for a format that is not known, or for `data.columns` that fits no format."""
    if source.format not in ("auto", *FORMATS):
        raise DataError(
            f"data.format: {source.format!r} ({source.name}) is not known; choose auto, {', '.join(FORMATS)}"
        )
    for name, column in source.columns.items():
        if name not in COLUMNS:
            raise DataError(f"data.columns: no format has a column {name!r}; choose {', '.join(COLUMNS)}")
        if not isinstance(column, str) or not column:
            raise DataError(f"data.columns: {name} is {column!r}; name the column of your data that holds it, as text")
    mapped = [name for name in source.columns if name not in OBJECTIVE_COLUMNS]
    names = FORMATS if source.format == "auto" else (source.format,)
    if not any(all(column in FORMATS[name].columns for column in mapped) for name in names):
        known = "; ".join(f"{name}: {', '.join(FORMATS[name].columns)}" for name in names)
        raise DataError(f"data.columns: no format has all of {', '.join(mapped)}; the formats have {known}")
