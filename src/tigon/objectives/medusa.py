"""Heads on the model that predict several tokens ahead: their checks, schedule, records, checkpoints and decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from tigon import medusa
from tigon._trunk import decoder_layers
from tigon.data.packing import Sample
from tigon.errors import RecipeError, UsageError
from tigon.medusa.attach import NAME, check_fits, scoring
from tigon.medusa.heads import make_heads
from tigon.medusa.record import HeadMetrics
from tigon.medusa.spec import HeadsSpec, scheduled, shares_head
from tigon.models.loading.config import build_on_meta
from tigon.models.loading.presets import PRESETS
from tigon.models.patch import unwrap
from tigon.objectives.base import FinalSave, MetricColumn, MetricRow, MetricSection, Phase, Reduce, Step
from tigon.objectives.causal_lm import CausalLM, PlannedCausalLM
from tigon.objectives.recipe_checks import heads_refusals
from tigon.recipe.keys import HeadsConfig, ModelConfig, Recipe
from tigon.techniques.records.choices import Choices

HEADS, CHECKPOINTED = "heads", "heads.safetensors"
PROMPTS, PROMPT_TOKENS = 4, 24
RANKS = 5  # accuracies among the first 1 to 5 guesses (ops/head/multi_head.py)


# --- before the model -------------------------------------------------------------------------------------------------


def check(recipe: Recipe, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> HeadsSpec:
    """Check the heads of a recipe against its model, and return their spec.

    Args:
        recipe: A recipe with heads.
        config: The model's config.
        shapes: The shapes of the model's parameters by name.

    Raises:
        RecipeError: The heads do not fit the model, or heads.base_steps is set for a trained model.
    """
    heads = recipe.heads
    if heads.base_steps and recipe.model.name not in PRESETS:
        raise RecipeError(
            f"heads.base_steps is {heads.base_steps}, but {recipe.model.name} has trained weights, because it is not "
            "a preset; set it to 0"
        )
    text = config.get_text_config()
    if heads.start is not None:
        spec, state = _read(heads.start)
        wide, width = _width(state), text.hidden_size
        if wide != width:
            raise RecipeError(
                f"heads.start: {heads.start} has heads for hidden states of width {wide}, but {recipe.model.name} has "
                f"width {width}; give heads that were trained on this model"
            )
        _check_agrees(heads, spec)
        try:
            check_fits(make_heads(spec, build_on_meta(recipe.model.name, config)), state)
        except UsageError as error:
            raise RecipeError(f"heads.start: {heads.start}: {error}") from None
        return spec
    asked = {name: getattr(heads, name) for name in ("kind", "count", "layers")}
    new = HeadsSpec(**{name: value for name, value in asked.items() if value is not None})
    model = sum(math.prod(shape) for shape in shapes.values())
    shared = shares_head(heads.output, new.kind, new.count, model, text.vocab_size * text.hidden_size)
    if shared and new.kind == "medusa" and new.layers == 0:
        raise RecipeError(
            "heads.layers is 0 and the heads share the model's lm_head, so the heads have no weights to train; set "
            "heads.layers to 1"
        )
    return replace(new, shared=shared)


def _check_agrees(heads: HeadsConfig, spec: HeadsSpec) -> None:
    """Raise RecipeError if a key of the recipe does not match the heads in `heads.start`."""
    output = "shared" if spec.shared else "separate"
    of_start = {"kind": spec.kind, "count": spec.count, "layers": spec.layers, "output": output}
    for name, is_there in of_start.items():
        wanted = getattr(heads, name)
        if wanted not in (None, "auto", is_there):
            raise RecipeError(
                f"heads.{name} is {wanted}, but the heads in {heads.start} have {name} {is_there}; leave heads.{name} "
                "out, or leave heads.start out to train new heads"
            )


def _width(state: Mapping[str, torch.Tensor]) -> int:
    """H, the width of the hidden states that the heads take.

    An MTP module has an (H, 2H) projection. Medusa heads have (H, H) blocks, or without blocks a (V, H) output layer.
    """
    joins = [tensor.shape[0] for name, tensor in state.items() if name.endswith("eh_proj.weight")]
    return int(joins[0] if joins else next(iter(state.values())).shape[-1])


def _read(start: str) -> tuple[HeadsSpec, dict[str, torch.Tensor]]:
    try:
        return medusa.load_heads(Path(start))
    except UsageError as error:
        raise RecipeError(f"heads.start: {' '.join(str(error).split())[:240]}") from None


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedMedusa(PlannedCausalLM):
    """These heads, ready to be attached to a model that the planner traces."""

    spec: HeadsSpec
    minimised: medusa.Objective

    @property
    def reads_whole_weights(self) -> bool:
        return True

    @property
    def own_parameters(self) -> str | None:
        return f"{NAME}."

    def attach(self, model: Any) -> Any:
        medusa.attach(model, self.spec, self.minimised)
        return model

    def evaluation_passes(self, model: Any) -> tuple[AbstractContextManager[Any], ...]:
        return (*super().evaluation_passes(model), scoring(model))

    def refusals(self, choices: Choices) -> tuple[str, ...]:
        return tuple(heads_refusals(self.minimised.stage, self.spec.kind, choices))

    def recipe_keys(self) -> Mapping[str, Any]:
        spec = self.spec
        output = "shared" if spec.shared else "separate"
        own = {} if spec.kind == "mtp" else {"heads.layers": spec.layers, "heads.output": output}
        return {
            "heads.stage": self.minimised.stage, "heads.kind": spec.kind, "heads.count": spec.count, **own
        }  # fmt: skip

    def description(self) -> str:
        what = "MTP modules" if self.spec.kind == "mtp" else "Medusa heads"
        output = "the model's lm_head" if self.spec.shared else "an output weight each"
        return f"{self.spec.count} {what} with {output}, stage {self.minimised.stage}"


def planned_medusa(name: str, config: Any, count: int, stage: int) -> PlannedMedusa:
    """The Medusa heads of a recipe that sets only `heads.count` and `heads.stage`.

    Raises:
        UsageError: `count` or `stage` is out of range.
    """
    limits = next(f.metadata for f in fields(HeadsConfig) if f.name == "count")
    if not limits["minimum"] <= count <= limits["maximum"]:
        raise UsageError(f"--medusa is {count}; it must be {limits['minimum']} to {limits['maximum']} heads.")
    if stage not in (1, 2):
        raise UsageError(f"--stage is {stage}; it must be 1 (only the heads learn) or 2 (model and heads).")
    model: Any = build_on_meta(name, config)
    numel = sum(p.numel() for p in model.parameters())
    shared = shares_head("auto", "medusa", count, numel, model.get_output_embeddings().weight.numel())
    return PlannedMedusa(HeadsSpec(count=count, shared=shared), medusa.Objective(stage=stage))


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class MedusaTraining(CausalLM):
    """Medusa heads or MTP modules, trained on a frozen model (stage 1) or with it (stage 2)."""

    recipe: Recipe = field(kw_only=True)
    spec: HeadsSpec = field(kw_only=True)
    _evaluated: HeadMetrics | None = field(default=None, init=False)
    _scored: HeadMetrics | None = field(default=None, init=False)

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, config: Any, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> MedusaTraining | None:
        if recipe.heads.stage is None:
            return None
        return cls(recipe.model, recipe=recipe, spec=check(recipe, config, shapes()))

    @property
    def name(self) -> str:
        return HEADS

    @property
    def heads(self) -> HeadsConfig:
        return self.recipe.heads

    @property
    def reads_plain_head(self) -> bool:
        return True

    def planned(self) -> PlannedMedusa:
        return PlannedMedusa(self.spec, self._minimised())

    def _minimised(self) -> medusa.Objective:
        heads = self.heads
        assert heads.stage is not None
        return medusa.Objective(stage=heads.stage, decay=heads.decay, coefficient=heads.coefficient)

    def announcement(self) -> str:
        spec = self.spec
        what = "MTP modules" if spec.kind == "mtp" else f"Medusa heads of {spec.layers} residual blocks"
        output = "the model's lm_head" if spec.shared else "an output weight each"
        learning = "trains the heads, the model is frozen" if self.heads.stage == 1 else "trains model and heads"
        return f"{self.name:<8} {spec.count} {what}, {output}; stage {self.heads.stage}: {learning}"

    def no_sample_line(self) -> str:
        return "no text sample, nothing decoded with the heads"

    def phase(self, choices: Choices, run: Path) -> Phase | None:
        """The training of a preset into `base/` before it gets heads; None if `base/` exists (a resumed run)."""
        if not self.heads.base_steps or self.model(run) is not self.recipe.model:
            return None
        return Phase(
            train=replace(
                self.recipe.train, steps=self.heads.base_steps, epochs=None, eval_steps=None, save_steps=None,
                checkpointing="none",
            ),
            choices=replace(choices, lora_rank=None, quantized=False, checkpointing="none"),
            folder=run / "base",
        )  # fmt: skip

    def model(self, run: Path) -> ModelConfig:
        base = run / "base"
        if not self.heads.base_steps or not (base / "config.json").is_file():
            return self.recipe.model
        return replace(self.recipe.model, name=str(base), config=None)

    def attach(self, built: Any) -> Any:
        start = self.heads.start
        state = _read(start)[1] if start is not None else None
        try:
            medusa.attach(built, self.spec, self._minimised(), state)
        except UsageError as error:
            raise RecipeError(f"heads.start: {start}: {error}") from None
        return built

    # --- training ----------------------------------------------------------------------------------------------------

    def group(self, model: Any, optimizer: Any) -> None:
        if self.heads.stage == 2:
            own = {id(p) for name, p in model.named_parameters() if f"{NAME}." in name}
            split_groups(optimizer, own, self.heads.learning_rate_multiplier)

    def begin_step(self, model: Any, step: Step) -> None:
        state = _heads_of(model).state
        state.scheduled = scheduled(self.heads.schedule, step.done + 1, step.total, self.heads.ramp)
        state.ranked = step.done == 0 or (step.done + 1) % step.log_every == 0

    def metrics(self, model: Any, reduce: Reduce) -> dict[str, float]:
        metrics: dict[str, float] = _heads_of(model).state.record.take(reduce)
        return metrics

    def counted(self, model: Any) -> dict[str, Any]:
        return {"heads": _heads_of(model).state.record.state()}

    def resume_counting(self, model: Any, counted: Mapping[str, Any], device: torch.device) -> None:
        _heads_of(model).state.record.resume(counted["heads"], device)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        self._evaluated = None

    def evaluation_sums(
        self, model: Any, inputs: Mapping[str, Any], counts: bool, precision: Callable[[], AbstractContextManager[Any]]
    ) -> torch.Tensor:
        sums = super().evaluation_sums(model, inputs, counts, precision)
        with scoring(model) as record, precision():
            model(**inputs)
        self._scored = record if counts else record.blank()  # not counted: the pass only joined the collectives
        return sums

    def count_batch(self) -> None:
        assert self._scored is not None, "a batch was evaluated"
        if self._evaluated is None:
            self._evaluated = self._scored
        else:
            self._evaluated.join(self._scored)

    def evaluation_metrics(self, reduce: Reduce) -> dict[str, float]:
        return self._evaluated.take(reduce) if self._evaluated is not None else {}

    def metric_section(self) -> MetricSection:
        """One row for each head and, in stage 2, one for the model. The total loss, a weighted sum, says little."""
        own = [("model", "the model", "model")] if self.heads.stage == 2 else []
        own += [(f"head{k}", f"head {k}, {k + 1} tokens ahead", f"head {k}") for k in range(1, self.spec.count + 1)]
        accuracy = "first guess correct (%)"
        return MetricSection(
            name=HEADS, title="Heads", chart_text="losses and accuracies of the heads over steps",
            columns_text="Columns 1 to 5: how often the token was among the head's first 1 to 5 guesses.",
            columns=(
                MetricColumn(title="loss", axis="loss (nats per token)"),
                *(
                    MetricColumn(title=str(k), axis=accuracy if k == 1 else None, is_share=True)
                    for k in range(1, RANKS + 1)
                ),
            ),
            rows=tuple(
                MetricRow(
                    title=title, label=label, is_baseline=name == "model",
                    metrics=(f"{name}_loss", *(f"{name}_top{k}" for k in range(1, RANKS + 1))),
                )
                for name, title, label in own
            ),
            tile="head 1's training loss",
        )  # fmt: skip

    # --- files -------------------------------------------------------------------------------------------------------

    def checkpoint_state(self, model: Any, state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        if self.heads.stage == 2:
            return state
        whole = model.state_dict() if state is None else state  # stage 1 does not change the model's own weights
        return {name: tensor for name, tensor in whole.items() if name.startswith(f"{NAME}.")}

    def save_beside(self, model: Any, folder: Path) -> None:
        from safetensors.torch import save_file

        if hasattr(model, "get_base_model"):  # PEFT saves only the adapters
            save_file(dict(_heads_of(model).state_dict()), folder / CHECKPOINTED)

    def load_beside(self, model: Any, folder: Path) -> None:
        from safetensors.torch import load_file

        if (folder / CHECKPOINTED).is_file():
            _heads_of(model).load_state_dict(load_file(folder / CHECKPOINTED))

    def save(self, built: Any, final: FinalSave) -> bool:
        """Save the heads to `heads/`, and the model to `model/` unless stage 1 left a checkpoint's model unchanged."""
        writes_model = self.heads.stage == 2 or self.recipe.model.name in PRESETS
        target = final.folder / "model"
        inner: Any = unwrap(built)
        spec, n_layers = medusa.heads_of(inner).spec, len(decoder_layers(inner))
        head_name = next(name for name, m in inner.named_modules() if m is inner.get_output_embeddings()) + ".weight"
        # Every process gathers the weights; with ZeRO-3 only the main process receives them.
        state: Any = final.gathered_state() if final.sharded else inner.state_dict()
        if final.is_first:
            own = {n.removeprefix(f"{NAME}."): t for n, t in state.items() if n.startswith(f"{NAME}.")}
            base = str(target) if writes_model else self.recipe.model.name
            medusa.save_heads(spec, own, final.folder / HEADS, head=state[head_name], base=base, n_layers=n_layers)
        if not writes_model:
            return False
        if not final.sharded:
            medusa.detach(inner)
            final.save_model(merges=True)  # heads/ names the model that the heads belong to
        elif final.is_first:
            rest = {name: tensor for name, tensor in state.items() if not name.startswith(f"{NAME}.")}
            final.save_state(rest)
        return True

    # --- after training ----------------------------------------------------------------------------------------------

    def sampled(self, built: Any, samples: Sequence[Sample], eos: int | None) -> dict[str, Any]:
        return decoded(built, self.recipe.output.sample_tokens, samples, eos)

    def sampled_line(self, decoded: Mapping[str, Any]) -> str:
        return decoding_line(decoded)


