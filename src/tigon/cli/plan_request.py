"""What `tigon plan` is asked: a search problem from a model's name and flags, or from a recipe and flags."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tigon._quiet import quiet_packages
from tigon.cli import short_forms
from tigon.errors import RecipeError, UsageError
from tigon.models.loading import hub
from tigon.models.loading.config import load_config
from tigon.models.loading.presets import carried
from tigon.objectives import post_training_rules, recipe_checks
from tigon.objectives.base import PlannedObjective
from tigon.objectives.causal_lm import PlannedCausalLM
from tigon.objectives.choose import planned_objective
from tigon.objectives.medusa import planned_medusa
from tigon.objectives.vision_language import planned_images
from tigon.planner.gpus import GIB, Gpu, size_bytes
from tigon.planner.remembered_config import real_config, remembered_config
from tigon.planner.render import as_recipe
from tigon.planner.request import Request
from tigon.planner.search.space import CROSS_DOCUMENT, Fallback, SearchProblem
from tigon.recipe.keys import MIN_SEQUENCE, Recipe
from tigon.techniques import SEARCHES
from tigon.techniques.keys.settings import Settings, complaint_about
from tigon.techniques.keys.train import AUTO
from tigon.techniques.lora import DEFAULT_RANK
from tigon.techniques.optimizers import OPTIMIZERS

DEFAULT_BATCH, DEFAULT_SEQ = 8, 1024
"""The defaults of train.batch_size and data.sequence_length in a recipe."""
EVALUATED = True
"""A recommended recipe evaluates, because the default of data.eval_fraction is not 0."""
MOST = 1 << 20
"""The largest value of an integer flag, except --seq. Beyond it tensor sizes overflow 64 bits."""
CAUSAL_LM = "causal_lm"
ANY_METHOD = "auto"
RECIPE_ENDINGS = (".yaml", ".yml")
METHODS: Mapping[str, Mapping[str, Any]] = {
    "full": {"lora.rank": None, "lora.quantize": False},
    "lora": {"lora.rank": DEFAULT_RANK, "lora.quantize": False},
    "qlora": {"lora.rank": DEFAULT_RANK, "lora.quantize": True},
}
"""What --method trains, by recipe key; each needs less memory than the one before it."""
MASK_SHARE = 0.01
"""Attention across documents is a fallback only if one sample's mask takes at least this share of the GPU's memory."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of `tigon plan` that describe the run."""

    target: str
    """A model or a recipe file."""
    gpu: Gpu
    batch: int | None = None
    seq: int | None = None
    effective_batch: int | None = None
    method: str = ANY_METHOD
    host_memory: str | None = None
    medusa: int | None = None
    stage: int | None = None
    objective: str = CAUSAL_LM
    images: int | None = None
    image_size: int | None = None
    assignments: Sequence[str] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    """Recipe keys whose flags were given, with their values."""

    @property
    def is_recipe(self) -> bool:
        return self.target.endswith(RECIPE_ENDINGS)


def problem_of(flags: Flags) -> SearchProblem:
    """The search problem that the flags describe.

    Raises:
        UsageError: A flag has an unknown value or a value out of range, or flags exclude each other.
        RecipeError: The recipe cannot be read or is refused.
    """
    given = _check_flags(flags)
    host_bytes = _host_bytes(flags.host_memory)
    problem = (_of_recipe if flags.is_recipe else _of_model)(replace(flags, given=given))
    _check_fp8(flags.gpu, problem.request.settings.train.precision)
    if problem.request.settings.train.precision in ("amp-bf16", "bf16") and not flags.gpu.has_bf16:
        used = problem.request.settings.train.precision
        raise UsageError(f"{flags.gpu} has no bf16, so --precision {used} does not run on it; use amp-fp16.")
    fallbacks = _fallbacks(flags, problem.request) if flags.method == ANY_METHOD else ()
    return replace(problem, host_bytes=host_bytes, fallbacks=fallbacks)


def _check_fp8(gpu: Gpu, precision: str | None) -> None:
    """Raise UsageError if the precision is fp8 and the GPU has no FP8 matmuls."""
    if precision == "fp8" and not gpu.has_fp8:
        raise UsageError(
            f"{gpu} has no FP8 matmuls, which need an NVIDIA GPU from Ada on (compute capability 8.9); use --precision "
            "bf16."
        )


