"""What `tigon plan` is asked: flags become recipe keys, keys a recipe, and the recipe a search problem."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon._quiet import quiet_packages
from tigon.cli.short_forms import ACCUMULATE, BATCH, FLAG_OF, GPUS, IMAGE_SIZE, IMAGES, MEDUSA, OBJECTIVE, STAGE
from tigon.errors import RecipeError, UsageError
from tigon.models import packed_documents
from tigon.models.loading import hub
from tigon.models.loading.config import build_on_meta, load_config
from tigon.models.loading.presets import carried
from tigon.objectives import recipe_checks
from tigon.objectives.base import PlannedObjective
from tigon.objectives.choose import config_for, objective_of, planned_objective
from tigon.objectives.rules import classify as classify_rules
from tigon.objectives.rules import post_training as post_training_rules
from tigon.planner.gpus import GIB, Gpu, size_bytes
from tigon.planner.render import as_recipe
from tigon.planner.request import Request, request_of
from tigon.planner.search.space import CROSS_DOCUMENT, Fallback, SearchProblem, layers_on_host
from tigon.recipe.aliases import key_of
from tigon.recipe.keys import Recipe
from tigon.techniques import SEARCHES
from tigon.techniques.keys.settings import DEFAULT
from tigon.techniques.keys.train import AUTO
from tigon.techniques.lora.lora import DEFAULT_RANK

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST = 1 << 20
"""The largest value of an integer flag, except --seq. Beyond it tensor sizes overflow 64 bits."""
ANY_METHOD = "auto"
CAUSAL_LM = "causal_lm"
RECIPE_ENDINGS = (".yaml", ".yml")
METHODS: Mapping[str, Mapping[str, Any]] = {
    "full": {"lora.rank": None, "lora.quantize": False},
    "lora": {"lora.rank": DEFAULT_RANK, "lora.quantize": False},
    "qlora": {"lora.rank": DEFAULT_RANK, "lora.quantize": True},
}
"""What --method trains, by recipe key; each needs less memory than the one before it."""
MASK_SHARE = 0.01
"""Attention across documents is a fallback only if one sample's mask takes at least this share of the GPU's memory."""
_OF_PLAN = {
    "train": ("batch_size", "objective", "max_grad_norm"),
    "data": ("sequence_length", "images", "image_size", "packing", "cross_document_attention"),
}
"""Keys besides those of techniques, heads and post-training that a plan of a model depends on."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of `tigon plan` that describe the run."""

    target: str
    """A model or a recipe file."""
    gpu: Gpu
    given: Mapping[str, Any] = field(default_factory=dict)
    """Recipe keys whose short forms were given, with their values."""
    assignments: Sequence[str] = ()
    """`--set`; the short forms are applied after them."""
    effective_batch: int | None = None
    method: str = ANY_METHOD
    host_memory: str | None = None

    @property
    def is_recipe(self) -> bool:
        return self.target.endswith(RECIPE_ENDINGS)

    @property
    def assigned(self) -> Mapping[str, str]:
        """The recipe keys of `--set`, and their texts."""
        return {key_of(text.partition("=")[0].strip()): text for text in self.assignments}


def problem_of(flags: Flags) -> SearchProblem:
    """The search problem that the flags describe.

    Raises:
        UsageError: A flag has an unknown value or a value out of range, or flags exclude each other.
        RecipeError: The recipe cannot be read or is refused.
    """
    check_flags(flags)
    host_bytes = _host_bytes(flags.host_memory)
    problem = _of_recipe(flags) if flags.is_recipe else _of_model(flags)
    precision = problem.request.settings.train.precision
    if precision == "fp8" and not flags.gpu.has_fp8:
        raise UsageError(
            f"{flags.gpu} has no FP8 matmuls, which need an NVIDIA GPU from Ada on (compute capability 8.9); use "
            "--precision bf16."
        )
    if precision in ("amp-bf16", "bf16") and not flags.gpu.has_bf16:
        raise UsageError(f"{flags.gpu} has no bf16, so --precision {precision} does not run on it; use amp-fp16.")
    fallbacks = _fallbacks(flags, problem.request)
    return replace(problem, host_bytes=host_bytes, fallbacks=fallbacks)


# --- checks of flags -------------------------------------------------------------------------------------------------


