"""Runs whose recipe has `heads:`, as `tigon medusa` and `tigon train` carry them out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tigon import medusa
from tigon.data.packing import Row
from tigon.errors import RecipeError, UsageError
from tigon.medusa.attach import NAME, check_fits, scoring
from tigon.medusa.heads import decoder_layers, make_heads
from tigon.medusa.record import HeadRecord
from tigon.medusa.spec import HeadsSpec, Objective, scheduled, shares_head
from tigon.models.loading.config import build_on_meta
from tigon.models.patch import unwrap
from tigon.recipe.keys import HeadsConfig, ModelConfig, Recipe
from tigon.techniques.choices import Choices
from tigon.techniques.sharding import weights_are_sharded
from tigon.trainer import engine
from tigon.trainer import model as models
from tigon.trainer.distributed import launch
from tigon.trainer.trainer import TigonTrainer

HEADS, CHECKPOINTED = "heads", "heads.safetensors"
PROMPTS, PROMPT_TOKENS = 4, 24


def train_with_heads(path: Path, overrides: Sequence[str] = (), *, resume: bool = False) -> Path:
    """`tigon medusa`: `tigon train` of a recipe that has heads. Raises RecipeError for one without."""
    from tigon.recipe import recipe_file
    from tigon.trainer import run
    from tigon.trainer.guards import preflight

    preflight.check_packages()
    recipe = recipe_file.load(path, overrides, gpu_present=preflight.gpu_present)
    if recipe.heads.stage is None:
        raise RecipeError(
            f"{path}: heads.stage is not given; set it to 1 (only heads) or 2 (model and heads), or use tigon train"
        )
    return run.train(path, overrides, resume=resume)


# --- before and around the model --------------------------------------------------------------------------------------


def check(recipe: Recipe, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> HeadsSpec | None:
    """The heads of a run, None without; refuses a file that is none, and steps for a base that is trained already.
    config: the model's. shapes: of its parameters, by name."""
    heads = recipe.heads
    if heads.stage is None:
        return None
    if heads.base_steps and not models.is_preset(recipe.model.name):
        raise RecipeError(
            f"heads.base_steps is {heads.base_steps}, but {recipe.model.name} is no preset: its weights are trained; "
            "set it to 0"
        )
    text = config.get_text_config()
    if heads.start is not None:
        spec, state = _read(heads.start)
        wide, width = _width(state), text.hidden_size
        if wide != width:
            raise RecipeError(
                f"heads.start: {heads.start} has heads for hidden states of {wide}, and {recipe.model.name} has "
                f"{width}; give the heads that were trained on this model"
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
        raise RecipeError("heads.layers is 0 and heads share the model's lm_head: nothing would learn; set layers: 1")
    return replace(new, shared=shared)


def _check_agrees(heads: HeadsConfig, spec: HeadsSpec) -> None:
    """Refuse a key that asks for other heads than those in the folder."""
    output = "shared" if spec.shared else "separate"
    found = {"kind": spec.kind, "count": spec.count, "layers": spec.layers, "output": output}
    for name, is_there in found.items():
        wanted = getattr(heads, name)
        if wanted not in (None, "auto", is_there):
            raise RecipeError(
                f"heads.{name} is {wanted}, but the heads in {heads.start} have {name} {is_there}; leave heads.{name} "
                "out, or leave heads.start out to begin with new ones"
            )


def _width(state: Mapping[str, torch.Tensor]) -> int:
    """Of the hidden states that heads take: of MTP modules (H, 2H) joins two, of others a block is (H, H), or without
    blocks an output layer (V, H)."""
    joins = [tensor.shape[0] for name, tensor in state.items() if name.endswith("eh_proj.weight")]
    return int(joins[0] if joins else next(iter(state.values())).shape[-1])


def _read(start: str) -> tuple[HeadsSpec, dict[str, torch.Tensor]]:
    try:
        return medusa.load_heads(Path(start))
    except UsageError as error:
        raise RecipeError(f"heads.start: {' '.join(str(error).split())[:240]}") from None


def attach(built: Any, heads: HeadsConfig, spec: HeadsSpec) -> Any:
    """`built`, patched and with its techniques, with heads on it."""
    state = _read(heads.start)[1] if heads.start is not None else None
    try:
        medusa.attach(built, spec, objective_of(heads), state)
    except UsageError as error:
        raise RecipeError(f"heads.start: {heads.start}: {error}") from None
    return built


def put_on(built: Any, recipe: Recipe, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """`built` with the recipe's heads, if it has any. config, shapes: as `check` takes them."""
    spec = check(recipe, config, shapes)
    return built if spec is None else attach(built, recipe.heads, spec)


def objective_of(heads: HeadsConfig) -> Objective:
    """What a recipe minimises."""
    assert heads.stage is not None
    return Objective(stage=heads.stage, decay=heads.decay, coefficient=heads.coefficient)


def describe(heads: HeadsConfig, spec: HeadsSpec) -> str:
    """One line for the console and the report."""
    what = "MTP modules" if spec.kind == "mtp" else f"Medusa heads of {spec.layers} residual blocks"
    output = "the model's lm_head" if spec.shared else "an output weight each"
    learning = "the heads learn, the model is frozen" if heads.stage == 1 else "model and heads learn"
    return f"{spec.count} {what}, {output}; stage {heads.stage}: {learning}"


# --- training ---------------------------------------------------------------------------------------------------------


class HeadsTrainer(TigonTrainer):
    """Trains a model with heads: their schedule and learning rate, what is logged of them, and their checkpoints."""

    def __init__(self, heads: HeadsConfig, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.config = heads
        self._held_out: HeadRecord | None = None
        self._scored: HeadRecord
        self._grouped = False
        # What PEFT's save would leave out, and what a frozen model need not have.
        self._adapted = hasattr(model, "get_base_model")

    @property
    def _heads(self) -> Any:
        return medusa.heads_of(self.model)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.config.stage == 2 and not self._grouped:
            own = {id(p) for name, p in self.model.named_parameters() if f"{NAME}." in name}
            split_groups(optimizer, own, self.config.learning_rate_multiplier)
            self._grouped = True
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step, every, steps = self.state.global_step, self.args.logging_steps, self.state.max_steps
        self._heads.state.scheduled = scheduled(self.config.schedule, step + 1, steps, self.config.ramp)
        self._heads.state.ranked = step == 0 or (step + 1) % every == 0
        return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self._heads.state.record.take(self.accelerator.reduce))
        if "eval_loss" in logs and self._held_out is not None:
            logs.update(self._held_out.take(self.accelerator.reduce))
        super().log(logs, *args, **kwargs)

    def counted(self) -> dict[str, Any]:
        return {**super().counted(), "heads": self._heads.state.record.state()}

    def resume_counting(self, counted: Mapping[str, Any]) -> None:
        super().resume_counting(counted)
        self._heads.state.record.resume(counted["heads"], self.args.device)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._held_out = None
        return super().evaluate(*args, **kwargs)

    def _forward_sums(self, rows: Sequence[Row], counts: bool) -> torch.Tensor:
        sums = super()._forward_sums(rows, counts)
        inputs = self._prepare_inputs(self.data_collator(rows))
        with scoring(self.model) as record, self.compute_loss_context_manager(), self.accelerator.autocast():
            self.model(**inputs)
        self._scored = record if counts else record.blank()  # else it was run for the collectives in it
        return sums

    def _batch_counts(self) -> None:
        if self._held_out is None:
            self._held_out = self._scored
        else:
            self._held_out.join(self._scored)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        if self.config.stage == 1:  # the model is where it came from
            whole = self.model.state_dict() if state_dict is None else state_dict
            state_dict = {name: tensor for name, tensor in whole.items() if name.startswith(f"{NAME}.")}
        super()._save(output_dir, state_dict)
        if self._adapted:  # PEFT writes the adapters alone
            from safetensors.torch import save_file

            save_file(dict(self._heads.state_dict()), folder / CHECKPOINTED)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        file = Path(resume_from_checkpoint) / CHECKPOINTED
        if file.is_file():
            from safetensors.torch import load_file

            self._heads.load_state_dict(load_file(file))


def split_groups(optimizer: Any, own: set[int], multiplier: float) -> None:
    """Move the parameters in `own` (by id) to groups of their own, with `multiplier` times the learning rate."""
    for group in list(optimizer.param_groups):
        heads = [p for p in group["params"] if id(p) in own]
        if not heads:
            continue
        if len(heads) == len(group["params"]):  # DeepSpeed takes no empty groups
            group["lr"] *= multiplier
            continue
        group["params"] = [p for p in group["params"] if id(p) not in own]
        options = {name: value for name, value in group.items() if name != "params"}
        optimizer.add_param_group({**options, "params": heads, "lr": group["lr"] * multiplier})


# --- after training ---------------------------------------------------------------------------------------------------


def save(built: Any, trainer: Any, recipe: Recipe, choices: Choices, run: Path) -> bool:
    """Heads to `heads/`, the model to `model/`; every process calls it. Whether a model was written: a checkpoint that
    stage 1 has left as it was is not."""
    writes_model = recipe.heads.stage == 2 or models.is_preset(recipe.model.name)
    base = str(run / "model") if writes_model else recipe.model.name
    inner: Any = unwrap(built)
    spec, n_layers = medusa.heads_of(inner).spec, len(decoder_layers(inner))
    head_name = next(name for name, m in inner.named_modules() if m is inner.get_output_embeddings()) + ".weight"
    if weights_are_sharded(choices):
        wrapped = trainer.deepspeed if trainer.is_deepspeed_enabled else trainer.model
        state = trainer.accelerator.get_state_dict(wrapped)  # all join in; None with ZeRO-3 but for the first
    else:
        state = inner.state_dict()
    if launch.rank() == 0:
        own = {n.removeprefix(f"{NAME}."): t for n, t in state.items() if n.startswith(f"{NAME}.")}
        medusa.save_heads(spec, own, run / HEADS, head=state[head_name], base=base, n_layers=n_layers)
    if not writes_model:
        return False
    if weights_are_sharded(choices):
        if launch.rank() == 0:
            rest = {name: tensor for name, tensor in state.items() if not name.startswith(f"{NAME}.")}
            inner.save_pretrained(run / "model", state_dict=rest)
    else:
        medusa.detach(inner)
        engine.save(built, trainer, choices, run / "model", model=model_of(recipe, run), base=run / "base")
    return True


def decoded(built: Any, recipe: Recipe, rows: Sequence[Row], eos: int | None) -> dict[str, Any]:
    """Greedy decoding of held-out beginnings with the heads and without: tokens, forward passes, and whether the texts
    are the same."""
    device = next(built.parameters()).device
    beginnings = [row.tokens_T[:PROMPT_TOKENS].long().unsqueeze(0).to(device) for row in rows[:PROMPTS]]
    tokens = passes = plain_passes = same = 0
    try:
        for ids in beginnings:
            ours, plain = (
                medusa.medusa_generate(
                    built, ids, max_new_tokens=recipe.output.sample_tokens, tree=tree, eos_token_id=eos
                )
                for tree in (None, ())
            )
            same += ours.tokens == plain.tokens
            tokens += len(ours.tokens)
            passes += ours.forward_passes
            plain_passes += plain.forward_passes
    except UsageError as error:
        return {"error": str(error)}
    except Exception as error:  # a demonstration must not cost the heads, which are saved after it
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    n = len(beginnings)
    return {
        "prompts": n, "tokens": tokens, "forward_passes": passes, "forward_passes_without": plain_passes,
        "acceptance_length": (tokens - n) / max(1, passes - n), "same_text": same,
    }  # fmt: skip


def decoding_line(found: Mapping[str, Any]) -> str:
    """One line for the console and the report."""
    if "error" in found:
        return f"no decoding with the heads: {found['error']}"
    same = "the text of greedy decoding" if found["same_text"] == found["prompts"] else (
        f"{found['prompts'] - found['same_text']} of {found['prompts']} texts differ from greedy decoding"
    )  # fmt: skip
    return (
        f"{found['tokens']} tokens in {found['forward_passes']} forward passes instead of "
        f"{found['forward_passes_without']}, {found['acceptance_length']:.2f} tokens a pass; {same}"
    )


# --- a base to put heads on -------------------------------------------------------------------------------------------


def model_of(recipe: Recipe, run: Path) -> ModelConfig:
    """Where the model of a run comes from: its own trained base, or what the recipe says."""
    base = run / "base"
    if recipe.heads.stage is None or not recipe.heads.base_steps or not (base / "config.json").is_file():
        return recipe.model
    return replace(recipe.model, name=str(base), config=None)


def train_base(prepared: Any, run: Path, callbacks: Sequence[Any]) -> None:
    """Ordinary training of a preset before it gets heads, into `base/`, unless it is there (a resumed run)."""
    from tigon.data.packing import RowDataset
    from tigon.trainer import trainer as trainers

    recipe, base, partial = prepared.recipe, run / "base", run / "base-partial"
    train = replace(
        recipe.train, steps=recipe.heads.base_steps, epochs=None, eval_steps=None, save_steps=None, checkpointing="none"
    )
    choices = replace(prepared.choices, lora_rank=None, quantized=False, checkpointing="none")
    built, _ = engine.build(
        recipe.model, prepared.config, choices, prepared.facts, device=prepared.device, seed=train.seed,
        kernels=recipe.model.kernels, base=partial, heads=False,
    )  # fmt: skip
    args = trainers.arguments(
        train, choices, prepared.facts, folder=run / "checkpoints", device=prepared.device, evaluate=False
    )
    rows = RowDataset(prepared.train.rows)
    trainer = TigonTrainer(built, args, prepared.collator, rows, None, engine.make_optimizer(train, choices))
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    engine.save(built, trainer, choices, partial, model=recipe.model, base=partial)
    trainer.accelerator.wait_for_everyone()
    if launch.rank() == 0:
        partial.rename(base)
    trainer.accelerator.wait_for_everyone()
    if choices.zero:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # with stage 3 alive, from_pretrained would partition the weights as it loads them


def needs_base(recipe: Recipe, run: Path) -> bool:
    return recipe.heads.stage is not None and recipe.heads.base_steps > 0 and model_of(recipe, run) is recipe.model
