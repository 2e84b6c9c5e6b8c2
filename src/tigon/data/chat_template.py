"""Turns chat messages into text with a chat template, and finds the parts of it that are learned.

Only what the assistant writes is learned, with the template's mark that ends the turn. Three ways find it, in this
order, and each is checked:

1. The template marks it with `{% generation %}`.
2. The chat is rendered with the first n messages and with n + 1. If the second text begins with the first, the rest
   after the generation prompt is learned.
3. Some templates write a turn in another way when more turns follow, for example without its reasoning. Then the turn
   is found by rendering the chat again with another answer in its place: what differs is the turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tigon._files import read_text
from tigon.data.documents import Document, Message, Segment
from tigon.errors import DataError, RecipeError

WORDS = ("auto", "chat", "plain")
MAX_TEMPLATE_BYTES = 2**20
PLAIN_HEADERS = (
    "{% for message in messages %}### {{ message.role | capitalize }}:\n{{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""The plain headers as a template. A tokenizer without one is saved with it, so that others write chats as the run."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STAND_INS = ("0Q0", "1Z1")
"""Answers that stand in for the assistant's. They differ in every character, so one of them differs from any answer."""


@dataclass(frozen=True)
class Rendering:
    """How rows become text, and which tokens are learned."""

    template: str = "auto"
    """`auto`: rows that are chats use the tokenizer's template; `chat`: prompts with completions too; `plain`: none."""
    learn: str = "answers"
    """`answers`, or `all` tokens."""


def choose(tokenizer: Any, template: str, learn: str) -> Rendering:
    """The rendering that the recipe asks for. A template in a file becomes the tokenizer's.

    Args:
        tokenizer: The tokenizer of the run.
        template: The value of `data.template`.
        learn: The value of `data.learn`.

    Raises:
        RecipeError: There is no such template.
    """
    if template not in WORDS:
        tokenizer.chat_template = _from_file(Path(template))
        template = "chat"
    elif template == "chat" and not has_template(tokenizer):
        raise RecipeError(
            "data.template: chat needs a tokenizer with a chat template, and this one has none; name a .jinja file "
            "with a template, or set data.template: plain"
        )
    return Rendering(template, learn)


