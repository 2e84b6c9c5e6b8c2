"""TRL's trainers with tigon's generator: the same completions, and the log-probabilities with which they were drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("trl")
pytest.importorskip("datasets")

from trl_cases import lora, of
from trl_runs import build, model, trl_version

from tigon.errors import UsageError
from tigon.integrations.trl import UnfusedWarning, decode_in_graphs, fuse
from tigon.integrations.trl.generation import DIFFERENCE

pytestmark = pytest.mark.skipif(trl_version() < (1, 16), reason="tigon.integrations.trl.generation is for TRL 1.16")


def greedy(trainer: Any) -> list[Any]:
    """Let the trainer take the likeliest tokens, and return the list that its generations are added to."""
    trainer.generation_config.do_sample = False
    written = []
    generate = trainer.model.generate

    def noted(*args: Any, **given: Any) -> torch.Tensor:
        written.append(generate(*args, **given))
        return written[-1]

    trainer.model.generate = noted
    return written


@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "Distillation"])
@pytest.mark.parametrize("adapters", [None, lora()], ids=["full", "LoRA"])
def test_trainer_trains_on_the_completions_of_transformers(kind: str, adapters: Callable[[], Any] | None) -> None:
    runs = []
    for ours in (True, False):
        trainer = build(kind, lora=adapters, max_steps=2)
        if ours:
            decode_in_graphs(trainer)
        runs.append(greedy(trainer))
        trainer.train()
    assert len(runs[0]) == len(runs[1]) > 0
    for ours, theirs in zip(*runs, strict=True):
        width = min(ours.shape[1], theirs.shape[1])
        assert torch.equal(ours[:, :width], theirs[:, :width])
        assert not ours[:, width:].any() and not theirs[:, width:].any(), "only padding is longer"


@pytest.mark.parametrize(
    ("head", "policy"),
    [(head, policy) for head in ("tigon", "TRL") for policy in ("llama", "gemma2")] + [("shared prefix", "llama")],
)
def test_difference_from_the_trainers_logprobs_is_rounding(head: str, policy: str) -> None:
    trainer = build("GRPO", policy=of(policy), gradient_accumulation_steps=2, steps_per_generation=2)
    generation = decode_in_graphs(trainer)
    fused = None if head == "TRL" else fuse(trainer, shared_prefix=head == "shared prefix")
    trainer.train()
    if head == "shared prefix":
        assert fused is not None and fused.shared_prompts.counts.computed < fused.shared_prompts.counts.given
    assert "importance ratio is within" in str(generation)
    logs = [log for log in trainer.state.log_history if f"{DIFFERENCE}/max" in log]
    assert len(logs) == 2, "each step measures its completions before the update"
    assert all(0 < log[f"{DIFFERENCE}/mean"] <= log[f"{DIFFERENCE}/max"] < 1e-5 for log in logs)


@pytest.mark.parametrize("policy", ["qwen3", "gemma2"])
def test_autocast_draws_with_the_trainers_logprobs_and_casts_weights_once_for_all_steps(policy: str) -> None:
    trainer = build("GRPO", policy=of(policy), bf16=True, max_steps=1)
    decode_in_graphs(trainer)
    fuse(trainer)
    generate, casts = trainer.model.generate, _Casts(trainer.model.model.layers[0].mlp.up_proj.weight.shape)

    def counted(*args: Any, **given: Any) -> torch.Tensor:
        with casts:
            return generate(*args, **given)

    trainer.model.generate = counted
    trainer.train()
    (log,) = [log for log in trainer.state.log_history if f"{DIFFERENCE}/max" in log]
    assert 1e-4 < log[f"{DIFFERENCE}/max"] < 0.05, "rounding of bf16"
    weights = 2 * trainer.model.config.num_hidden_layers  # up_proj and gate_proj have this shape
    assert casts.count == 2 * weights, "once for the prompts, and once for all steps"


class _Casts(TorchDispatchMode):
    """Counts casts of fp32 tensors of one shape to bf16."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += (kwargs or {}).get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


def test_difference_is_found_if_the_generator_draws_from_another_model() -> None:
    trainer = build("GRPO", max_steps=1)
    generation = decode_in_graphs(trainer)
    generation.model = model(seed=1)
    trainer.train()
    assert trainer.state.log_history[0][f"{DIFFERENCE}/max"] > 0.1


def test_restore_gives_the_model_its_own_generate() -> None:
    trainer = build("GRPO")
    own = trainer.model.generate
    decode_in_graphs(trainer).restore()
    assert trainer.model.generate == own and not trainer.model._forward_hooks


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams"),
        ({"use_transformers_continuous_batching": True}, "does not call"),
    ],
)
def test_what_the_generator_does_not_know_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        decode_in_graphs(build("GRPO", **options))


def test_options_of_the_models_own_config_are_refused_too() -> None:
    trainer = build("GRPO")
    trainer.model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(UsageError, match="sets no_repeat_ngram_size"):
        decode_in_graphs(trainer)


def test_other_inputs_are_left_to_transformers_with_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    trainer = build("GRPO")
    decode_in_graphs(trainer)
    ids = torch.tensor([[5, 6]])
    own = trainer.model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)  # not the trainer's call
    assert own.shape[1] <= 5 and not [one for one in recwarn if one.category is UnfusedWarning]
    config = trainer.generation_config
    with pytest.warns(UnfusedWarning, match="num_beams"):
        trainer.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, num_beams=2
        )