def _check_flags(flags: Flags) -> dict[str, Any]:
    """Check sizes and settings, each by its own rules. Returns the given settings with those that they imply.

    Raises:
        UsageError: A value is unknown or out of range, or flags contradict --method.
    """
    _check_sizes({
        "batch": flags.batch, "seq": flags.seq, "effective-batch": flags.effective_batch, "images": flags.images,
        "image-size": flags.image_size,
    })  # fmt: skip
    if flags.images and (flags.medusa is not None or flags.objective != CAUSAL_LM):
        raise UsageError("--images trains the next token's loss; leave --medusa and --objective out.")
    if flags.image_size is not None and not flags.images and not flags.is_recipe:
        raise UsageError(f"--image-size {flags.image_size} requires --images N; add --images 1.")
    given = _with_method(flags.method, flags.given)
    _check_settings(given)
    return given


# --- from a model ----------------------------------------------------------------------------------------------------


def _of_model(flags: Flags) -> SearchProblem:
    given, batch = dict(flags.given), flags.batch
    chooses = given.get("train.checkpointing", AUTO) == AUTO
    if given.get("train.checkpointing") == AUTO:
        del given["train.checkpointing"]  # left free, so that the recommendations may change it
    settings = Settings.of(given)
    # A recipe's `auto` is fp32 on such a GPU; a plan of a model may choose what a person would set there.
    if not flags.gpu.has_bf16 and "train.precision" not in given:
        settings = settings.having({"train.precision": "amp-fp16"})
    if flags.effective_batch is not None:
        batch = _micro_batch(
            flags.effective_batch, batch, settings.sharding.gpus, given.get("train.gradient_accumulation")
        )
    free = frozenset(SEARCHES) - set(given)
    config = _config_of(flags.target)
    if flags.medusa is not None:
        planned: PlannedObjective = planned_medusa(flags.target, real_config(config), flags.medusa, flags.stage or 1)
    elif flags.images:
        planned = _with_images(flags, real_config(config))
    elif flags.objective == CAUSAL_LM:
        planned = PlannedCausalLM()
    else:
        planned = _post_training(flags.objective, flags.assignments)
    request = Request(
        model=flags.target, config=config, batch=DEFAULT_BATCH if batch is None else batch,
        seq=DEFAULT_SEQ if flags.seq is None else flags.seq, settings=settings,
        clipped=not OPTIMIZERS[settings.train.optimizer].in_backward,
        masked=not settings.model.attention.startswith("flash"),
        objective=planned, evaluated=EVALUATED,
    )  # fmt: skip
    return SearchProblem(
        request=request, free=free, gpu=flags.gpu, effective_batch=flags.effective_batch,
        auto=chooses, auto_divides="train.gradient_accumulation" in free and flags.objective == CAUSAL_LM,
    )  # fmt: skip


def _config_of(target: str) -> Any:
    """The config of a model by its name. Only a hub id that tigon does not carry uses the network."""
    _quiet([target])
    return remembered_config(carried(target) or target)


def check_objective(objective: str, heads: Mapping[str, int | None], assignments: Sequence[str]) -> None:
    """Refuse an unknown objective, and flags that do not go with it.

    heads: the values of --medusa and --stage.
    """
    names = ", ".join(post_training_rules.TAKES)
    if objective == "medusa":
        raise UsageError("--objective medusa: use --medusa N for the heads.")
    if objective != CAUSAL_LM and objective not in post_training_rules.TAKES:
        raise UsageError(f"--objective {objective} is not one of {CAUSAL_LM}, {names}.")
    if objective == CAUSAL_LM:
        if heads["stage"] is not None and heads["medusa"] is None:
            raise UsageError(f"--stage {heads['stage']} requires --medusa N; add --medusa 3.")
        if assignments:
            raise UsageError(f"--set {assignments[0]} requires a recipe, or --objective with one of {names}.")
        return
    for name, value in heads.items():
        if value is not None:
            raise UsageError(f"--{name} {value} trains heads, which --objective {objective} does not; leave one out.")


