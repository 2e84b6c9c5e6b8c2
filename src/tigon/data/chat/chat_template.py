"""Turns chat messages into text with a chat template, and finds the parts of it that are learned.

Only what the assistant writes is learned, with the template's mark that ends the turn. Three ways find it, in this
order, and each is checked:

1. The template marks it with `{% generation %}`.
2. The chat is rendered with the first n messages and with n + 1. If the second text begins with the first, the rest
   after the generation prompt is learned.
3. Some templates write a turn in another way when more turns follow, for example without its reasoning. Then the turn
   is found by rendering the chat again with another answer in its place: what differs is the turn.

The result is spans of characters. `tokenizer.py` tokenises the whole text, so the tokens are those of transformers'
`apply_chat_template(tokenize=True)`, whatever the spans are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tigon._files import read_text
from tigon.data.chat.messages import REASONING
from tigon.data.chat.render_chat import EndlessTemplate, render_chat
from tigon.data.documents import Document, Message, Segment
from tigon.errors import DataError, RecipeError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    ends: tuple[int, ...] = ()
    """Ids that end an answer besides the tokenizer's end-of-text token: those of the model's generation config."""


def choose(tokenizer: PreTrainedTokenizerBase, template: str, learn: str, ends: Sequence[int] = ()) -> Rendering:
    """The rendering that the recipe asks for. A template in a file becomes the tokenizer's.

    Args:
        tokenizer: The tokenizer of the run.
        template: The value of `data.template`.
        learn: The value of `data.learn`.
        ends: Ids at which the model's generation config ends an answer.

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
    return Rendering(template, learn, tuple(ends))


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


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def is_chat(document: Document, tokenizer: PreTrainedTokenizerBase, rendering: Rendering) -> bool:
    """Whether the document is written as messages, and not as its segments."""
    if not document.messages or not document.segments:
        return bool(document.messages)
    if rendering.template == "plain":
        return False
    return has_template(tokenizer) and (document.as_chat or rendering.template == "chat")


def segments_of(document: Document, tokenizer: PreTrainedTokenizerBase, rendering: Rendering) -> tuple[Segment, ...]:
    """The document's text in segments.

    Raises:
        DataError: The template refuses the messages, or leaves the assistant's turn out.
    """
    if not is_chat(document, tokenizer, rendering):
        return document.segments
    chat = _Chat(document, tokenizer, template_of(document, tokenizer, rendering))
    if rendering.learn == "all":
        return (Segment(chat.text(document.messages), True),)
    return chat.marked() or chat.by_prefixes() or chat.by_stand_ins()