def _from_file(path: Path) -> str:
    import jinja2

    try:
        text = read_text(path, MAX_TEMPLATE_BYTES)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAGS.sub("", text))
    except FileNotFoundError:
        words = ", ".join(WORDS)
        raise RecipeError(f"data.template: {path}: no such file; name a .jinja file, or one of {words}") from None
    except OSError as error:
        raise RecipeError(f"data.template: {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"data.template: {path}: not UTF-8 text (byte {error.start})") from None
    except jinja2.TemplateSyntaxError as error:
        raise RecipeError(f"data.template: {path}:{error.lineno}: not a Jinja template: {error.message}") from None
    return text


_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # transformers' own tags


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def is_chat(document: Document, tokenizer: Any, rendering: Rendering) -> bool:
    """Whether the document is written as messages, and not as its segments."""
    if not document.messages or not document.segments:
        return bool(document.messages)
    if rendering.template == "plain":
        return False
    return has_template(tokenizer) and (document.as_chat or rendering.template == "chat")


def segments_of(document: Document, tokenizer: Any, rendering: Rendering) -> tuple[Segment, ...]:
    """The document's text in segments.

    Raises:
        DataError: The template refuses the messages, or leaves the assistant's turn out.
    """
    if not is_chat(document, tokenizer, rendering):
        return document.segments
    chat = _Chat(document, tokenizer if rendering.template != "plain" and has_template(tokenizer) else None)
    if rendering.learn == "all":
        return (Segment(chat.text(document.messages), True),)
    return chat.marked() or chat.by_prefixes() or chat.by_stand_ins()


class _Chat:
    """The text of one document's messages. tokenizer: None writes plain headers instead of a template."""

    def __init__(self, document: Document, tokenizer: Any | None) -> None:
        self.messages, self.tools, self.where = document.messages, document.tools, document.origin
        self.tokenizer = tokenizer
        self.template = "" if tokenizer is None else self._template(tokenizer)
        for kind, given in (("tools", bool(self.tools)), ("tool_calls", _calls_tools(self.messages))):
            if given and kind not in self.template:
                which = "the tokenizer has no chat template" if tokenizer is None else "the chat template has no place"
                raise DataError(
                    f"{self.where}: {which} for {kind}; use a model or a data.template that knows tools, or remove them"
                )

    def _template(self, tokenizer: Any) -> str:
        try:
            return str(tokenizer.get_chat_template(tools=list(self.tools) or None))
        except ValueError as error:  # several templates, and none of them is the default
            raise DataError(f"{self.where}: {_short(error)}; set data.template to a .jinja file") from None

    def text(self, messages: Sequence[Message], *, opened: bool = False) -> str:
        """The messages as text. opened: with the header of the assistant's next turn."""
        if self.tokenizer is None:
            turns = "".join(f"### {m.role.capitalize()}:\n{m.content}\n\n" for m in messages)
            return turns + ("### Assistant:\n" if opened else "")
        if not messages and not opened:
            return ""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [message.as_mapping() for message in messages], tools=list(self.tools) or None, tokenize=False,
                    add_generation_prompt=opened,
                )
            )  # fmt: skip
        except Exception as error:  # templates report violations of their rules as jinja errors
            number = max(0, len(messages) - 1)
            raise DataError(f"{self.where}: the chat template refuses message {number}: {_short(error)}") from None

    def marked(self) -> tuple[Segment, ...] | None:
        """Segments by the template's `{% generation %}` marks; None if it has none, or a turn is not to be learned."""
        if not _GENERATION.search(self.template) or any(not m.learned for m in self.messages):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        assert self.tokenizer is not None
        (text,), (spans,) = render_jinja_template(
            [[message.as_mapping() for message in self.messages]], tools=list(self.tools) or None,
            chat_template=self.template, return_assistant_tokens_mask=True, **self.tokenizer.special_tokens_map,
        )  # fmt: skip
        if text != self.text(self.messages) or not spans:
            return None
        return _cut(text, spans)

    def by_prefixes(self) -> tuple[Segment, ...] | None:
        """Segments by the text of the first n messages; None if it does not begin the text of the first n + 1."""
        segments: list[Segment] = []
        done = ""
        for i, message in enumerate(self.messages):
            answers = message.role == "assistant"
            try:
                before = self.text(self.messages[:i], opened=True) if answers else done
                after = self.text(self.messages[: i + 1])
            except DataError:
                if i + 1 == len(self.messages):
                    raise
                return None  # a template may refuse a chat that ends here and take the whole one
            if not (before.startswith(done) and after.startswith(before)):
                return None
            if answers:
                read, written = before[len(done) :], after[len(before) :]
                segments += [Segment(read, False), Segment(written, message.learned)]
            else:
                segments.append(Segment(after[len(done) :], False))
            done = after
        return tuple(segments)

    def by_stand_ins(self) -> tuple[Segment, ...]:
        """Segments by what changes in the text when another answer stands in a turn's place.

        Raises:
            DataError: A turn cannot be found, or other turns are within it.
        """
        text = self.text(self.messages)
        spans: list[tuple[int, int]] = []
        turns = [self._difference(self.messages, i) for i in range(len(self.messages))]
        for i, message in enumerate(self.messages):
            if message.role != "assistant" or not message.learned:
                continue
            begin, end = turns[i]
            if begin >= end or any(begin < stop and start < end for k, (start, stop) in enumerate(turns) if k != i):
                raise DataError(
                    f"{self.where}: the chat template leaves message {i} out or mixes it with others, so it cannot be "
                    "learned alone; set data.learn: all, or give prompt and completion instead"
                )
            end += self._closing(text, i, end)
            prompt_end = turns[i - 1][1] if i else 0
            spans.append((self._after_header(text, i, prompt_end, begin), end))
        return _cut(text, spans)

    def _difference(self, messages: Sequence[Message], i: int) -> tuple[int, int]:
        """The span (begin, end) of message i in the text of `messages`."""
        text, begin, behind = self.text(messages), None, 0
        for stand_in in _STAND_INS:
            other = self.text([*messages[:i], _other(messages[i], stand_in), *messages[i + 1 :]])
            if other == text:
                return (0, 0)
            start = _n_alike(text, other)
            stop = _n_alike(text[::-1], other[::-1])
            begin, behind = (start, stop) if begin is None else (min(begin, start), min(behind, stop))
        return (begin or 0, len(text) - behind)

    def _closing(self, text: str, i: int, end: int) -> int:
        """The length of what the template writes after message i to end the turn."""
        alone = self.messages[: i + 1]
        closing = self.text(alone)[self._difference(alone, i)[1] :]
        return _n_alike(closing, text[end : end + len(closing)])

    def _after_header(self, text: str, i: int, prompt_end: int, begin: int) -> int:
        """The position at which the turn of message i begins after its header.

        Args:
            text: The text of all messages.
            i: The number of the message.
            prompt_end: Where the content of the message before it ends.
            begin: Where its own content begins. The result if the header is not found.
        """
        closed, opened = self.text(self.messages[:i]), self.text(self.messages[:i], opened=True)
        if opened == closed:  # no header: the turn begins where the one before it ends
            return min(begin, prompt_end + self._closing(text, i - 1, prompt_end)) if i else begin
        header = opened[len(closed) :] if opened.startswith(closed) else ""
        at = text.rfind(header, prompt_end, begin) if header else -1
        return at + len(header) if at >= 0 else begin


def _other(message: Message, content: str) -> Message:
    """The message with other content, and other arguments in its tool calls."""
    more = dict(message.more)
    if calls := more.get("tool_calls"):
        function = {"name": content, "arguments": {content: content}}
        more["tool_calls"] = [{**call, "function": {**call["function"], **function}} for call in calls]
        return replace(message.with_content(content if message.content else ""), more=more)
    return message.with_content(content)


def _n_alike(one: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _calls_tools(messages: Sequence[Message]) -> bool:
    return any("tool_calls" in message.more for message in messages)


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """The text in segments; those in `spans` are learned."""
    segments, done = [], 0
    for begin, end in spans:
        segments += [Segment(text[done:begin], False), Segment(text[begin:end], True)]
        done = end
    segments.append(Segment(text[done:], False))
    return tuple(segment for segment in segments if segment.text)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