def _with_images(flags: Flags, config: Any) -> PlannedObjective:
    from tigon.data.images import load_processor  # not for --help

    assert flags.images is not None
    path = Path(flags.target)
    name = str(path.parent) if path.is_file() else flags.target
    try:
        processor = load_processor(name, revision=None, trust_remote_code=False)
        return planned_images(flags.target, config, flags.images, flags.image_size, processor)
    except RecipeError as error:
        text = str(error).replace("model.name: ", "").replace("data.images is", "--images is")
        raise UsageError(text.replace("set data.images: 0", "leave --images out")) from None


def _post_training(objective: str, assignments: Sequence[str]) -> PlannedObjective:
    for text in assignments:
        if not text.strip().startswith("post_training."):
            raise UsageError(
                f"--set {text}: a plan of a model takes keys of post_training, such as post_training.beta=0.1; the "
                "other settings are flags (tigon plan --help). A plan of a recipe takes every key."
            )
    return planned_objective(recipe_checks.of_assignments([*assignments, f"train.objective={objective}"]))


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
    settings = recipe.settings(precision=_precision(recipe, flags.gpu))
    evaluated = recipe.data.has_eval
    request = prediction.request_of(recipe, config, settings, evaluated=evaluated)
    free = prediction.free_in(recipe) - set(flags.given)
    if recipe.train.checkpointing == AUTO:
        recipe, _ = auto_checkpointing.chosen_for(recipe, request, flags.gpu)
        chosen = settings.having({
            key: recipe.value(key) for key in ("train.checkpointing", "train.gradient_accumulation")
        })  # fmt: skip
        request = prediction.request_of(recipe, config, chosen, evaluated=evaluated)
    if checkpoint := recipe_checks.checkpoint_instead(recipe):
        assignments.append(f"model.name={checkpoint}")  # the recipe is a plan's: `tigon train` refuses the preset
    words = (word for text in assignments for word in ("--set", text))
    return SearchProblem(
        request=request, free=free, gpu=flags.gpu, effective_batch=flags.effective_batch,
        command=("tigon", "train", str(path), *words),
    )  # fmt: skip


def _precision(recipe: Recipe, gpu: Gpu) -> str:
    """The recipe's precision; for `auto` the one that `tigon train` chooses on this GPU."""
    return recipe.train.precision if recipe.train.precision != "auto" else "amp-bf16" if gpu.has_bf16 else "fp32"


def _assignments(flags: Flags, path: Path) -> list[str]:
    """The flags as `--set` assignments of the recipe.

    Raises:
        UsageError: A flag is only for a plan of a model.
    """
    for name, value in (("medusa", flags.medusa), ("stage", flags.stage)):
        if value is not None:
            raise UsageError(f"--{name} is for a plan of a model; for {path} use --set with keys of heads.")
    if flags.objective != CAUSAL_LM:
        raise UsageError(f"--objective is for a plan of a model; for {path} use --set train.objective.")
    recipe = recipe_checks.load(path, flags.assignments, gpu_present=lambda: True, checked=False)
    by_method = METHODS.get(flags.method, {})
    given = {name: value for name, value in flags.given.items() if name not in by_method or recipe.value(name) != value}
    if by_method.get("lora.rank") and recipe.lora.rank is not None:
        given.pop("lora.rank", None)  # --method keeps the recipe's rank
    values = dict(given)
    if flags.batch is not None:
        values["train.batch_size"] = flags.batch
    if flags.seq is not None:
        values["data.sequence_length"] = flags.seq
    if flags.images is not None:
        values["data.images"] = flags.images
    if flags.image_size is not None:
        values["data.image_size"] = flags.image_size
    if flags.effective_batch is not None:
        each = values.get("train.batch_size", recipe.train.batch_size) * given.get(
            "sharding.gpus", recipe.sharding.gpus
        )
        if flags.effective_batch % each:
            raise UsageError(
                f"--effective-batch {flags.effective_batch} is not a multiple of {each}, the samples of {path}'s "
                "micro-batches on all GPUs; give --batch too."
            )
        values["train.gradient_accumulation"] = flags.effective_batch // each
    return [f"{key}={'null' if value is None else as_recipe.word(value)}" for key, value in values.items()]