def check_flags(flags: Flags) -> None:
    """Check each value by the rules of its recipe key, with the flag's name in the message.

    Raises:
        UsageError: A value is unknown or out of range, or flags exclude each other.
    """
    objective = flags.given.get(OBJECTIVE.key, CAUSAL_LM)
    _check_objective(objective, flags)
    for key, value in flags.given.items():
        if problem := _complaint(key, value):
            raise UsageError(f"--{FLAG_OF[key].flag} {problem}.")
    if flags.effective_batch is not None and not 1 <= flags.effective_batch <= MOST:
        raise UsageError(f"--effective-batch is {flags.effective_batch}; it must be 1 to {MOST}.")
    if flags.method != ANY_METHOD and flags.method not in METHODS:
        raise UsageError(f"--method is {flags.method!r}; choose one of {', '.join([ANY_METHOD, *METHODS])}.")
    for key, wanted in METHODS.get(flags.method, {}).items():
        if key in flags.given and bool(flags.given[key]) != bool(wanted):
            raise UsageError(f"--{FLAG_OF[key].flag} contradicts --method {flags.method}; leave one of them out.")
    if IMAGES.key in flags.given and (MEDUSA.key in flags.given or objective != CAUSAL_LM):
        raise UsageError("--images trains the next token's loss; leave --medusa and --objective out.")


def _complaint(key: str, value: object) -> str | None:
    """The end of a sentence that begins with the flag and says what is wrong with its value; None if nothing."""
    if isinstance(value, int) and value > MOST and key != "data.sequence_length":  # the model limits --seq
        return f"is {value}; it must be at most {MOST}"
    if (predicted := FLAG_OF[key].predicted) and value not in predicted:
        return f"is {value!r}; it must be one of {', '.join(predicted)}"
    try:
        Recipe().having({key: value})
    except RecipeError as error:
        return str(error).removeprefix(f"{key} ")
    return None


def _check_objective(objective: str, flags: Flags) -> None:
    """Refuse an unknown objective, and flags that do not go with it."""
    others = (*post_training_rules.TAKES, *classify_rules.CLASSIFICATION.names)
    if objective == "medusa":
        raise UsageError("--objective medusa: use --medusa N for the heads.")
    if objective != CAUSAL_LM and objective not in others:
        raise UsageError(f"--objective {objective} is not one of {CAUSAL_LM}, {', '.join(others)}.")
    given = flags.given
    if objective != CAUSAL_LM:
        for short in (MEDUSA, STAGE):
            if short.key in given:
                shown = f"--{short.flag} {given[short.key]}"
                raise UsageError(f"{shown} trains heads, which --objective {objective} does not; leave one out.")
    elif STAGE.key in given and MEDUSA.key not in given and not flags.is_recipe:
        raise UsageError(f"--stage {given[STAGE.key]} requires --medusa N; add --medusa 3.")
    if IMAGE_SIZE.key in given and IMAGES.key not in given and not flags.is_recipe:
        raise UsageError(f"--image-size {given[IMAGE_SIZE.key]} requires --images N; add --images 1.")


def _check_assignment(key: str, text: str, objective: str) -> None:
    """Refuse `--set` of a key on which a plan of a model does not depend."""
    section, _, name = key.partition(".")
    if section == "post_training" and objective == CAUSAL_LM:
        names = ", ".join(post_training_rules.TAKES)
        raise UsageError(f"--set {text} requires a recipe, or --objective with one of {names}.")
    if section not in ("post_training", "heads") and name not in _OF_PLAN.get(section, ()) and not DEFAULT.knows(key):
        raise UsageError(f"--set {text} requires a recipe; a plan of a model takes only keys that change it.")


def _values(flags: Flags, base: Recipe) -> dict[str, Any]:
    """The recipe keys of --method and the short forms, with those that they imply where `base` has the default."""
    method = METHODS.get(flags.method, {})
    changed = {key: value for key, value in method.items() if base.value(key) != value}
    if method.get("lora.rank") and base.lora.used:
        changed.pop("lora.rank", None)  # --method keeps the recipe's rank
    implied = {key: value for name in flags.given for key, value in FLAG_OF[name].implies.items()}
    default = Recipe()
    free = {key: value for key, value in implied.items() if base.value(key) == default.value(key)}
    return {**free, **changed, **flags.given}


# --- from a model ----------------------------------------------------------------------------------------------------


