"""The texts of `eval.generate`: what the model writes for a few prompts, as training goes on.

Every text is a record `generate` in metrics.jsonl. A prompt is continued with the likeliest token each time, so that
two texts differ only if the model does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from tigon.data.render_chat import render_chat
from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe
from tigon.trainer import model as models
from tigon.trainer.guards import preflight
from tigon.trainer.run_folder import RunFolder

EVENT = "generate"
BEFORE, BEST = "before training", "the best checkpoint"


@dataclass(frozen=True)
class Prompt:
    """A prompt as the recipe has it, and its tokens with the chat template around it."""

    text: str
    tokens: tuple[int, ...]


def prompts_of(recipe: Recipe, tokenizer: Any, config: Any, *, as_chat: bool) -> tuple[Prompt, ...]:
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


class Generations(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Writes the texts before training and after each evaluation; `finish` writes those of the trained model."""

    def __init__(
        self, run: RunFolder, prompts: Sequence[Prompt], n_tokens: int, tokenizer: Any,
        announce: Callable[[str], None], restart_clock: Callable[[], None],
    ) -> None:  # fmt: skip
        """Make the callback.

        Args:
            run: The run folder.
            prompts: The result of `prompts_of`.
            n_tokens: Most tokens of a text.
            tokenizer: The tokenizer of the run.
            announce: Prints a line.
            restart_clock: Called after texts, so that tokens/s does not count their time.
        """
        self._run = run
        self._prompts = prompts
        self._n_tokens = n_tokens
        self._tokenizer = tokenizer
        self._announce = announce
        self._restart_clock = restart_clock
        self._last_step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._write(model, 0, BEFORE)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._write(model, state.global_step, f"step {state.global_step}")

    def finish(self, model: Any, step: int, best_step: int | None) -> None:
        """Write the texts of the trained model, unless the last evaluation has written them.

        Args:
            model: The trained model.
            step: The last step.
            best_step: The step of the checkpoint that was loaded at the end; None: the weights are the last step's.
        """
        if best_step is not None and best_step != step:
            self._write(model, step, f"step {best_step}, {BEST}")
        elif self._last_step != step:
            self._write(model, step, f"step {step}")

    def _write(self, model: Any, step: int, label: str) -> None:
        for prompt in self._prompts:
            text = models.continuation(model, self._tokenizer, list(prompt.tokens), self._n_tokens)
            self._run.append({"event": EVENT, "step": step, "label": label, "prompt": prompt.text, "text": text})
            self._announce(f"generate {label}: {prompt.text!r} -> {text!r}")
        self._last_step = step
        self._restart_clock()


def texts_of(records: Sequence[Any]) -> list[dict[str, Any]]:
    """For the report: each prompt with its texts, as (label, text), in the order of training."""
    by_prompt: dict[str, list[dict[str, str]]] = {}
    for record in records:
        if record["event"] == EVENT and all(isinstance(record.get(k), str) for k in ("prompt", "label", "text")):
            shown = record["text"] if record["text"].strip() else repr(record["text"])  # line breaks alone, or nothing
            by_prompt.setdefault(record["prompt"], []).append({"label": record["label"], "text": shown})
    return [{"prompt": prompt, "texts": texts} for prompt, texts in by_prompt.items()]
