"""Trains heads inside a Trainer: their schedule, metrics, checkpoints, final files, and a demonstration of decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments

from tigon._trunk import decoder_layers
from tigon.errors import UsageError
from tigon.medusa.attach import NAME, detach, heads_of, scoring
from tigon.medusa.generate import medusa_generate
from tigon.medusa.layout import save_heads
from tigon.models.patch import unwrap

HEADS, MODEL, CHECKPOINTED = "heads", "model", "heads.safetensors"
PROMPTS, PROMPT_TOKENS = 4, 24


@dataclass(frozen=True)
class HeadsCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """The callback of a run that trains heads. It keeps no reference to a model, so several trainers may have it."""

    stage: int
    multiplier: float
    """The heads' learning rate by the model's, in stage 2."""
    schedule: Callable[[int, int], float]
    """Called with the number of a step and the number of steps; returns the current weight of the heads' losses."""
    trained_on: str | None
    """The model that stage 1 leaves unchanged, so that it is not saved again; None: a preset, which is in no file."""
    sample_tokens: int
    """New tokens per prompt of the demonstration."""

    @property
    def learning_rates(self) -> dict[str, float]:
        return {f"{NAME}.": self.multiplier} if self.stage == 2 else {}

    @property
    def saved_prefix(self) -> str | None:
        return None if self.stage == 2 else f"{NAME}."  # stage 1 does not change the model's own weights

    # --- the training loop's events ----------------------------------------------------------------------------------

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        heads, step = heads_of(kwargs["model"]).state, state.global_step
        heads.scheduled = self.schedule(step + 1, state.max_steps)
        heads.ranked = step == 0 or (step + 1) % int(args.logging_steps) == 0
        heads.evaluated = None

    def begin_evaluation(self, model: PreTrainedModel) -> None:
        heads_of(model).state.evaluated = None

    def on_prediction_step(self, args: object, state: object, control: object, **batch: Any) -> None:
        """Score the heads on a batch, as trainer/evaluation/token_mean.py describes it.

        batch: `counted` are the functions to call if the batch counts in all processes.
        """
        model = batch["model"]
        with scoring(model) as record, batch["precision"]():
            model(**batch["inputs"])
        # The pass of processes without samples only joined the collectives.
        scored = record if batch["has_samples"] else record.blank()

        def count() -> None:
            heads = heads_of(model).state
            heads.evaluated = heads.evaluated or heads.new_record()
            heads.evaluated.join(scored)

        batch["counted"].append(count)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def counted(self, model: PreTrainedModel) -> dict[str, Any]:
        return {HEADS: heads_of(model).state.record.state()}

    def resume_counting(self, model: PreTrainedModel, counted: Mapping[str, Any], device: torch.device) -> None:
        heads_of(model).state.record.resume(counted[HEADS], device)

    def save_beside(self, model: PreTrainedModel, folder: Path) -> None:
        if hasattr(model, "get_base_model"):  # PEFT saves only the adapters
            save_file(dict(heads_of(model).state_dict()), folder / CHECKPOINTED)

    def load_beside(self, model: PreTrainedModel, folder: Path) -> None:
        if (folder / CHECKPOINTED).is_file():
            heads_of(model).load_state_dict(load_file(folder / CHECKPOINTED))

    # --- after training ----------------------------------------------------------------------------------------------

    def save(self, built: PreTrainedModel, final: Any) -> bool:
        """Save the heads to `heads/`, and the model to `model/` unless stage 1 left a checkpoint's model unchanged.

        final: How the run saves its model (`tigon.objectives.base.FinalSave`).
        """
        target = final.folder / MODEL
        base = str(target) if self.stage == 2 or self.trained_on is None else self.trained_on
        inner: PreTrainedModel = unwrap(built)
        spec, n_layers = heads_of(inner).spec, len(decoder_layers(inner))
        head_name = next(name for name, m in inner.named_modules() if m is inner.get_output_embeddings()) + ".weight"
        # Every process gathers the weights; with ZeRO-3 only the main process receives them.
        state: Any = final.gathered_state() if final.sharded else inner.state_dict()
        if final.is_first:
            own = {n.removeprefix(f"{NAME}."): t for n, t in state.items() if n.startswith(f"{NAME}.")}
            save_heads(spec, own, final.folder / HEADS, head=state[head_name], base=base, n_layers=n_layers)
        if base != str(target):
            return False
        if not final.sharded:
            detach(inner)
            final.save_model(merges=True)  # heads/ names the model that the heads belong to
        elif final.is_first:
            rest = {name: tensor for name, tensor in state.items() if not name.startswith(f"{NAME}.")}
            final.save_state(rest)
        return True

    def sampled(self, built: PreTrainedModel, samples: Sequence[Any], eos: int | None) -> dict[str, Any]:
        """Decode greedily from the beginnings of samples, with and without the heads.

        Args:
            built: The model with its heads.
            samples: The samples whose first tokens are the prompts.
            eos: The id of the token that ends a text.

        Returns:
            Tokens, forward passes with and without heads, acceptance length, and the number of equal texts; or an
            `error`. `line` describes them.
        """
        decoded = _decoded(built, self.sample_tokens, samples, eos)
        return {**decoded, "line": _line(decoded)}


def _decoded(built: PreTrainedModel, n_tokens: int, samples: Sequence[Any], eos: int | None) -> dict[str, Any]:
    device = next(built.parameters()).device
    beginnings = [sample.tokens_T[:PROMPT_TOKENS].long().unsqueeze(0).to(device) for sample in samples[:PROMPTS]]
    tokens = passes = plain_passes = same = 0
    try:
        for ids in beginnings:
            ours, plain = (
                medusa_generate(built, ids, max_new_tokens=n_tokens, tree=tree, eos_token_id=eos) for tree in (None, ())
            )
            same += ours.tokens == plain.tokens
            tokens += len(ours.tokens)
            passes += ours.forward_passes
            plain_passes += plain.forward_passes
    except UsageError as error:
        return {"error": str(error)}
    except Exception as error:  # decoding is a demonstration, and the heads are saved after it
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    n = len(beginnings)
    return {
        "prompts": n,
        "tokens": tokens,
        "forward_passes": passes,
        "forward_passes_without": plain_passes,
        "acceptance_length": (tokens - n) / max(1, passes - n),
        "same_text": same,
    }


def _line(decoded: Mapping[str, Any]) -> str:
    """The result of `_decoded` for the console and the report."""
    if "error" in decoded:
        return f"no decoding with the heads: {decoded['error']}"
    differ, same = decoded["prompts"] - decoded["same_text"], "the same text as greedy decoding"
    if differ:
        same = f"{differ} of {decoded['prompts']} texts differ from greedy decoding"
    return (
        f"{decoded['tokens']} tokens in {decoded['forward_passes']} forward passes instead of "
        f"{decoded['forward_passes_without']}, {decoded['acceptance_length']:.2f} tokens per pass; {same}"
    )
