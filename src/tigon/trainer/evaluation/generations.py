"""The texts of `eval.generate`: what the model writes for a few prompts, as training goes on.

Every text is a record `generate` in metrics.jsonl. A prompt is continued with the likeliest token each time, so that
two texts differ only if the model does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState

from tigon.trainer.evaluation.generate import end_tokens, generated
from tigon.trainer.evaluation.prompts import Prompt
from tigon.trainer.folder.run_folder import RunFolder

if TYPE_CHECKING:
    from tigon.trainer.prepare import Prepared

EVENT = "generate"
BEFORE, BEST = "before training", "the best checkpoint"


class Generations(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Writes the texts before training and after each evaluation; `finish` writes those of the trained model."""

    def __init__(
        self, run: RunFolder, prepared: Prepared, announce: Callable[[str], None], restart_clock: Callable[[], None]
    ) -> None:
        """Make the callback.

        Args:
            run: The run folder.
            prepared: The run.
            announce: Prints a line.
            restart_clock: Called after texts, so that tokens/s does not count their time.
        """
        self._run = run
        self._prepared = prepared
        self._announce = announce
        self._restart_clock = restart_clock
        self._last_step = -1

    def on_train_begin(
        self, args: object, state: TrainerState, control: object, model: PreTrainedModel | None = None, **kwargs: object
    ) -> None:
        if state.global_step == 0:
            self._write(model, 0, BEFORE)

    def on_evaluate(
        self, args: object, state: TrainerState, control: object, model: PreTrainedModel | None = None, **kwargs: object
    ) -> None:
        self._write(model, state.global_step, f"step {state.global_step}")

    def finish(self, model: PreTrainedModel, step: int, best_step: int | None) -> None:
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

    def _write(self, model: PreTrainedModel, step: int, label: str) -> None:
        run = self._prepared
        for prompt in run.prompts:
            text = _likeliest(model, run.tokenizer, prompt, run.recipe.eval.generate_tokens)
            self._run.append({"event": EVENT, "step": step, "label": label, "prompt": prompt.text, "text": text})
            self._announce(f"generate {label}: {prompt.text!r} -> {text!r}")
        self._last_step = step
        self._restart_clock()


def _likeliest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, n_tokens: int) -> str:
    """The likeliest text after a prompt, up to the token that ends a text."""
    # None unsets what a checkpoint's own generation config sets for sampling.
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if ends := end_tokens(model, tokenizer):
        options["eos_token_id"] = ends
    tokens = generated(model, tokenizer, list(prompt.tokens), n_tokens, **options)
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def texts_of(records: Sequence[Any]) -> list[dict[str, Any]]:
    """For the report: each prompt with its texts, as (label, text), in the order of training."""
    by_prompt: dict[str, list[dict[str, str]]] = {}
    for record in records:
        if record["event"] == EVENT and all(isinstance(record.get(k), str) for k in ("prompt", "label", "text")):
            shown = record["text"] if record["text"].strip() else repr(record["text"])  # line breaks alone, or nothing
            by_prompt.setdefault(record["prompt"], []).append({"label": record["label"], "text": shown})
    return [{"prompt": prompt, "texts": texts} for prompt, texts in by_prompt.items()]