def _heads_of(model: Any) -> Any:
    return medusa.heads_of(model)


def split_groups(optimizer: Any, own: set[int], multiplier: float) -> None:
    """Move the parameters whose ids are in `own` to separate groups with `multiplier` times the learning rate."""
    for group in list(optimizer.param_groups):
        heads = [p for p in group["params"] if id(p) in own]
        if not heads:
            continue
        if len(heads) == len(group["params"]):  # DeepSpeed does not accept empty groups
            group["lr"] *= multiplier
            continue
        group["params"] = [p for p in group["params"] if id(p) not in own]
        options = {name: value for name, value in group.items() if name != "params"}
        optimizer.add_param_group({**options, "params": heads, "lr": group["lr"] * multiplier})


def decoded(built: Any, n_tokens: int, samples: Sequence[Sample], eos: int | None) -> dict[str, Any]:
    """Decode greedily from the beginnings of samples, with and without the heads.

    Args:
        built: The model with its heads.
        n_tokens: The number of new tokens per prompt.
        samples: The samples whose first tokens are the prompts.
        eos: The id of the token that ends a text.

    Returns:
        Tokens, forward passes with and without heads, acceptance length, and the number of equal texts; or an `error`.
    """
    device = next(built.parameters()).device
    beginnings = [sample.tokens_T[:PROMPT_TOKENS].long().unsqueeze(0).to(device) for sample in samples[:PROMPTS]]
    tokens = passes = plain_passes = same = 0
    try:
        for ids in beginnings:
            ours, plain = (
                medusa.medusa_generate(built, ids, max_new_tokens=n_tokens, tree=tree, eos_token_id=eos)
                for tree in (None, ())
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
        "prompts": n, "tokens": tokens, "forward_passes": passes, "forward_passes_without": plain_passes,
        "acceptance_length": (tokens - n) / max(1, passes - n), "same_text": same,
    }  # fmt: skip


def decoding_line(decoded: Mapping[str, Any]) -> str:
    """One line for the console and the report about the result of `decoded`."""
    if "error" in decoded:
        return f"no decoding with the heads: {decoded['error']}"
    same = "the same text as greedy decoding" if decoded["same_text"] == decoded["prompts"] else (
        f"{decoded['prompts'] - decoded['same_text']} of {decoded['prompts']} texts differ from greedy decoding"
    )  # fmt: skip
    return (
        f"{decoded['tokens']} tokens in {decoded['forward_passes']} forward passes instead of "
        f"{decoded['forward_passes_without']}, {decoded['acceptance_length']:.2f} tokens per pass; {same}"
    )


OBJECTIVE = MedusaTraining
