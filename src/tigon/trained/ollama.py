"""An Ollama Modelfile: the chat template in Ollama's own language, stop tokens, and sampling parameters.

Ollama does not run the Jinja template of a GGUF file. It compares it with templates that it knows, and takes the bare
prompt for any other, without a message. So the Modelfile has the template as Ollama writes it, found by rendering
chats: each turn is the text before its content, the content, and the text after it. The result must give each chat as
the Jinja template does, or it is left out and the user is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tigon.data.chat.chat_template import has_template
from tigon.data.chat.render_chat import render_chat
from tigon.errors import UsageError
from tigon.trainer.evaluation.generate import end_tokens

FILE = "Modelfile"
OLLAMAS_CONTEXT = 4096
"""Tokens of context if a Modelfile does not say otherwise."""
_STAND_INS = ("0Q0Z1", "1Q1Z1", "2Q2Z1", "3Q3Z1")
_PARAMETERS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}  # fmt: skip
"""Of a generation config -> of Ollama."""


@dataclass(frozen=True)
class Modelfile:
    """Its text, and what the user should know about it."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turns:
    """A chat template whose chats are their turns in a row."""

    around: dict[str, tuple[str, str]]
    """The text before and after the content of each role that the template has."""
    start: str
    """The text before the first turn."""
    prompt: str
    """The text that asks for an answer."""
    system: str | None = None
    """The system message of chats without one."""

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """A chat that asks for an answer."""
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        turns = [self.around[m["role"]][0] + m["content"] + self.around[m["role"]][1] for m in messages]
        return self.start + "".join(turns) + self.prompt

    def in_go(self) -> str:
        """The template in Go's language, as Ollama takes it."""
        branches = [
            f'{{{{ {"else if" if i else "if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for i, (role, (before, after)) in enumerate(self.around.items())
        ]
        return f"{self.start}{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{{{{ end }}}}{self.prompt}"

    def fits_modelfile(self) -> bool:
        """Whether Go reads the fixed text as text, and the Modelfile its quotes as its own."""
        fixed = (self.start, self.prompt, *(text for pair in self.around.values() for text in pair))
        # A brace before `{{ .Content }}` would make it another action.
        opens_action = any("{{" in text or text.endswith("{") for text in fixed)
        return not opens_action and '"""' not in "".join(fixed) + (self.system or "")


def modelfile(model: Any, tokenizer: Any, file: str) -> Modelfile:
    """The Modelfile of a GGUF file.

    Args:
        model: The model, for its context and its generation config.
        tokenizer: Its tokenizer, for the chat template.
        file: The name of the GGUF file in the same folder.
    """
    lines, notes = [f"FROM ./{file}"], []
    if has_template(tokenizer):
        turns = turns_of(tokenizer)
        if turns is not None and _adds_bos(tokenizer):  # Ollama adds it, as the GGUF file says
            turns = replace(turns, start=turns.start.removeprefix(tokenizer.bos_token))
        if turns is None or not turns.fits_modelfile():
            reason = (
                "is not turns in a row" if turns is None else 'holds braces or """ that a Modelfile reads otherwise'
            )
            notes.append(
                f"warning    the chat template {reason}, so the Modelfile has no TEMPLATE; without one "
                "Ollama may take the bare prompt; write it by https://docs.ollama.com/modelfile"
            )
        else:
            lines.append(f'TEMPLATE """{turns.in_go()}"""')
            lines += [f'SYSTEM """{turns.system}"""'] if turns.system is not None else []
    else:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    lines += [f"PARAMETER stop {_quoted(tokenizer.decode([i]))}" for i in end_tokens(model, tokenizer)]
    config = model.generation_config
    sampled = {theirs: getattr(config, ours, None) for ours, theirs in _PARAMETERS.items()}
    if not getattr(config, "do_sample", False):
        lines.append("# The generation config does not sample, so the likeliest token is taken each time.")
        sampled = {"temperature": 0, "repeat_penalty": sampled["repeat_penalty"] or 1.0}
    lines += [f"PARAMETER {name} {value:g}" for name, value in sampled.items() if value is not None]
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and context < OLLAMAS_CONTEXT:
        lines.append(f"PARAMETER num_ctx {context}")
    return Modelfile("\n".join([*lines, ""]), tuple(notes))


