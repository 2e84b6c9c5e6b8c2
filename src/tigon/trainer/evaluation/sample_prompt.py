"""The prompt of the report's text sample, if the recipe gives none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tigon.data.tokenizer import IGNORE_INDEX

TEXT_TOKENS = 24
"""Tokens of plain text that the sample continues."""


def prompt_of(examples: Iterable[tuple[Sequence[int], Sequence[int]]], room: int | None) -> list[int]:
    """The tokens before the first learned one, so that the model writes an answer; of plain text, the first tokens.

    Args:
        examples: (tokens, labels) of samples, in order of preference. The first whose prompt has room is taken.
        room: The most tokens of a prompt, so that the model has positions for its answer; None: no limit.

    Returns:
        The prompt. If none has room, it is the end of the first one, at least as many tokens as of text.
    """
    first: list[int] = []
    for tokens, labels in examples:
        n_read = next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), len(labels))
        # Nothing predicts the first token of plain text, so it is not learned either.
        prompt = list(tokens[: n_read if n_read > 1 else TEXT_TOKENS])
        if room is None or len(prompt) <= room:
            return prompt
        first = first or prompt
    return first[-max(TEXT_TOKENS, room or 0) :]