def _of_model(flags: Flags) -> SearchProblem:
    """A run with a recipe's defaults, the keys of `--set`, and the flags."""
    base = recipe_checks.of_assignments(flags.assignments)
    for key, text in flags.assigned.items():
        _check_assignment(key, text, flags.given.get(OBJECTIVE.key, CAUSAL_LM))
    config = _config_of(flags.target)
    values = _values(flags, base)
    given = {*flags.assigned, *values, *METHODS.get(flags.method, {})}
    recipe = base.having({"model.name": flags.target, **values})
    settings = recipe.settings()
    # A recipe's `auto` is fp32 on such a GPU; a plan of a model may choose what a person would set there.
    if not flags.gpu.has_bf16 and "train.precision" not in given:
        settings = settings.having({"train.precision": "amp-fp16"})
    if settings.train.optimizer_row.in_backward:
        recipe = recipe.having({"train.max_grad_norm": 0})
    if flags.effective_batch is not None:
        recipe = _with_effective_batch(recipe, flags)
    chooses = recipe.train.auto_checkpointing
    # `auto` stays free, so that the recommendations may change it
    free = (frozenset(SEARCHES) - given) | (frozenset({"train.checkpointing"}) if chooses else frozenset())
    try:
        config = config_for(recipe, config)
    except RecipeError as error:
        raise UsageError(str(error).replace("train.objective:", "--objective")) from None
    planned = _planned(recipe, config)
    return SearchProblem(
        request=request_of(recipe, config, settings, planned, evaluated=recipe.data.has_eval),
        free=free,
        gpu=flags.gpu,
        effective_batch=flags.effective_batch,
        auto=chooses,
        auto_divides="train.gradient_accumulation" in free and not post_training_rules.is_post_training(recipe),
        one_shape=recipe_checks.has_one_shape(recipe) and not packed_documents.has_states(config),
    )


def _config_of(target: str) -> PreTrainedConfig:
    """The config of a model by its name. Only a hub id that tigon does not carry uses the network."""
    _quiet([target])
    return load_config(carried(target) or target)


def _planned(recipe: Recipe, config: PreTrainedConfig) -> PlannedObjective:
    """The objective of a plan of a model, which needs neither TRL nor rows."""
    if post_training_rules.is_post_training(recipe):
        return planned_objective(recipe)

    def shapes() -> dict[str, tuple[int, ...]]:
        model = build_on_meta(recipe.model.name, config)
        return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    try:
        return objective_of(recipe, config, shapes).planned()
    except RecipeError as error:
        text = str(error).replace("model.name: ", "").replace("data.images is", "--images is")
        raise UsageError(text.replace("set data.images: 0", "leave --images out")) from None