# --- flags -----------------------------------------------------------------------------------------------------------


def _with_method(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, those that their flags imply (--qlora alone means a rank), and those of --method."""
    if method != ANY_METHOD and method not in METHODS:
        raise UsageError(f"--method is {method!r}; choose one of {', '.join([ANY_METHOD, *METHODS])}.")
    chosen = METHODS.get(method, {})
    for name, value in given.items():
        if name in chosen and bool(chosen[name]) != bool(value):
            raise UsageError(f"--{_FLAGS[name].flag} contradicts --method {method}; leave one of them out.")
    implied = {key: value for name in given for key, value in _FLAGS[name].implies.items()}
    return {**chosen, **implied, **given}


def _fallbacks(flags: Flags, request: Request) -> tuple[Fallback, ...]:
    """What to try if nothing fits: attention across documents if the mask is large, and then fewer trained weights."""
    found = []
    if request.masked and not request.objective.pads and request.seq**2 >= MASK_SHARE * flags.gpu.memory_bytes:
        found.append(Fallback(name=CROSS_DOCUMENT, cross_document=True))
    if not {"lora.rank", "lora.quantize"} & set(flags.given):
        lora = request.settings.lora
        now = ("qlora" if lora.quantize else "lora") if lora.rank is not None else "full"
        for name in list(METHODS)[list(METHODS).index(now) + 1 :]:
            changed = dict(METHODS[name]) | ({"lora.rank": lora.rank} if lora.rank else {})
            words = "QLoRA adapters on 4-bit weights" if changed["lora.quantize"] else "LoRA adapters"
            found.append(Fallback(name=words, settings=changed))
    return tuple(found)


def _host_bytes(text: str | None) -> int | None:
    """The bytes of --host-memory. Raises UsageError if it is not a size."""
    if text is None:
        return None
    found = size_bytes(text)
    if found is None or found > (1 << 20) * GIB:
        raise UsageError(f"--host-memory is {text!r}; give a size such as 64GiB.")
    return found


def _check_sizes(sizes: Mapping[str, int | None]) -> None:
    for name, value in sizes.items():
        least = MIN_SEQUENCE if name == "seq" else 1
        if value is not None and value < least:
            raise UsageError(f"--{name} is {value}; it must be at least {least}.")
        if value is not None and value > MOST and name != "seq":  # the model limits --seq
            raise UsageError(f"--{name} is {value}; it must be at most {MOST}.")


def _check_settings(given: Mapping[str, Any]) -> None:
    """Check each value by the rules of its recipe key, with the flag's name in the message."""
    for key, value in given.items():
        short = _FLAGS[key]
        problem = complaint_about(key, value)
        if short.predicted and value not in short.predicted:
            problem = f"is {value!r}; it must be one of {', '.join(short.predicted)}"
        if problem is None and isinstance(value, int) and value > MOST:
            problem = f"is {value}; it must be at most {MOST}"
        if problem is not None:
            raise UsageError(f"--{short.flag} {problem}.")


_FLAGS = {short.key: short for short in short_forms.TECHNIQUES}


def _micro_batch(effective_batch: int, batch: int | None, gpus: int, accumulate: int | None) -> int | None:
    """Samples per micro-batch if --effective-batch and --accumulate are both given, else `batch`."""
    each = gpus * (accumulate or 1)
    if effective_batch % each:
        divisor = f"--gpus {gpus}" + (f" x --accumulate {accumulate}" if accumulate else "")
        raise UsageError(f"--effective-batch {effective_batch} is not a multiple of {divisor}.")
    if accumulate is None:
        return batch
    if batch not in (None, effective_batch // each):
        raise UsageError(
            f"--batch {batch} x --accumulate {accumulate} x --gpus {gpus} is not --effective-batch {effective_batch}; "
            "leave one of them out."
        )
    return effective_batch // each


def _quiet(models: Sequence[str]) -> None:
    """Disable the network unless a model is a hub id, and silence libraries. Call before importing transformers."""
    hub.set_offline_mode(models)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # tigon turns the relevant warnings into errors
    quiet_packages()
