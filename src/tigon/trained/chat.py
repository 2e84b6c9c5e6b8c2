"""A conversation with a trained model in the terminal. The answer is printed while it is generated."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tigon import medusa
from tigon.errors import OptionError
from tigon.trained.load import Loaded

DEFAULT_TEMPERATURE = 0.7
HELP = "Type a message. /reset starts a new conversation; /exit or Ctrl-D ends; Ctrl-C stops an answer."


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
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.loaded.has_heads and self.temperature:
            raise OptionError(
                f"--temperature {self.temperature:g}: heads decode the likeliest tokens; use --temperature 0 or "
                "--no-heads."
            )
        if self.system is not None and not self.has_template:
            raise OptionError("--system needs a chat template, which this model's tokenizer lacks; leave it out.")
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
            OptionError: the conversation leaves no room for an answer in the model's context.
            KeyboardInterrupt: the user stopped the answer. The conversation is as before.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids_1T = self._encode(asked, text)
        tokens = self._generate(ids_1T, self._room(ids_1T.shape[1]))
        answer = str(self.loaded.tokenizer.decode(tokens, skip_special_tokens=True))
        if self.has_template:
            self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer

    def _encode(self, messages: list[dict[str, str]], text: str) -> torch.Tensor:
        tokenizer = self.loaded.tokenizer
        if self.has_template:
            rendered = _rendered(tokenizer, messages)
            if text.strip() not in rendered:  # a template of a model with images may leave out content that is no list
                parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
                rendered = _rendered(tokenizer, parts)
            ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(text)["input_ids"]
        if not ids:
            raise OptionError("the message is empty; type some text.")
        return torch.tensor([ids], device=next(self.loaded.model.parameters()).device)

    def _room(self, used: int) -> int:
        """Tokens of the answer: `max_tokens`, or what the model's positions leave."""
        config = self.loaded.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if context is None:
            return self.max_tokens
        if used >= context:
            raise OptionError(f"the conversation has {used} tokens and the model takes {context}; type /reset.")
        return min(self.max_tokens, int(context) - used)

    def _generate(self, ids_1T: torch.Tensor, room: int) -> list[int]:
        from transformers import TextStreamer

        tokenizer, model = self.loaded.tokenizer, self.loaded.model
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        ends = _end_tokens(model, tokenizer)
        if self.loaded.has_heads:
            made = medusa.medusa_generate(
                model, ids_1T, max_new_tokens=room, eos_token_id=tokenizer.eos_token_id, streamer=streamer
            )
            return made.tokens
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        with torch.no_grad():
            ids = model.generate(
                input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=room, streamer=streamer,
                use_cache=True, eos_token_id=ends or None,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0],
                **sampling,
            )  # fmt: skip
        return list(ids[0, ids_1T.shape[1] :].tolist())


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The ids that end an answer: those of the generation config, and the tokenizer's."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return [i for i in dict.fromkeys([*ids, tokenizer.eos_token_id]) if i is not None]


def talk(conversation: Conversation) -> None:
    """Read messages from stdin until it ends, and answer each. A terminal gets a prompt and help."""
    terminal = sys.stdin.isatty()
    if terminal:
        print(HELP)
        if not conversation.has_template:
            print("The tokenizer has no chat template, so the model continues your text.")
    for text in _lines(terminal):
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
            continue
        try:
            conversation.answer(text)
        except KeyboardInterrupt:
            print("\n(stopped)")
        except OptionError as error:
            if not terminal:
                raise
            print(error)


def _lines(terminal: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            if terminal:
                print()
            return
        if line.strip():
            yield line.strip()


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