def _with_effective_batch(recipe: Recipe, flags: Flags) -> Recipe:
    """The recipe with the micro-batch that follows from --effective-batch and --accumulate, if both are given."""
    gpus, effective_batch = recipe.sharding.gpus, flags.effective_batch
    assert effective_batch is not None
    batch, accumulate = flags.given.get(BATCH.key), flags.given.get(ACCUMULATE.key)
    each = gpus * (accumulate or 1)
    if effective_batch % each:
        divisor = f"--gpus {gpus}" + (f" x --accumulate {accumulate}" if accumulate else "")
        raise UsageError(f"--effective-batch {effective_batch} is not a multiple of {divisor}.")
    if accumulate is None:
        return recipe
    if batch not in (None, effective_batch // each):
        raise UsageError(
            f"--batch {batch} x --accumulate {accumulate} x --gpus {gpus} is not --effective-batch {effective_batch}; "
            "leave one of them out."
        )
    return recipe.having({BATCH.key: effective_batch // each})


# --- from a recipe ---------------------------------------------------------------------------------------------------


def _of_recipe(flags: Flags) -> SearchProblem:
    """The run of `tigon train RECIPE.yaml` with the flags as `--set`, on the flags' GPU."""
    from tigon.trainer import model as models  # not for --help
    from tigon.trainer.guards import auto_checkpointing, prediction, preflight  # not for --help
    from tigon.trainer.prepare import quiet_libraries  # not for --help

    path = Path(flags.target)
    assignments = [*flags.assignments, *_assignments(flags, path)]
    recipe = recipe_checks.load(path, assignments, gpu_present=lambda: True)
    if recipe.train.device == "cpu":
        raise UsageError(
            f"{path}: train.device is cpu, and a plan is of a run on a GPU; add --set train.device=auto to plan it."
        )
    quiet_libraries(recipe)
    shape = carried(recipe.model.name)
    config = models.load_config(recipe.model) if shape is None else load_config(shape)
    preflight.check_lengths(recipe, config)
    precision = recipe.train.precision
    if precision == AUTO:  # what `tigon train` chooses on this GPU
        precision = "amp-bf16" if flags.gpu.has_bf16 else "fp32"
    settings, evaluated = recipe.settings(precision=precision), recipe.data.has_eval
    request = prediction.request_of(recipe, config, settings, evaluated=evaluated)
    free = prediction.free_in(recipe) - set(flags.given)
    if recipe.train.auto_checkpointing:
        recipe, _ = auto_checkpointing.chosen_for(recipe, request, flags.gpu)
        chosen = ("train.checkpointing", "train.gradient_accumulation", "train.cuda_graphs")
        settings = settings.having({key: recipe.value(key) for key in chosen})
        request = prediction.request_of(recipe, config, settings, evaluated=evaluated)
    if checkpoint := recipe_checks.checkpoint_instead(recipe):
        assignments.append(f"model.name={checkpoint}")  # the recipe is a plan's: `tigon train` refuses the preset
    words = (word for text in assignments for word in ("--set", text))
    return SearchProblem(
        request=request,
        free=free,
        gpu=flags.gpu,
        effective_batch=flags.effective_batch,
        command=("tigon", "train", str(path), *words),
    )


def _assignments(flags: Flags, path: Path) -> list[str]:
    """The flags as `--set` assignments of the recipe."""
    recipe = recipe_checks.load(path, flags.assignments, gpu_present=lambda: True, checked=False)
    values = _values(flags, recipe)
    if flags.effective_batch is not None:
        each = values.get(BATCH.key, recipe.train.batch_size) * values.get(GPUS.key, recipe.sharding.gpus)
        if flags.effective_batch % each:
            raise UsageError(
                f"--effective-batch {flags.effective_batch} is not a multiple of {each}, the samples of {path}'s "
                "micro-batches on all GPUs; give --batch too."
            )
        values[ACCUMULATE.key] = flags.effective_batch // each
    return [f"{key}={'null' if value is None else as_recipe.word(value)}" for key, value in values.items()]


# --- the rest --------------------------------------------------------------------------------------------------------


def _fallbacks(flags: Flags, request: Request) -> tuple[Fallback, ...]:
    """What to try if nothing fits: attention across documents if the mask is large, fewer trained weights, and frozen
    layers on the host."""
    found, settings = [], request.settings
    chooses = flags.method == ANY_METHOD
    large = request.seq**2 >= MASK_SHARE * flags.gpu.memory_bytes
    if chooses and request.masked and not request.objective.pads and large:
        found.append(Fallback(name=CROSS_DOCUMENT, cross_document=True))
    if chooses and not {"lora.rank", "lora.quantize"} & set(flags.given):
        lora = request.settings.lora
        now = ("qlora" if lora.quantize else "lora") if lora.used else "full"
        for name in list(METHODS)[list(METHODS).index(now) + 1 :]:
            changed = dict(METHODS[name]) | ({"lora.rank": lora.rank} if lora.rank else {})
            words = "QLoRA adapters on 4-bit weights" if changed["lora.quantize"] else "LoRA adapters"
            found.append(Fallback(name=words, settings=changed))
            settings = request.settings.having(changed)
    last = layers_on_host(settings)
    if last is not None:
        before = found[-1] if settings is not request.settings else Fallback(name="")
        name = " and ".join(filter(None, (before.name, last.name)))
        found.append(Fallback(name=name, settings={**before.settings, **last.settings}))
    return tuple(found)


def _host_bytes(text: str | None) -> int | None:
    """The bytes of --host-memory. Raises UsageError if it is not a size."""
    if text is None:
        return None
    found = size_bytes(text)
    if found is None or found > (1 << 20) * GIB:
        raise UsageError(f"--host-memory is {text!r}; give a size such as 64GiB.")
    return found


def _quiet(models: Sequence[str]) -> None:
    """Disable the network unless a model is a hub id, and silence libraries. Call before importing transformers."""
    hub.set_offline_mode(models)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # tigon turns the relevant warnings into errors
    quiet_packages()
