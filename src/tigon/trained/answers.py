"""Writes the tokens of an answer, and prints them meanwhile: tigon's generator, transformers' `generate`, or heads."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from tigon import medusa
from tigon.errors import OptionError, TigonError, UsageError, one_line
from tigon.models.decoding.generation_config import objection, settings_of
from tigon.trained.load import Loaded
from tigon.trainer.evaluation.generate import end_tokens, generated

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TextStreamer

GENERATORS = ("auto", "tigon", "transformers")


class Answers:
    """Writes answers with one model.

    Args:
        loaded: The model and its tokenizer.
        temperature: 0 takes the likeliest token each time.
        generator: auto: tigon's generator on a GPU if it knows the model and its generation config.

    Raises:
        OptionError: generator has another value, or cannot write this model's answers.
    """

    def __init__(self, loaded: Loaded, temperature: float, generator: str = "auto") -> None:
        if generator not in GENERATORS:
            raise OptionError(f"--generator {generator}: it must be one of {', '.join(GENERATORS)}.")
        self.loaded, self.temperature = loaded, temperature
        self.ends = end_tokens(loaded.model, loaded.tokenizer)
        self.note: str | None = None
        """A line on why transformers writes where tigon's generator would; None if there is nothing to say."""
        self.by_generator = False
        if generator != "auto" and loaded.has_heads:
            raise OptionError(
                f"--generator {generator} cannot write the answers: heads decode several tokens at once; "
                "use --no-heads."
            )
        if generator == "transformers" or (generator == "auto" and (loaded.has_heads or not _on_gpu(loaded.model))):
            return
        reason = self._obstacle()
        if reason is not None and generator == "tigon":
            raise OptionError(f"--generator tigon cannot write the answers: {reason}; use --generator transformers.")
        self.by_generator = reason is None
        self.note = None if reason is None else f"transformers' generate writes the answers, because {reason}"

    def write(self, prompt: list[int], new_tokens: int) -> list[int]:
        """At most this many tokens after the prompt.

        Raises:
            UsageError: The model cannot generate, or its logits are not finite.
            KeyboardInterrupt: The user stopped the answer.
        """
        from transformers import TextStreamer

        streamer = TextStreamer(self.loaded.tokenizer, skip_prompt=not self.by_generator, skip_special_tokens=True)
        try:
            if self.by_generator:
                return self._generator(prompt, new_tokens, streamer)
            return self._heads_or_transformers(prompt, new_tokens, streamer)
        except (TigonError, OSError):
            raise
        except Exception as error:  # generation_config.json can ask for anything
            raise UsageError(
                f"the model cannot generate: {one_line(error)}; check its generation_config.json"
            ) from None

    def _obstacle(self) -> str | None:
        """Why tigon's generator cannot write the answers, in one clause."""
        from tigon.models.decoding.self_check import refusal  # loads transformers

        return objection(self.loaded.model.generation_config) or refusal(self.loaded.model)

    def _generator(self, prompt: list[int], new_tokens: int, streamer: TextStreamer) -> list[int]:
        from tigon.models.decoding.generator import generate  # loads transformers

        config = copy.deepcopy(self.loaded.model.generation_config)
        config.max_new_tokens, config.eos_token_id = new_tokens, self.ends
        config.do_sample, config.temperature = bool(self.temperature), self.temperature
        n_written = len(prompt)

        def show(tokens: list[int], logprobs: list[float]) -> None:
            nonlocal n_written
            if not torch.isfinite(torch.tensor(logprobs)).all():
                raise _nonfinite(n_written, self.loaded.model.dtype)
            n_written += len(tokens)
            streamer.put(torch.tensor(tokens))

        written = generate(self.loaded.model, [prompt], *settings_of(config), show=show)
        streamer.end()
        return written.tokens[0]

    def _heads_or_transformers(self, prompt: list[int], new_tokens: int, streamer: TextStreamer) -> list[int]:
        from transformers import LogitsProcessorList

        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        if self.loaded.has_heads:
            ids_1T = torch.tensor([prompt], device=next(model.parameters()).device)
            made = medusa.medusa_generate(
                model, ids_1T, max_new_tokens=new_tokens, eos_token_id=tokenizer.eos_token_id, streamer=streamer
            )
            return made.tokens
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        checks = LogitsProcessorList([_refuse_nonfinite])
        options: dict[str, Any] = {"eos_token_id": self.ends or None, "logits_processor": checks, **sampling}
        return generated(model, tokenizer, prompt, new_tokens, streamer=streamer, **options)


def _on_gpu(model: PreTrainedModel) -> bool:
    return str(next(model.parameters()).device.type) == "cuda"


def _refuse_nonfinite(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A logits processor of `generate` that changes nothing. -inf is a token that the model rules out.

    Raises:
        UsageError: A logit is NaN or +inf, or all are -inf; the likeliest token would be an arbitrary one.
    """
    if not bool(torch.isfinite(logits.amax(-1)).all()):
        raise _nonfinite(ids.shape[1], logits.dtype)
    return logits


def _nonfinite(n_tokens: int, dtype: torch.dtype) -> UsageError:
    return UsageError(
        f"the logits after {n_tokens} tokens are not finite (NaN or infinite); the weights are damaged, or too "
        f"large for {str(dtype).removeprefix('torch.')}"
    )
