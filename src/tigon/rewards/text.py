"""Rewards from the text of a completion: the exact answer, the format, the length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

Completion = str | list[dict[str, Any]]
"""Text, or messages, as TRL gives the completions of rows of text or of messages."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def text_of(completion: Completion) -> str:
    """The text of a completion; of messages, the content of the last one."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


def exact_answer(
    completions: Sequence[Completion], answer: Sequence[object], *, pattern: str | None = None, **columns: object
) -> list[float]:
    """1 for each completion whose answer is that of the row, otherwise 0. Numbers are compared by value.

    Args:
        completions: The completions.
        answer: The column `answer` of the rows.
        pattern: A regular expression. Its last match, or the group of that match, is the completion's answer. None: the
            last number of the text if the row's answer is a number, otherwise the whole text.
        columns: The other columns, which are ignored.
    """
    finds = None if pattern is None else re.compile(pattern)
    return [
        float(_is_equal(_answer_in(text_of(completion), str(wanted), finds), str(wanted)))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def answer_format(
    completions: Sequence[Completion], *, pattern: str = r"<think>.+</think>.+", **columns: object
) -> list[float]:
    """1 for each completion that matches the pattern as a whole, otherwise 0.

    Args:
        completions: The completions.
        pattern: A regular expression, in which `.` also matches line breaks. Spaces around the text are ignored.
        columns: The columns of the rows, which are ignored.
    """
    wanted = re.compile(pattern, re.DOTALL)
    return [float(wanted.fullmatch(text_of(completion).strip()) is not None) for completion in completions]


def length(
    completions: Sequence[Completion], completion_ids: Sequence[Sequence[int]], *, most: int, **columns: object
) -> list[float]:
    """1 for each completion of at most `most` tokens, falling linearly to 0 at twice as many.

    Args:
        completions: The completions.
        completion_ids: Their tokens, which TRL passes beside the columns.
        most: Tokens up to which the reward is 1.
        columns: The columns of the rows, which are ignored.

    Raises:
        ValueError: `most` is not above 0.
    """
    if not most > 0:
        raise ValueError(f"most is {most}; it must be above 0")
    return [min(1.0, max(0.0, 2.0 - len(ids) / most)) for ids in completion_ids]


def _answer_in(text: str, wanted: str, pattern: re.Pattern[str] | None) -> str:
    if pattern is None and _number(wanted) is None:
        return text
    matches = list((pattern or _NUMBER).finditer(text))
    if not matches:
        return ""
    last = matches[-1]
    return (last[1] if last.re.groups else last[0]) or ""


def _is_equal(found: str, wanted: str) -> bool:
    number = _number(wanted)
    if number is not None:
        return _number(found) == number
    return found.strip() == wanted.strip()


def _number(text: str) -> Decimal | None:
    """The finite number that a text is, with or without commas between thousands; None if it is none."""
    try:
        number = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