class _Chat:
    """The text of one document's messages. template: the source of the template; empty writes plain headers."""

    def __init__(self, document: Document, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self.messages, self.tools, self.where = document.messages, document.tools, document.origin
        self.tokenizer, self.template = tokenizer, template
        for kind, given in (("tools", bool(self.tools)), ("tool_calls", _calls_tools(self.messages))):
            if given and kind not in template:
                which = "the chat template has no place" if template else "the tokenizer has no chat template"
                raise DataError(
                    f"{self.where}: {which} for {kind}; use a model or a data.template that knows tools, or remove them"
                )
        self.messages = tuple(_with_known_reasoning(message, template) for message in self.messages)
        self.messages = next((form for form in self._forms() if self._writes(form)), self.messages)

    def _forms(self) -> Iterator[tuple[Message, ...]]:
        """The messages as they are, and in other forms of the same content that some templates need.

        - Most templates take the arguments of a call as an object; DeepSeek's join them to a text.
        - Templates of some models with images take a content only as a list of parts.
        """
        yield self.messages
        yield tuple(message.with_arguments_as_text() for message in self.messages)
        yield tuple(message.with_content_as_parts() for message in self.messages)

    def _writes(self, messages: Sequence[Message]) -> bool:
        """Whether the template takes the messages, and writes at least one content, and the name of every tool call."""
        try:
            text = self.text(messages)
        except DataError:
            return False
        contents = [message.content.strip() for message in messages if message.content.strip()]
        names = [call["function"]["name"] for message in messages for call in message.more.get("tool_calls", ())]
        return all(name in text for name in names) and (not contents or any(content in text for content in contents))

    def text(self, messages: Sequence[Message], *, opened: bool = False) -> str:
        """The messages as text. opened: with the header of the assistant's next turn.

        Raises:
            DataError: The template refuses the messages.
            EndlessTemplate: The template does not end.
        """
        if not self.template:
            turns = "".join(f"### {m.role.capitalize()}:\n{m.content}\n\n" for m in messages)
            return turns + ("### Assistant:\n" if opened else "")
        if not messages and not opened:
            return ""
        try:
            return render_chat(
                self.tokenizer,
                [message.as_mapping() for message in messages],
                tools=list(self.tools) or None,
                add_generation_prompt=opened,
            )
        except EndlessTemplate:
            raise
        except UsageError as error:  # the template's own rules, as a rule
            number, reason = max(0, len(messages) - 1), str(error).removeprefix("the chat template fails: ")
            raise DataError(f"{self.where}: the chat template refuses message {number}: {reason}") from None

    def marked(self) -> tuple[Segment, ...] | None:
        """Segments by the template's `{% generation %}` marks; None if it has none, or a turn is not to be learned."""
        if not _GENERATION.search(self.template) or any(not m.learned for m in self.messages):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), (spans,) = render_jinja_template(
                [[message.as_mapping() for message in self.messages]],
                tools=list(self.tools) or None,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception:  # the template's refusal; `text` reports it with the number of the row
            return None
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
                return None  # a template may refuse a part of a chat and take the whole one
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
            DataError: The template refuses the chat, a turn cannot be found, or other turns are within it.
        """
        text = self.text(self.messages)
        spans: list[tuple[int, int]] = []
        turns = [self._difference(self.messages, i) for i in range(len(self.messages))]
        for i, message in enumerate(self.messages):
            if message.role != "assistant" or not message.learned:
                continue
            turn = turns[i]
            others = (other for k, other in enumerate(turns) if k != i and other is not None)
            if turn is None or any(turn[0] < stop and start < turn[1] for start, stop in others):
                raise DataError(
                    f"{self.where}: the chat template leaves message {i} out or mixes it with others, so it cannot be "
                    "learned alone; set data.learn: all, or give prompt and completion instead"
                )
            begin, end = turn
            end += self._closing(text, i, end)
            start = self._after_header(text, i, turns, begin)
            if spans and start < spans[-1][1]:
                raise DataError(f"{self.where}: message {i} begins within an earlier one; set data.learn: all")
            spans.append((start, end))
        return _cut(text, spans)

    def _difference(self, messages: Sequence[Message], i: int) -> tuple[int, int] | None:
        """The span (begin, end) of message i in the text of `messages`; None if the text does not depend on it."""
        text, begin, behind = self.text(messages), None, 0
        for stand_in in _STAND_INS:
            try:
                other = self.text([*messages[:i], _other(messages[i], stand_in), *messages[i + 1 :]])
            except DataError:  # a template may read the content, for example as JSON
                return None
            if other == text:
                return None
            start = _n_alike(text, other)
            stop = _n_alike(text[::-1], other[::-1])
            begin, behind = (start, stop) if begin is None else (min(begin, start), min(behind, stop))
        begin = begin or 0
        return begin, max(begin, len(text) - behind)

    def _closing(self, text: str, i: int, end: int) -> int:
        """The length of what the template writes after message i to end the turn, whatever follows.

        A special token counts as a whole: `<|return|>` and `<|end|>` begin alike, but are different ends.
        """
        alone = self.messages[: i + 1]
        try:
            turn = self._difference(alone, i)
            closing = "" if turn is None else self.text(alone)[turn[1] :]
        except DataError:  # the template takes no chat that ends here
            return 0
        following = text[end : end + len(closing)]
        n = _n_alike(closing, following)
        if n == len(closing):
            return n
        tokens = special_tokens(self.tokenizer)
        cuts = [m.start() for m in tokens.finditer(closing) if m.start() < n < m.end()] if tokens else []
        return min([n, *cuts])

    def _after_header(self, text: str, i: int, turns: Sequence[tuple[int, int] | None], begin: int) -> int:
        """The position at which the turn of message i begins after its header.

        Args:
            text: The text of all messages.
            i: The number of the message.
            turns: The spans of the messages; None for one that the template leaves out.
            begin: Where its own content begins. The result if the header is not found.
        """
        before, prompt_end = next(((k, turn[1]) for k in range(i - 1, -1, -1) if (turn := turns[k])), (None, 0))
        if i and before is None:
            return begin
        closed, opened = self._opened(i)
        if opened == closed:  # no header: the turn begins where the one before it ends
            return begin if before is None else min(begin, prompt_end + self._closing(text, before, prompt_end))
        header = opened[len(closed) :] if opened.startswith(closed) else ""
        # A template may write the header twice in a turn, before the reasoning and before the answer. Both are learned.
        at = text.find(header, prompt_end, begin) if header else -1
        return at + len(header) if at >= 0 else begin

    def _opened(self, i: int) -> tuple[str, str]:
        """The text before message i, without and with the header of the assistant's turn.

        transformers refuses an empty chat, and some templates refuse one without a question. The header is then taken
        from a chat with a question.
        """
        for messages in (self.messages[:i], (*self.messages[:i], Message("user", _STAND_INS[0]))):
            try:
                return self.text(messages), self.text(messages, opened=True)
            except DataError:
                continue
        return "", " "  # a header that is not found


def template_of(document: Document, tokenizer: PreTrainedTokenizerBase, rendering: Rendering) -> str:
    """The source of the chat template that writes the document; empty for plain headers.

    Raises:
        DataError: The tokenizer has several templates, and none of them is the default.
    """
    if rendering.template == "plain" or not has_template(tokenizer):
        return ""
    try:
        return str(tokenizer.get_chat_template(tools=list(document.tools) or None))
    except ValueError as error:
        raise DataError(f"{document.origin}: {_short(error)}; set data.template to a .jinja file") from None


def special_tokens(tokenizer: PreTrainedTokenizerBase, *, marks_only: bool = False) -> re.Pattern[str] | None:
    """Finds the tokenizer's added tokens in a text; None if it has none.

    marks_only: only the special ones, such as `<|im_end|>`, and not words like `<think>`.
    """
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    texts = {str(t.content) for t in added.values() if (t.special or not marks_only) and str(t.content).strip()}
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if texts else None


def _with_known_reasoning(message: Message, template: str) -> Message:
    """The message with its reasoning under the key that the template reads."""
    for key in REASONING:
        if key in message.more and not re.search(rf"\b{key}\b", template):
            known = next((k for k in REASONING if k not in message.more and re.search(rf"\b{k}\b", template)), None)
            if known is not None:
                more = {known if name == key else name: value for name, value in message.more.items()}
                return replace(message, more=more)
    return message


def _other(message: Message, content: str) -> Message:
    """The message with other content, and other arguments in its tool calls."""
    more = dict(message.more)
    if calls := more.get("tool_calls"):
        is_text = any(isinstance(call["function"]["arguments"], str) for call in calls)
        function = {"name": content, "arguments": json.dumps({content: content}) if is_text else {content: content}}
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
