"""The prompts of a run: those of `eval.generate`, and that of the text sample if the recipe gives none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tigon.data.chat.render_chat import render_chat
from tigon.data.tokenizer import IGNORE_INDEX
from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe
from tigon.trainer.guards import preflight

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

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


@dataclass(frozen=True)
class Prompt:
    """A prompt as the recipe has it, and its tokens with the chat template around it."""

    text: str
    tokens: tuple[int, ...]


def prompts_of(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, *, as_chat: bool
) -> tuple[Prompt, ...]:
    """The prompts of `eval.generate`.

    Args:
        recipe: The recipe of the run.
        tokenizer: Its tokenizer.
        config: The model's config.
        as_chat: Whether a prompt becomes the user's turn of a chat, as in the run's rows.

    Raises:
        RecipeError: A prompt leaves no room for its continuation in the model's positions.
        UsageError: The chat template fails.
    """
    prompts = []
    limit, n_new = preflight.most_positions(config), recipe.eval.generate_tokens
    for text in recipe.eval.generate:
        if as_chat:
            chat = [{"role": "user", "content": text}]
            rendered = render_chat(tokenizer, chat, add_generation_prompt=True)
            tokens = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        else:
            tokens = tokenizer(text)["input_ids"]
        if limit is not None and len(tokens) + n_new > limit:
            raise RecipeError(
                f"eval.generate: {text[:40]!r} has {len(tokens)} tokens, and with eval.generate_tokens {n_new} they "
                f"exceed the {limit} that {recipe.model.name} takes; shorten the prompt, or lower eval.generate_tokens"
            )
        prompts.append(Prompt(text, tuple(tokens)))
    return tuple(prompts)
