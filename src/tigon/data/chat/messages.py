"""Reads chat messages as people store them: OpenAI's, ShareGPT's, with tools, without content, in several parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tigon.data.documents import Message, string
from tigon.errors import DataError

_NAMES = {
    "user": "human user",
    "assistant": "gpt chatgpt bot model assistant function_call",
    "system": "system",
    "developer": "developer",
    "tool": "tool observation function ipython",
}
ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}
"""A role as people write it -> its name in chat templates."""
_FORMS = (("role", "from"), ("content", "value"))
"""OpenAI's and ShareGPT's names of the same key."""
_FORM_KEYS = ("role", "content", "from", "value")
IMAGE_PARTS = ("image", "image_url")
"""Types of the parts of a message that are images."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys that hold what the assistant thinks before it answers. Each chat template reads one of them."""
LEARNED = ("weight", "train", "loss")
"""Keys that say whether an assistant's turn is learned: OpenAI's and Axolotl's names."""


def read_messages(turns: object, where: str, *, learned: bool = True) -> tuple[Message, ...]:
    """OpenAI's `[{role, content}]` or ShareGPT's `[{from, value}]`.

    Args:
        turns: The list of a row.
        where: The row's file and line.
        learned: Whether the assistant's turns are learned.

    Raises:
        DataError: The list is not one of messages; the message begins with `where`.
    """
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise DataError(f'{where}: messages is not a list of turns; write [{{"role": ..., "content": ...}}]')
    return tuple(_message(turn, f"{where}: message {i}", learned) for i, turn in enumerate(turns))


def _message(turn: object, where: str, learned: bool) -> Message:
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} is {type(turn).__name__}, not an object with role and content")
    role_key, content_key = ("from", "value") if "from" in turn else ("role", "content")
    role = string(turn, role_key, where)
    if role not in ROLES:
        raise DataError(f"{where} has role {role!r}; known roles are {', '.join(ROLES)}")
    is_learned = _is_learned(turn, where)
    # Every other key goes to the chat template. `row_notes.py` names those that it does not write.
    if role_key == "from" and any(turn.get(name, turn[key]) != turn[key] for name, key in _FORMS if key in turn):
        raise DataError(f"{where} has from and value, and another role or content; keep one of the two forms")
    own = {*_FORM_KEYS, *LEARNED}
    more = {str(key): value for key, value in turn.items() if key not in own and value is not None}
    texts: tuple[str, ...] = ()
    if "tool_calls" in more:
        more["tool_calls"], texts = _tool_calls(more["tool_calls"], where)
    if turn.get(content_key) is None and more.get("tool_calls"):
        content = ""  # `content: null` stands beside tool_calls, and transformers takes keys with null away
    else:
        content = _content(turn, content_key, where)
    return Message(ROLES[role], content, more, learned and is_learned, argument_texts=texts)


def _is_learned(turn: Mapping[str, Any], where: str) -> bool:
    """Whether the turn is learned if it is the assistant's.

    Raises:
        DataError: A key says neither yes nor no, such as `weight: 0.5`.
    """
    for key in LEARNED:
        if (value := turn.get(key)) is not None and value not in (0, 1):
            raise DataError(
                f"{where}: {key} is {value!r}; write 0 or false for an answer that is not learned, and 1 or true for "
                "one that is"
            )
    return all(turn.get(key) in (None, 1) for key in LEARNED)


def _content(turn: Mapping[str, Any], key: str, where: str) -> str:
    """The text of a message. Parts of text are joined; other parts, such as images, are refused."""
    parts = turn.get(key)
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        return string(turn, key, where)
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            fix = "set data.images to the most images of a row" if kind in IMAGE_PARTS else "remove it"
            raise DataError(f"{where}: {key} has a part of type {kind!r}, and only text is trained on; {fix}")
        texts.append(string(part, "text", where))
    return "".join(texts)


def _tool_calls(calls: object, where: str) -> tuple[list[Any], tuple[str, ...]]:
    """The calls with arguments as mappings, and the arguments as JSON text.

    OpenAI writes arguments as JSON text, and most templates take mappings.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise DataError(f"{where}: tool_calls is {type(calls).__name__}, not a list of calls")
    read: list[Any] = []
    texts: list[str] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f'{where}: a tool call has no function name; write {{"function": {{"name": ...}}}}')
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
        if isinstance(arguments, str) and arguments.strip():
            arguments = _parsed(arguments, f"{where}: arguments of {function['name']}")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments, text = {}, "{}"  # a call without arguments, as some write it
        texts.append(text)
        function = {**function, "arguments": arguments}
        read.append(
            {**call, "function": function} if "function" in call else {"type": "function", "function": function}
        )
    return read, tuple(texts)


def read_tools(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    """The column `tools`: a list of JSON schemas, or that list as JSON text, which parquet files often hold."""
    tools = row.get("tools")
    if tools is None or tools == "":
        return ()
    if isinstance(tools, str):
        tools = _parsed(tools, f"{where}: tools")
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not all(isinstance(t, Mapping) for t in tools):
        raise DataError(f"{where}: tools is {type(tools).__name__}, not a list of objects that describe functions")
    return tuple(tools)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is text, but not valid JSON: {str(error)[:120]}; fix or remove the row") from None


def without_filled_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of an Arrow table without the nulls that Arrow filled in.

    Arrow gives every object all keys that any row has, with null where a row has none. A null that the row itself had
    cannot be told apart. JSONL has no such nulls, so its rows keep theirs.
    """
    return {name: _without_nulls(value) if name in _NESTED else value for name, value in row.items()}


_NESTED = ("messages", "conversations", "prompt", "completion", "chosen", "rejected", "tools")
"""Columns with messages or tools."""


def _without_nulls(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_without_nulls(item) for item in value]
    return value
