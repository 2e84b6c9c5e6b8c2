"""A conversation with a trained model in the terminal. The answer is printed while it is generated."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tigon.data.chat.render_chat import render_chat
from tigon.errors import OptionError, UsageError
from tigon.trained.answers import Answers
from tigon.trained.load import Loaded

DEFAULT_TEMPERATURE = 0.7
LEAST_TEMPERATURE = 1e-3  # logits divided by less overflow in 16 bits
HELP = "Type a message. /reset starts a new conversation; /exit or Ctrl-D ends; Ctrl-C stops an answer."
_STAND_IN = "0Q0Z1"  # in place of a message, to find it in the template's text; no template escapes it


@dataclass
class Conversation:
    """The messages of a conversation, and how the model answers.

    With a chat template the model sees all messages. Without one it continues the last text alone.
    """

    loaded: Loaded
    max_tokens: int
    temperature: float
    """0 takes the likeliest token each time."""
    system: str | None = None
    generator: str = "auto"
    messages: list[dict[str, str]] = field(default_factory=list)
    _takes_parts: bool | None = None
    """Whether the template takes content as a list of parts; None: not known yet."""

    def __post_init__(self) -> None:
        if self.loaded.has_heads and self.temperature:
            raise OptionError(
                f"--temperature {self.temperature:g}: heads decode the likeliest tokens; use --temperature 0 or "
                "--no-heads."
            )
        if not math.isfinite(self.temperature) or 0 < self.temperature < LEAST_TEMPERATURE:
            raise OptionError(
                f"--temperature {self.temperature:g}: it must be 0, for the likeliest token, or {LEAST_TEMPERATURE:g} "
                "and more."
            )
        if self.system is not None and not self.has_template:
            raise OptionError("--system needs a chat template, which this model's tokenizer lacks; leave it out.")
        if self.system is not None:
            check_text(self.system, "--system")
        self.answers = Answers(self.loaded, self.temperature, self.generator)
        self.reset()

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.loaded.tokenizer, "chat_template", None))

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, text: str) -> str:
        """Answer a message, and print the answer while it is generated.

        Returns:
            The answer.

        Raises:
            OptionError: the message is empty or not UTF-8 text, or leaves no room for an answer in the model's context.
            UsageError: the chat template fails, or the model cannot generate.
            KeyboardInterrupt: the user stopped the answer. The conversation is as before.
        """
        check_text(text, "the message")
        if not text.strip():
            raise OptionError("the message is empty; type some text.")
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self._encode(asked) if self.has_template else self.loaded.tokenizer(text)["input_ids"]
        if not ids:
            raise OptionError("the message is empty; type some text.")
        tokens = self.answers.write(list(ids), self._room(len(ids)))
        answer = str(self.loaded.tokenizer.decode(tokens, skip_special_tokens=True))
        if self.has_template:
            self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer

    # --- messages to tokens -------------------------------------------------------------------------------------------

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of the conversation. The special tokens in it are the template's and those of `--system`.

        A message that contains the text of special tokens would otherwise end its own turn and begin another.
        """
        tokenizer = self.loaded.tokenizer
        forged = [turn["role"] != "system" and self._has_special(turn["content"]) for turn in messages]
        if not any(forged):
            return list(tokenizer(self._render(messages), add_special_tokens=False)["input_ids"])
        salt = next(n for n in itertools.count() if not any(f"Z{n}" in turn["content"] for turn in messages))
        shown = [{**turn, "content": f"0Q{i}Z{salt}"} if forged[i] else turn for i, turn in enumerate(messages)]
        ids: list[int] = []
        parts = re.split(rf"0Q(\d+)Z{salt}", self._render(shown))  # text, number, text, number, ...
        for i, part in enumerate(parts):
            text = messages[int(part)]["content"] if i % 2 else part
            ids += tokenizer(text, add_special_tokens=False, split_special_tokens=bool(i % 2))["input_ids"]
        return ids

    def _has_special(self, text: str) -> bool:
        tokenizer = self.loaded.tokenizer
        as_text = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return bool(tokenizer(text, add_special_tokens=False)["input_ids"] != as_text)

    def warning(self, text: str) -> str | None:
        """A warning about a message that contains text with which the template marks turns; None for others."""
        if not self.has_template:
            return None
        found = sorted((text.index(marker), marker) for marker in self._markers() if marker in text)
        if not found:
            return None
        first = found[0][1]
        as_text = self.loaded.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        marks = set(self.loaded.tokenizer.all_special_ids)
        if self._has_special(text) and not marks.intersection(as_text):
            return f"the message contains {first!r}, which is read as plain text and not as a mark of the template"
        return f"the message contains {first!r}, with which the template marks turns; the model may read a turn in it"

    def _markers(self) -> set[str]:
        """The texts with which the template ends a turn and begins the next one."""
        turns = [{"role": role, "content": _STAND_IN} for role in ("user", "assistant", "user")]
        try:
            text = self._render(turns)
        except UsageError:  # the template may demand another order
            text = self._render(turns[:1])
        _, *between = text.split(_STAND_IN)
        lines = {line.strip() for part in between for line in part.splitlines()}
        special = {
            token for token in self.loaded.tokenizer.all_special_tokens if any(token in part for part in between)
        }
        return special | {line for line in lines if len(line) > 3}

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        """The messages as text. Raises UsageError if the template fails or leaves out the user's message."""
        if self._takes_parts is None:
            self._takes_parts = self._find_content()
        given = [_in_parts(turn) for turn in messages] if self._takes_parts else messages
        try:
            return render_chat(self.loaded.tokenizer, given, add_generation_prompt=True)
        except UsageError as error:
            hint = "; leave --system out if the model has no system message" if self.system is not None else ""
            raise UsageError(f"{error}{hint}") from None

    def _find_content(self) -> bool:
        """Whether the template shows only content that is a list, as those of models with images do.

        Raises:
            UsageError: The template shows neither that nor content that is text.
        """
        turn, failed = {"role": "user", "content": _STAND_IN}, None
        for takes_parts in (False, True):
            try:
                text = render_chat(
                    self.loaded.tokenizer, [_in_parts(turn) if takes_parts else turn], add_generation_prompt=True
                )
            except UsageError as error:
                failed = failed or error
                continue
            if turn["content"] in text and "'type'" not in text:
                return takes_parts
        raise failed or UsageError("the chat template leaves out the user's message; correct chat_template.jinja")

    # --- the answer ---------------------------------------------------------------------------------------------------

    def _room(self, used: int) -> int:
        """Tokens of the answer: `max_tokens`, or what the model's positions leave."""
        config = self.loaded.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if context is None:
            return self.max_tokens
        if used >= context:
            raise OptionError(f"the conversation has {used} tokens and the model takes {context}; type /reset.")
        return min(self.max_tokens, int(context) - used)


