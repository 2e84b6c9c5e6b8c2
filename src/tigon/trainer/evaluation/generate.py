"""Generates text with the model of a run, and writes the report's text sample before and after training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tigon.trainer.distributed import launch

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tigon.trainer.prepare import Prepared


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end an answer: those of the generation config, and the tokenizer's."""
    # A reward model has no generation config.
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return [i for i in dict.fromkeys([*ids, tokenizer.eos_token_id]) if i is not None]


def generated(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: list[int], n_tokens: int, **options: Any
) -> list[int]:
    """The tokens after `prompt`. options: More options of the model's `generate`."""
    device, was_training = next(model.parameters()).device, model.training
    pads = (tokenizer.pad_token_id, *end_tokens(model, tokenizer), 0)
    options["pad_token_id"] = next(i for i in pads if i is not None)
    model.eval()
    with torch.no_grad():
        ids = model.generate(
            input_ids=torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
            max_new_tokens=n_tokens,
            use_cache=True,
            **options,
        )
    model.train(was_training)
    return list(ids[0, len(prompt) :].tolist())


@dataclass
class TextSample:
    """The text sample of one run. Its texts have the same prompt and seed. Only the main process writes them."""

    prepared: Prepared
    n_tokens: int
    """New tokens of a text; 0: none is written."""
    before: str = ""
    after: str = ""

    def write(self, built: PreTrainedModel) -> str:
        """The text that `built` writes now, at temperature 0.8. It keeps the global random state."""
        if not self.n_tokens:
            return ""
        run = self.prepared
        with torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
            torch.manual_seed(run.recipe.train.seed)
            options = {name: value.to(run.device) for name, value in run.prompt_inputs.items()}
            options |= {"do_sample": True, "temperature": 0.8, "top_k": 50}
            return str(run.tokenizer.decode(generated(built, run.tokenizer, run.prompt, self.n_tokens, **options)))

    def as_mapping(self) -> dict[str, str]:
        return {"prompt": self.prepared.prompt_text, "before": self.before, "after": self.after}


def begin_sample(prepared: Prepared, built: PreTrainedModel, console: Console) -> TextSample:
    """Write the text before training. All processes would have to take part in sampling from sharded weights."""
    n_tokens, objective = prepared.recipe.output.sample_tokens, prepared.objective
    if prepared.rows is not None and objective.writes_text and built.generation_config.eos_token_id is None:
        built.generation_config.eos_token_id = prepared.tokenizer.eos_token_id  # a preset has none, and answers end
    if n_tokens and prepared.settings.sharding.divides_weights:
        console.out("sample   no text sample: the weights are sharded")
        n_tokens = 0
    sample = TextSample(prepared, n_tokens if objective.writes_text and launch.rank() == 0 else 0)
    sample.before = sample.write(built)
    return sample
