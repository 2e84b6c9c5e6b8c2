"""Reads chat messages as people store them: OpenAI's, ShareGPT's, with tools, without content, in several parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tigon.data.documents import Message, string
from tigon.errors import DataError

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
         "system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool",
         "observation": "tool", "function": "tool", "ipython": "tool", "function_call": "assistant"}  # fmt: skip
IMAGE_PARTS = ("image", "image_url")
"""Types of the parts of a message that are images."""
MORE = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
"""Keys of a message besides role and content that chat templates know."""


def read_messages(turns: Any, where: str, *, learned: bool = True) -> tuple[Message, ...]:
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


def _message(turn: Any, where: str, learned: bool) -> Message:
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} is {type(turn).__name__}, not an object with role and content")
    role_key, content_key = ("from", "value") if "from" in turn else ("role", "content")
    role = string(turn, role_key, where)
    if role not in ROLES:
        raise DataError(f"{where} has role {role!r}; known roles are {', '.join(ROLES)}")
    more = {key: without_nulls(turn[key]) for key in MORE if turn.get(key) is not None}
    if "tool_calls" in more:
        more["tool_calls"] = _tool_calls(more["tool_calls"], where)
    if turn.get(content_key) is None and more.get("tool_calls"):
        content = ""  # `content: null` stands beside tool_calls; templates take both as no text
    else:
        content = _content(turn, content_key, where)
    return Message(ROLES[role], content, more, learned and _is_learned(turn))


def _is_learned(turn: Mapping[str, Any]) -> bool:
    """OpenAI's fine-tuning format has `weight: 0` for an assistant's turn that is not learned."""
    return turn.get("weight") != 0


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


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """The calls, with arguments as mappings. OpenAI writes arguments as JSON text, and templates write them as JSON."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise DataError(f"{where}: tool_calls is {type(calls).__name__}, not a list of calls")
    read: list[Any] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f'{where}: a tool call has no function name; write {{"function": {{"name": ...}}}}')
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"{where}: arguments of {function['name']}")
        function = {**function, "arguments": arguments}
        read.append(
            {**call, "function": function} if "function" in call else {"type": "function", "function": function}
        )
    return read


def read_tools(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    """The column `tools`: a list of JSON schemas, or that list as JSON text, which parquet files often hold."""
    tools = row.get("tools")
    if tools is None or tools == "":
        return ()
    if isinstance(tools, str):
        tools = _parsed(tools, f"{where}: tools")
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not all(isinstance(t, Mapping) for t in tools):
        raise DataError(f"{where}: tools is {type(tools).__name__}, not a list of objects that describe functions")
    return tuple(without_nulls(tool) for tool in tools)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is text, but not valid JSON: {str(error)[:120]}; fix or remove the row") from None


def without_nulls(value: Any) -> Any:
    """The value without keys whose value is None. Parquet gives every object all keys that any row has."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [without_nulls(item) for item in value]
    return value
