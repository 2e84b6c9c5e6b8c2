"""Documents: what one text or one row of a data set becomes.

A document is a list of segments. A segment is either learned (its tokens count in the loss) or only read (a prompt).
Plain text is one learned segment. Chat messages stay messages here, because a chat template turns them into text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tigon.errors import DataError

TEXT = "text"


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
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other keys that chat templates know, such as `tool_calls`."""
    learned: bool = True
    """Whether the turn is learned if it is the assistant's."""
    parts: tuple[Mapping[str, Any], ...] | None = None
    """The content as a list of texts and images, for templates of models with images; None: `content` is text."""
    argument_texts: tuple[str, ...] = ()
    """The arguments of each tool call as JSON text, as the row has them."""

    def as_mapping(self) -> dict[str, Any]:
        """The turn as chat templates take it."""
        content = self.content if self.parts is None else [dict(part) for part in self.parts]
        return {**self.more, "role": self.role, "content": content}

    def with_arguments_as_text(self) -> Message:
        """The turn with the arguments of its tool calls as JSON text."""
        calls = self.more.get("tool_calls")
        if not calls:
            return self
        texts = self.argument_texts or [json.dumps(c["function"]["arguments"], ensure_ascii=False) for c in calls]
        written = [
            {**call, "function": {**call["function"], "arguments": text}}
            for call, text in zip(calls, texts, strict=True)
        ]
        return replace(self, more={**self.more, "tool_calls": written})

    def with_content_as_parts(self) -> Message:
        """The turn with its content as a list of parts."""
        return replace(self, parts=({"type": "text", "text": self.content},)) if self.parts is None else self

    def with_content(self, content: str) -> Message:
        """The turn with another text in place of its content."""
        parts = None if self.parts is None else ({"type": "text", "text": content},)
        return replace(self, content=content, parts=parts)


@dataclass(frozen=True)
class Document:
    """Segments of text, messages for a chat template, or both forms of one row. `origin` is `file` or `file:line`."""

    origin: str
    segments: tuple[Segment, ...] = ()
    messages: tuple[Message, ...] = ()
    at_least_bytes: int = 0
    """Bytes of text in a file that was not read because it is over the limit; 0 for a document that was read."""
    row: Mapping[str, Any] | None = None
    """The row of a data set for post-training, with the columns that its trainer takes."""
    texts: tuple[Document, ...] = ()
    """The texts of such a row, for example the prompt with either answer."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of the tools that the assistant may call, for the chat template."""
    format: str = TEXT
    """The format that the row was recognised as."""
    as_chat: bool = True
    """Whether a document with both forms becomes messages if the tokenizer has a chat template."""
    unread: tuple[str, ...] = ()
    """Columns of the row that its format does not read."""
    images: tuple[Any, ...] = ()
    """The images of the messages in their order (`tigon.data.images.Picture`)."""

    @property
    def is_text(self) -> bool:
        """Whether this is plain text, which may be cut anywhere. A prompt and its answer may not be cut."""
        return self.row is None and not self.messages and all(segment.learned for segment in self.segments)

    @property
    def text(self) -> str:
        """All text of the document, for counting and for training a tokenizer."""
        own = [s.text for s in self.segments] or [m.content for m in self.messages]
        return "".join([*own, *(text.text for text in self.texts)])


class RowReader(Protocol):
    """Reads the rows of a data set that is not text to continue."""

    def read(self, row: dict[str, Any], where: str) -> Document:
        """The document of a row. Raises DataError, with `where` in front, if the row cannot be used."""
        ...

    def toy_rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, row) of each row of the built-in data set in this format."""
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


def string(row: Mapping[str, Any], key: str, where: str) -> str:
    """The text in `row[key]`. Raises DataError, with `where` in front, if it is something else."""
    value = row.get(key)
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise DataError(f"{where}: {key} is {kind}, not text; write it as text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # "\ud83d" alone, half of a character
        raise DataError(
            f"{where}: {key} has half a surrogate pair at {error.start}; write the whole character, or remove it"
        ) from None
    return value
