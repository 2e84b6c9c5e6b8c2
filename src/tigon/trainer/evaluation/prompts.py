"""The prompts of a run: those of `eval.generate`, and that of the text sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tigon.data import documents, images, preferences, tokenizer
from tigon.data.chat import chat_template
from tigon.data.chat.render_chat import render_chat
from tigon.data.tokenizer import IGNORE_INDEX
from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe
from tigon.trainer.guards import preflight
from tigon.trainer.run_data import RunData

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from tigon.data.tokenizer import Encoded

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


def sample_prompt(data: RunData, config: PreTrainedConfig) -> list[int]:
    """The tokens that the text sample continues: the recipe's, or those of a sample before its answer."""
    recipe, sample = data.recipe, data.shown_samples[0]
    if text := recipe.output.sample_prompt:
        return [int(i) for i in data.tokens.tokenizer(text)["input_ids"]]
    if isinstance(sample, images.PicturedSample):  # its images go with its tokens
        return prompt_of([(sample.tokens_T.tolist(), sample.labels_T.tolist())], None)
    limit = preflight.most_positions(config)
    room = None if limit is None else max(1, limit - recipe.output.sample_tokens)
    pairs = [(row.tokens, row.labels) for row in _answered(data)]
    samples = ((each.tokens_T.tolist(), each.labels_T.tolist()) for each in data.shown_samples)
    return prompt_of(pairs or samples, room)


def _answered(data: RunData) -> list[Encoded]:
    """The first row with only its answers learned, if the samples do not say where an answer begins."""
    tokens = data.tokens
    if data.recipe.data.learn != "all" or data.rows is not None or tokens.processor is not None:
        return []
    first = (tokens.source.evaluated or tokens.source.train)[0]
    marks = replace(tokens.rendering, learn="answers")
    return tokenizer.encode([first], tokens.tokenizer, bad=documents.BadRows("skip"), rendering=marks)


def as_chat(data: RunData) -> bool:
    """Whether a prompt becomes the user's turn of a chat, as in the run's rows.

    A tokenizer without a chat template gets the plain headers by which the rows of messages were encoded.
    """
    first, tokens = data.tokens.source.read[0], data.tokens
    tok, rendering = tokens.tokenizer, tokens.rendering
    if data.rows is not None:
        is_chat = preferences.is_chat(first)
    elif is_chat := chat_template.is_chat(first, tok, rendering):
        tok.chat_template = tok.chat_template or chat_template.PLAIN_HEADERS
    return is_chat and rendering.template != "plain" and chat_template.has_template(tok)


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
