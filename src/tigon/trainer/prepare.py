"""Prepares a run: checks the recipe against model and machine, and makes its data (run_data.py).

The run folder is created afterwards. Everything that can refuse the run is checked here, when nothing has been written
except a tokenizer and tokens in the user's cache.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tigon._install import install_command
from tigon._quiet import quiet_loading
from tigon.data import images, preferences, preview
from tigon.data.packing import Collator, SampleDataset
from tigon.errors import RecipeError, TigonError
from tigon.models.hybrid_layers import LayerPath, paths_of, slow_layers
from tigon.models.loading import hub
from tigon.objectives.choose import config_for, objective_of
from tigon.recipe.keys import Recipe
from tigon.techniques import TECHNIQUES
from tigon.techniques.lora import lora
from tigon.techniques.optimizers import muon
from tigon.trainer import model, run_data
from tigon.trainer.checkpoint import resume_rules
from tigon.trainer.distributed import extension_lock, launch
from tigon.trainer.evaluation import harness
from tigon.trainer.evaluation.prompts import Prompt, as_chat, prompts_of, sample_prompt
from tigon.trainer.guards import adapter_checks, auto_checkpointing, auto_packing, auto_sequence, preflight, self_test
from tigon.trainer.guards.recipe_warnings import warnings_of
from tigon.trainer.post_training.rewards import load_rewards
from tigon.trainer.post_training.tools_and_environments import load_environment, load_tools
from tigon.trainer.setup import Setup, TrainingData

if TYPE_CHECKING:
    import datasets
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

    from tigon.data.packing import Packed, Sample
    from tigon.data.tokenizer import Encoded
    from tigon.objectives.base import Objective, TrlTraining
    from tigon.techniques.keys.settings import Settings
    from tigon.trainer.guards.prediction import Prediction


def quiet_libraries(recipe: Recipe) -> None:
    """Set offline mode unless the recipe names a hub id, and silence the libraries. Call it before they are imported.

    Raises:
        RecipeError: transformers cannot be imported.
    """
    data_sets = [source.name for source in (*recipe.data.sources(), *recipe.data.eval_sources()) if source.is_hub]
    teacher = filter(None, [recipe.post_training.teacher])
    # lm-evaluation-harness reads the data sets of its tasks from the hub.
    names = [recipe.model.name, recipe.data.tokenizer, *teacher, *data_sets]
    hub.set_offline_mode(names, needed=bool(recipe.eval.lm_eval))
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # TRL's trainers would send the run's settings
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # about DeepSpeed's calls
    try:
        quiet_loading()
    except ImportError as error:  # transformers checks the versions of its dependencies on import
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(f"transformers cannot be imported: {reason}; {install_command('train')}") from None


@dataclass(frozen=True, kw_only=True)
class Prepared(Setup):
    """A recipe that passed all checks, with everything that its run needs."""

    tokenizer: PreTrainedTokenizerBase
    train: Packed
    eval_samples: Sequence[Sample]
    collator: Collator
    prompt: list[int]
    data: dict[str, Any]
    processor: ProcessorMixin | None = None
    """The processor of a model that reads images too."""
    prompt_inputs: Mapping[str, Any] = field(default_factory=dict)
    """The model's arguments for the prompt besides its tokens: its images."""
    rows: tuple[datasets.Dataset, datasets.Dataset] | None = None
    """The rows to train on and those for evaluation, if a trainer of TRL takes them; None: it takes the samples."""
    bad_rows: tuple[str, ...] = ()
    """The problems of the first rows that were skipped."""
    prompts: tuple[Prompt, ...] = ()
    """The prompts of `eval.generate`."""
    shown: tuple[Encoded, ...] = ()
    """The rows that `data.show` prints."""
    rows_line: tuple[str, ...] = ()
    """Lines that name the formats of the rows, unless all data is text, and the cache that their tokens came from."""
    warnings: tuple[str, ...] = ()
    """Settings of the recipe that are allowed but probably mistakes."""
    layer_paths: tuple[LayerPath, ...] = ()
    """Which code runs the layers that have a state instead of attention."""
    unused_tensors: tuple[str, ...] = ()
    """Tensors in the checkpoint's files that the model lacks."""
    command: str = ""
    prediction: Prediction | None = None

    @property
    def n_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def training_data(self) -> TrainingData:
        """The samples, or the rows of a trainer of TRL."""
        if self.rows is not None:
            train, held_out = self.rows
            return TrainingData(train=train, eval=held_out if len(held_out) else None, tokenizer=self.tokenizer)
        held_out = SampleDataset(self.eval_samples) if self.eval_samples else None
        return TrainingData(train=SampleDataset(self.train.samples), eval=held_out, collator=self.collator)

    @property
    def saved_tokenizer(self) -> PreTrainedTokenizerBase | ProcessorMixin:
        """What is saved with the model: its processor, which holds the tokenizer, or its tokenizer."""
        return self.tokenizer if self.processor is None else self.processor

    @property
    def prompt_text(self) -> str:
        """The prompt that the text sample continues. An image's tokens are shown once."""
        return _LONG_RUN.sub(r"\1 x many", self.tokenizer.decode(self.prompt))

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step in all processes."""
        return resume_rules.samples_per_step(self.recipe, self.settings.sharding.gpus)

    @property
    def size_words(self) -> str:
        """How much the run trains: optimizer steps, samples, rows and learned tokens."""
        data, n_steps = self.data, self.data["steps"]
        words = f"{n_steps:,} optimizer step{'s' if n_steps > 1 else ''} of {self.samples_per_step:,} samples"
        words += f", {_few_digits(data['epochs'])} epoch{'' if data['epochs'] == 1 else 's'}"
        if "rows_per_sample" in data:
            each = data["rows_per_sample"]
            words += f"; {_few_digits(each)} row{'' if each == 1 else 's'} per sample"
        if "learned_tokens" in data:
            words += f"; {data['learned_tokens']:,} learned tokens per epoch"
        return words


def _few_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


_LONG_RUN = re.compile(r"(<[^<>]+>)\1{3,}")


def connect(recipe: Recipe, device: torch.device) -> None:
    """Connect to the other processes, if there are any."""
    if launch.started_by_launcher():
        launch.end_with_launcher()
    if recipe.sharding.zero and launch.is_first_of_node():
        extension_lock.wait_for_compilers()
    launch.init_distributed(device, alone=recipe.sharding.divides_states)


def prepare(recipe: Recipe, device: torch.device) -> Prepared:
    """Prepare the run, after `connect`; the main process goes first.

    Raises:
        TigonError: In the main process, if a check refuses the recipe.
        SystemExit: In the other processes, with code 2, so that the error is printed once.
    """
    recipe = auto_checkpointing.resolved(recipe, device)
    try:
        with launch.main_process_first():
            return _prepare(recipe, device)
    except TigonError:
        if launch.rank() > 0:
            raise SystemExit(2) from None
        raise


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """What the checks of the recipe against model and machine found out."""

    recipe: Recipe
    """With a method in place of `sharding.sequence_method: auto`."""
    lines: tuple[str, ...]
    """What was chosen."""
    config: PreTrainedConfig
    shapes: Mapping[str, tuple[int, ...]]
    layer_paths: tuple[LayerPath, ...]
    settings: Settings
    objective: Objective
    unused_tensors: tuple[str, ...]
    warnings: tuple[str, ...]


def _check(recipe: Recipe, device: torch.device) -> _Checked:
    """Check the recipe against model and machine, before any row is read."""
    harness.check_tasks(recipe.eval.lm_eval)
    config = config_for(recipe, model.load_config(recipe.model))
    preflight.check_lengths(recipe, config)
    recipe, lines = auto_sequence.resolved(recipe, config)
    built = model.without_data(config)
    shapes, layer_paths = model.shapes_of(built), paths_of(built, fused=recipe.model.patched)
    if recipe.train.optimizer == "muon":
        muon.check_model(built)
    del built
    preflight.check_backward(recipe.model.name, layer_paths, device)
    settings = preflight.check_techniques(recipe, device)
    model.check_stored_format(recipe.model.name, config, keeps_mxfp4=lora.keeps_mxfp4(settings))
    adapter_checks.check_quantized(recipe.model.name, config, settings)
    for technique in TECHNIQUES.values():
        technique.fits(config, settings)
    objective = objective_of(recipe, config, lambda: shapes)
    if objective.trl is None:  # TRL's rows are not packed
        preflight.check_documents(recipe, config)
    warnings = adapter_checks.check(objective, config, settings)
    preflight.check_disk(recipe, settings, shapes)
    preflight.check_memory(recipe, settings, device, shapes)
    return _Checked(
        recipe=recipe,
        lines=lines,
        config=config,
        shapes=shapes,
        layer_paths=layer_paths,
        settings=settings,
        objective=objective,
        unused_tensors=model.check_weights(recipe.model, config),
        warnings=(
            *model.text_part_warning(recipe.model, config),
            *adapter_checks.read_as_dense_warning(recipe.model.name, config),
            *warnings,
        ),
    )


def _check_scorers(spec: TrlTraining, source: run_data.SourceDocuments) -> None:
    """Load the reward functions, tools and environment, and compare them with the columns of the rows."""
    row = next(iter(source.train), None)
    load_rewards(spec.rewards, columns=None if row is None else tuple(row.row or ()))
    load_tools(spec.tools)
    if spec.environment is not None:
        load_environment(spec.environment)


def _prepare(recipe: Recipe, device: torch.device) -> Prepared:
    checked = _check(recipe, device)
    recipe, config, objective = checked.recipe, checked.config, checked.objective
    source = run_data.read_documents(recipe, objective)
    if objective.trl is not None:
        _check_scorers(objective.trl, source)
        _check_teacher(recipe, config)
        preferences.check_alike(itertools.chain(source.train, source.evaluated))
    packing_line: tuple[str, ...] = ()
    if objective.trl is None:
        recipe, packing_line = auto_packing.with_slow_layers(recipe, config, checked.layer_paths)
    tokens = run_data.tokenise(recipe, config, objective, source)
    data_parallel_size = resume_rules.data_parallel_size(recipe, checked.settings.sharding.gpus)
    data = run_data.samples_of(recipe, config, objective, tokens, data_parallel_size)
    recipe, settings, graphs_line = auto_packing.without_graphs(recipe, data.recipe, checked.settings)
    tok, processor = tokens.tokenizer, tokens.processor
    prompt = sample_prompt(data, config)
    if objective.writes_text:
        preflight.check_sample(recipe, config, len(prompt))
    prompts = prompts_of(recipe, tok, config, as_chat=as_chat(data))
    pad_id = tok.pad_token_id if tok.pad_token_id is not None else (tok.eos_token_id or 0)
    flatten = recipe.data.packs and recipe.model.flash_attention
    collator = objective.rows(recipe.data).collator(pad_id, flatten)
    labels = objective.labels_part
    config = config if labels is None else labels.with_labels(config, pad_id)
    shapes = checked.shapes if config is checked.config else model.parameter_shapes(config)
    prompt_inputs: Mapping[str, Any] = {}
    if processor is not None:
        processor.chat_template = tok.chat_template
        if not recipe.output.sample_prompt:
            prompt_inputs = images.prompt_inputs(data.shown_samples[0], collator, len(prompt))
        run_data.check_every_row_has_images(data.train.samples, checked.settings)
    return Prepared(
        recipe=recipe,
        device=device,
        settings=settings,
        config=config,
        shapes=shapes,
        objective=objective,
        wrong_ops=self_test.wrong_ops(recipe, checked.settings, device),
        tokenizer=tok,
        processor=processor,
        train=data.train,
        eval_samples=data.eval_samples,
        collator=collator,
        rows=data.rows,
        prompt=prompt,
        prompt_inputs=prompt_inputs,
        prompts=prompts,
        data=data.summary(n_parameters=sum(math.prod(shape) for shape in shapes.values())),
        bad_rows=tuple(source.bad.problems[:3]),
        shown=tuple(data.encoded[0][: recipe.data.show]),
        rows_line=(
            labels.rows_line(tokens.train)
            if labels is not None
            else preview.rows_line(source.read, tok, tokens.rendering)
        )
        + checked.lines
        + packing_line
        + data.packing_line
        + graphs_line
        + tokens.cache_line(),
        unused_tensors=checked.unused_tensors,
        warnings=(
            *checked.warnings,
            *tokens.warnings,
            *slow_layer_warning(checked.layer_paths, device.type),
            *data.row_warnings(),
            *warnings_of(recipe, data.size, trains_tokenizer=run_data.trains_tokenizer(recipe)),
        ),
        layer_paths=checked.layer_paths,
    )


def slow_layer_warning(paths: Sequence[LayerPath], device_type: str) -> tuple[str, ...]:
    """A warning if a library that is not installed would run layers faster; on a CPU none would."""
    slow = slow_layers(paths) if device_type == "cuda" else None
    return () if slow is None else (slow,)


def _check_teacher(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Refuse a teacher that cannot be loaded, or whose vocabulary differs from the model's.

    Raises:
        RecipeError: The message names `post_training.teacher`.
    """
    name = recipe.post_training.teacher
    if name is None:
        return
    if model.is_preset(name):
        raise RecipeError(
            f"post_training.teacher: {name} is a preset, whose weights are random; give a model folder or a hub id"
        )
    teacher = replace(recipe.model, name=name, config=None, revision=None)
    try:
        its_config = model.load_config(teacher)
        model.check_stored_format(teacher.name, its_config)
        theirs = its_config.get_text_config().vocab_size
        model.check_weights(teacher, its_config)
    except RecipeError as error:
        raise RecipeError(str(error).replace("model.name", "post_training.teacher")) from None
    ours = config.get_text_config().vocab_size
    if theirs != ours:
        raise RecipeError(
            f"post_training.teacher: {name} has a vocabulary of {theirs}, but {recipe.model.name} has {ours}; use a "
            "teacher with the model's tokenizer"
        )