def _adds_bos(tokenizer: Any) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def model_name(folder: str) -> str:
    """A name that Ollama takes, made of a folder's."""
    return re.sub(r"[^a-z0-9._-]+", "-", folder.lower()).strip("-._") or "model"


def turns_of(tokenizer: Any) -> Turns | None:
    """The template as turns in a row; None if it has another form, for example one that counts turns."""
    try:
        return _turns_of(tokenizer)
    except (UsageError, ValueError, KeyError):
        return None


def _turns_of(tokenizer: Any) -> Turns | None:
    user, again = ({"role": "user", "content": text} for text in (_STAND_INS[0], _STAND_INS[2]))
    answer = {"role": "assistant", "content": _STAND_INS[1]}
    chat = [user, answer, again]
    text = render_chat(tokenizer, chat, add_generation_prompt=False)
    before, between, rest, end = _parts(text, chat)
    prompt = render_chat(tokenizer, chat, add_generation_prompt=True).removeprefix(text)
    # What stands between user and answer begins as the text after the last user's content does.
    if not between.startswith(end):
        return None
    # An answer mostly ends as a question does. Otherwise what both questions begin with is the question's.
    opening = rest[len(end) :] if end and rest.startswith(end) else _common_end(before, rest)
    if not before.endswith(opening):
        return None
    around = {"user": (opening, end), "assistant": (between[len(end) :], rest[: len(rest) - len(opening)])}
    turns = Turns(around, before[: len(before) - len(opening)], prompt)
    turns = _with_system(turns, tokenizer, user)
    return turns if all(_agrees(turns, tokenizer, each) for each in _chats(turns, chat)) else None


def _with_system(turns: Turns, tokenizer: Any, user: dict[str, str]) -> Turns:
    """The turns with that of the system, if the template has one, and with its default system message."""
    system = {"role": "system", "content": _STAND_INS[3]}
    try:
        before, after, _ = _parts(render_chat(tokenizer, [system, user], add_generation_prompt=False), [system, user])
    except (UsageError, ValueError):
        return turns
    opening, _ = turns.around["user"]
    if not after.endswith(opening):
        raise ValueError("the user's turn after a system message begins otherwise")
    after = after[: len(after) - len(opening)]
    default, start = None, turns.start
    if start.startswith(before) and start.endswith(after) and len(start) > len(before) + len(after):
        default, start = start[len(before) : len(start) - len(after)], ""
    elif before.startswith(start):
        before = before[len(start) :]
    return Turns({"system": (before, after), **turns.around}, start, turns.prompt, default)


def _chats(turns: Turns, chat: list[dict[str, str]]) -> list[list[dict[str, str]]]:
    chats = [chat[:1], chat]
    if "system" in turns.around:
        system = {"role": "system", "content": _STAND_INS[3]}
        chats += [[system, *chat[:1]], [system, *chat]]
    return chats


def _agrees(turns: Turns, tokenizer: Any, chat: list[dict[str, str]]) -> bool:
    return turns.render(chat) == render_chat(tokenizer, chat, add_generation_prompt=True)


def _parts(text: str, chat: Sequence[dict[str, str]]) -> list[str]:
    """The text between the contents of a chat's turns. Raises ValueError if a content is not there once."""
    parts = []
    for message in chat:
        part, found, text = text.partition(message["content"])
        if not found or message["content"] in text:
            raise ValueError("a content is not in the text once")
        parts.append(part)
    return [*parts, text]


def _common_end(one: str, other: str) -> str:
    n = 0
    while n < min(len(one), len(other)) and one[len(one) - 1 - n] == other[len(other) - 1 - n]:
        n += 1
    return one[len(one) - n :]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