def _in_parts(turn: dict[str, str]) -> dict[str, Any]:
    return {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def check_text(text: str, what: str) -> None:
    """Raise OptionError for a text with bytes that are not UTF-8, which Python keeps as half characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"{what} is not UTF-8 text (character {error.start}); write it as UTF-8.") from None


def talk(conversation: Conversation) -> None:
    """Read messages from stdin until it ends, and answer each. A terminal gets a prompt and help.

    Raises:
        OptionError: stdin is closed or holds no message.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        print(HELP)
        if not conversation.has_template:
            print("The tokenizer has no chat template, so the model continues your text.")
    n_lines = 0
    for text in _lines(terminal):
        n_lines += 1
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
            continue
        try:
            answer(conversation, text)
        except KeyboardInterrupt:
            print("\n(stopped)")
        except OptionError as error:
            if not terminal:
                raise
            print(error)
    if not n_lines and not terminal:
        raise OptionError("stdin is closed or empty; write a message into it, or give --prompt.")


def answer(conversation: Conversation, text: str) -> None:
    """Answer a message. A warning about it goes to stderr, so that stdout has the answers alone."""
    check_text(text, "the message")
    if (warning := conversation.warning(text)) is not None:
        print(f"warning  {warning}", file=sys.stderr, flush=True)
    conversation.answer(text)


def _lines(terminal: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            if terminal:
                print()
            return
        except UnicodeDecodeError as error:
            raise OptionError(f"stdin is not UTF-8 text (byte {error.start}); write it as UTF-8.") from None
        if line.strip():
            yield line.strip()
