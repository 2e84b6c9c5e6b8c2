"""Prepares a run: checks the recipe against model and machine, and reads, tokenises and packs the text.

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
from tigon.data import cache, chat_template, documents, images, preferences, preview, reading, row_notes, tokenizer
from tigon.data.document_table import Documents, Texts, split_eval, used_by_weight
from tigon.data.packing import Collator, SampleDataset, fingerprint, unigram_entropy
from tigon.data.tokenizer import IGNORE_INDEX
from tigon.data.tokens import Encoder, Tokens, learns_an_end
from tigon.errors import DataError, RecipeError, TigonError
from tigon.models.hybrid_layers import LayerPath, paths_of, slow_layers
from tigon.models.loading import hub
from tigon.objectives.choose import objective_of
from tigon.recipe.keys import Recipe
from tigon.techniques import TECHNIQUES
from tigon.techniques.lora import lora
from tigon.trainer import model
from tigon.trainer.checkpoint import resume_rules
from tigon.trainer.distributed import extension_lock, launch
from tigon.trainer.evaluation import harness
from tigon.trainer.evaluation.prompts import Prompt, prompt_of, prompts_of
from tigon.trainer.guards import adapter_checks, auto_checkpointing, auto_packing, preflight, self_test
from tigon.trainer.guards.recipe_warnings import RunSize, epochs_of, steps_of, warnings_of
from tigon.trainer.post_training.rewards import load_rewards
from tigon.trainer.setup import Setup, TrainingData

if TYPE_CHECKING:
    import datasets
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

    from tigon.data.packing import Packed, Sample
    from tigon.data.tokenizer import Encoded
    from tigon.objectives.base import Objective
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
    def size_words(self) -> str:
        """How much the run trains: optimizer steps, samples, rows and learned tokens."""
        data, n_steps = self.data, self.data["steps"]
        per_step = resume_rules.samples_per_step(self.recipe, self.settings.sharding.gpus)
        words = f"{n_steps:,} optimizer step{'s' if n_steps > 1 else ''} of {per_step:,} samples"
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


def _prepare(recipe: Recipe, device: torch.device) -> Prepared:
    harness.check(recipe.eval.lm_eval)
    config = model.load_config(recipe.model)
    preflight.check_lengths(recipe, config)
    built = model.without_data(config)
    shapes, layer_paths = model.shapes_of(built), paths_of(built)
    del built
    settings = preflight.check_techniques(recipe, device)
    model.check_stored_format(recipe.model.name, config, keeps_mxfp4=lora.keeps_mxfp4(settings))
    adapter_checks.check_quantized(recipe.model.name, config, settings)
    for technique in TECHNIQUES.values():
        technique.fits(config, settings)
    objective = objective_of(recipe, config, lambda: shapes)
    if objective.trl is None:  # TRL's rows are not packed
        preflight.check_documents(recipe, config)
    adapter_warnings = adapter_checks.check(objective, config, settings)
    preflight.check_disk(recipe, settings, shapes)
    preflight.check_memory(recipe, settings, device, shapes)
    unused_tensors = model.check_weights(recipe.model, config)
    data = recipe.data
    bad = documents.BadRows(data.bad_rows)
    layout = objective.rows(data).layout
    folder = cache.default_folder() if data.cache else None
    read = reading.read(data.sources(), layout, data.max_text_mib, bad, cached=folder)
    if data.eval_source:
        train_docs = read
        eval_docs = reading.read(data.eval_sources(), layout, None, bad, "data.eval_source", folder)
    else:
        train_docs, eval_docs = split_eval(read, data.eval_fraction)
    train_docs = used_by_weight(train_docs)
    if objective.trl is not None:
        load_rewards(objective.trl.rewards)
        _check_teacher(recipe, config)
        preferences.check_alike(itertools.chain(train_docs, eval_docs))
    processor = objective.rows(data).load_processor()
    tok = _tokenizer(recipe, train_docs) if processor is None else processor.tokenizer
    rendering = chat_template.choose(tok, data.template, data.learn, model.end_ids(recipe, config))
    preflight.check_vocabulary(recipe, config, len(tok))
    of_rows: tuple[str, ...] = ()
    if objective.trl is not None:
        _check_chat(tok, read[0])
        of_rows = tuple(filter(None, [preferences.without_template((train_docs, eval_docs), tok)]))
    n_ids = config.get_text_config().vocab_size
    encoder = Encoder(tok, n_ids, rendering, bad, folder)
    encoded: tuple[Sequence[Encoded], Sequence[Encoded]]
    if processor is not None:
        with_images = images.Encoder(processor, rendering, n_ids, data.image_size, bad)
        encoded = with_images.encode(train_docs), with_images.encode(eval_docs)
    else:
        encoded = encoder.encode(train_docs), encoder.encode(eval_docs)
    rows, n_dropped, n_texts = None, 0, [len(train_docs), len(eval_docs)]
    if objective.trl is not None:
        texts = Tokens.of(encoded[0]), Tokens.of(encoded[1])
        n_texts, n_rows = [len(part.rows) for part in texts], len(train_docs) + len(eval_docs)
        (train_docs, eval_docs), encoded = preferences.fitting(
            (train_docs, eval_docs), texts, data.sequence_length, too_long=data.too_long
        )
        n_dropped = n_rows - len(train_docs) - len(eval_docs)
        rows = preferences.as_dataset(train_docs, folder), preferences.as_dataset(eval_docs, folder)
    n_readers = resume_rules.readers(recipe, settings.sharding.gpus)
    if rows is None and processor is None:
        recipe, train, packing_line = auto_packing.chosen(recipe, config, encoded[0], objective, n_readers)
        data = recipe.data
        packing_line += auto_packing.one_by_one_line(recipe, config, layer_paths)
    else:
        train, packing_line = objective.rows(data).pack(encoded[0]), ()
    if rows is not None and not train.samples:
        raise DataError(
            f"{data.source_names}: post_training.base_steps trains on answers, and no row has one; add the column "
            "completion, or set post_training.base_steps: 0"
        )
    eval_packed = objective.rows(data).pack(encoded[1]) if n_texts[1] else None
    eval_samples: Sequence[Sample] = eval_packed.samples if eval_packed else []
    n_samples = len(train.samples if rows is None else rows[0])
    size = _size(recipe, objective, encoded[0], n_samples, len(eval_samples), n_readers)
    _check_enough(recipe, n_samples, size)
    if eval_packed is not None and not eval_packed.samples:
        raise _nothing_to_evaluate(recipe, n_texts[1], eval_packed.n_dropped + n_dropped)
    answered: list[Encoded] = []
    if data.learn == "all" and rows is None and processor is None:  # the samples do not say where an answer begins
        marks = replace(rendering, learn="answers")
        answered = tokenizer.encode([(eval_docs or train_docs)[0]], tok, bad=documents.BadRows("skip"), rendering=marks)
    prompt = _prompt(recipe, tok, config, eval_samples or train.samples, answered)
    preflight.check_sample(recipe, config, len(prompt))
    as_chat = chat_template.is_chat(read[0], tok, rendering) if rows is None else preferences.is_chat(read[0])
    if rows is None and as_chat and not chat_template.has_template(tok):
        tok.chat_template = chat_template.PLAIN_HEADERS  # the rows are encoded already, with the same text
    as_chat = as_chat and rendering.template != "plain" and chat_template.has_template(tok)
    prompts = prompts_of(recipe, tok, config, as_chat=as_chat)
    pad_id = tok.pad_token_id if tok.pad_token_id is not None else (tok.eos_token_id or 0)
    flatten = data.packs and recipe.model.attention.startswith("flash")
    data_summary = {
        "documents": n_texts[0],
        "held_out_documents": n_texts[1],
        "rows": n_samples,
        "steps": steps_of(recipe, size),
        "epochs": epochs_of(recipe, size),
        "tokens": train.n_tokens,
        "held_out_tokens": eval_packed.n_tokens if eval_packed else 0,
        "truncated_rows": train.n_truncated + (eval_packed.n_truncated if eval_packed else 0),
        "dropped_rows": train.n_dropped + (eval_packed.n_dropped if eval_packed else 0) + n_dropped,
        "bad_rows": len(bad.problems),
        "tokenizer_size": len(tok),
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        **(_of_samples(train.samples, eval_samples, size) if rows is None else {}),
        "fingerprint": fingerprint(itertools.chain(train.samples, eval_samples)),
    }
    collator = objective.rows(data).collator(pad_id, flatten)
    prompt_inputs: Mapping[str, Any] = {}
    if processor is not None:
        processor.chat_template = tok.chat_template
        if not recipe.output.sample_prompt:
            prompt_inputs = images.prompt_inputs((eval_samples or train.samples)[0], collator, len(prompt))
        data_summary["images"] = sum(len(document.images) for part in (train_docs, eval_docs) for document in part)
        check_every_row_has_images(train.samples, settings)
    return Prepared(
        recipe=recipe,
        device=device,
        settings=settings,
        config=config,
        shapes=shapes,
        objective=objective,
        wrong_ops=self_test.wrong_ops(recipe, settings, device),
        tokenizer=tok,
        processor=processor,
        train=train,
        eval_samples=eval_samples,
        collator=collator,
        rows=rows,
        prompt=prompt,
        prompt_inputs=prompt_inputs,
        prompts=prompts,
        data=data_summary,
        bad_rows=tuple(bad.problems[:3]),
        shown=tuple(encoded[0][: data.show]),
        rows_line=preview.rows_line(read, tok, rendering) + packing_line + _cache_line(encoder),
        unused_tensors=unused_tensors,
        warnings=(
            *model.text_part_warning(recipe.model, config),
            *adapter_warnings,
            *of_rows,
            *slow_layer_warning(layer_paths, device.type),
            *_row_warnings(encoded, tok, rendering, is_trl=rows is not None),
            *warnings_of(recipe, size, trains_tokenizer=_trains_tokenizer(recipe)),
        ),
        layer_paths=layer_paths,
    )


def slow_layer_warning(paths: Sequence[LayerPath], device_type: str) -> tuple[str, ...]:
    """A warning if a library that is not installed would run layers faster; on a CPU none would."""
    slow = slow_layers(paths) if device_type == "cuda" else None
    return () if slow is None else (slow,)


def check_every_row_has_images(samples: Sequence[Sample], settings: Settings) -> None:
    """Refuse rows without images in a run of several processes.

    A micro-batch of text alone gives the vision tower no gradient, for which the other processes would wait.
    """
    without = sum(not isinstance(sample, images.PicturedSample) for sample in samples)
    if without and (settings.sharding.gpus > 1 or launch.world_size() > 1 or settings.sharding.divides_states):
        raise DataError(
            f"data.source: {without} of {len(samples)} rows have no image, and in several processes every row needs "
            "one; remove these rows, or train in one process"
        )


def _row_warnings(
    encoded: tuple[Sequence[Encoded], Sequence[Encoded]],
    tok: PreTrainedTokenizerBase,
    rendering: chat_template.Rendering,
    *,
    is_trl: bool,
) -> tuple[str, ...]:
    """What the rows have that the run does not teach.

    is_trl: TRL makes the tokens and labels. It reads special tokens in a text, and which ends it learns is not known.
    """
    train, evaluated = encoded
    noted = [*Tokens.of(train).noted(), *Tokens.of(evaluated).noted()]
    warnings = row_notes.warnings_of(noted, without={row_notes.MARK_IN_TEXT} if is_trl else ())
    if not is_trl and not Tokens.of(train).are_text.all() and not learns_an_end(train, tok, rendering):
        warnings += (row_notes.no_end(len(train)),)
    return warnings


def _cache_line(encoder: Encoder) -> tuple[str, ...]:
    return (f"tokens   of {encoder.n_cached:,} documents from the cache, {encoder.folder}",) if encoder.n_cached else ()


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


def _check_chat(tok: PreTrainedTokenizerBase, row: documents.Document) -> None:
    """Refuse messages without a chat template. TRL's trainers have no plain headers to fall back to."""
    if preferences.is_chat(row) and not getattr(tok, "chat_template", None):
        raise DataError(
            f"{row.origin}: the row has messages, but the tokenizer has no chat template; use a tokenizer with one, or "
            "write the prompt and the answers as text"
        )


def _trains_tokenizer(recipe: Recipe) -> bool:
    return recipe.data.tokenizer == "auto" and model.is_preset(recipe.model.name)


def _tokenizer(recipe: Recipe, train_docs: Documents) -> Any:
    name = recipe.data.tokenizer
    if _trains_tokenizer(recipe):
        return tokenizer.train_bpe(Texts(train_docs), recipe.data.vocab_size, cache.default_folder("tokenizers"))
    own = name == "auto"
    return tokenizer.load_tokenizer(
        recipe.model.name if own else name,
        revision=recipe.model.revision if own else None,
        trust_remote_code=recipe.model.trust_remote_code,
    )


def _size(
    recipe: Recipe, objective: Objective, encoded: Sequence[Encoded], n_samples: int, n_eval: int, n_readers: int
) -> RunSize:
    """The size of the run, for the number of its steps."""
    if objective.trl is not None and objective.trl.rewards:  # a sample is a completion; TRL leaves out an unfull step
        per_step = recipe.train.batch_size * recipe.train.gradient_accumulation * n_readers
        n_samples *= recipe.post_training.generations
        n_samples -= n_samples % per_step
    of_text = Tokens.of(encoded).are_text.any()
    n_rows = n_samples if objective.trl is not None else 0 if of_text else len(encoded)
    return RunSize(n_samples, n_eval, n_readers, n_rows=n_rows)


def _of_samples(samples: Sequence[Sample], eval_samples: Sequence[Sample], size: RunSize) -> dict[str, float]:
    """The figures of data.json that the rows of a trainer of TRL do not have."""
    return {
        **({"rows_per_sample": size.n_rows / len(samples)} if size.n_rows else {}),
        "learned_tokens": sum(int((sample.labels_T != IGNORE_INDEX).sum()) for sample in samples),
        "unigram_entropy": unigram_entropy(eval_samples or samples),
    }


def _check_enough(recipe: Recipe, n_samples: int, size: RunSize) -> None:
    """Refuse fewer samples than a step needs; the Trainer would silently take smaller steps."""
    given = f"data.source gives {n_samples} samples of {recipe.data.sequence_length} tokens, fewer than"
    batches = {"train.batch_size": recipe.train.batch_size}
    if recipe.comparison.steps and recipe.comparison.batch_size:
        batches["comparison.batch_size"] = recipe.comparison.batch_size
    for name, batch_size in batches.items():
        if n_samples < batch_size:
            apart = _unpacked(recipe, size, batch_size)
            raise RecipeError(f"{given} {name} {batch_size}; {apart}lower {name} or data.sequence_length, or add text")
    train = recipe.train
    samples_per_step = train.batch_size * train.gradient_accumulation * size.n_processes
    if n_samples < samples_per_step:
        factors = f"train.batch_size {train.batch_size} x train.gradient_accumulation {train.gradient_accumulation}"
        shared = " groups of" if recipe.sharding.sequence > 1 else ""
        factors += f" x {size.n_processes}{shared} processes" if size.n_processes > 1 else ""
        raise RecipeError(
            f"{given} the {samples_per_step} of one step ({factors}); {_unpacked(recipe, size, samples_per_step)}"
            "lower one of these factors or data.sequence_length, or add text"
        )


def _unpacked(recipe: Recipe, size: RunSize, wanted: int) -> str:
    """The advice to give each row its own sample, if that makes enough of them."""
    if not recipe.data.packs or size.n_rows < max(wanted, size.n_samples + 1):
        return ""
    return f"set data.packing: false, which gives {size.n_rows}, "


def _nothing_to_evaluate(recipe: Recipe, n_documents: int, n_dropped: int) -> DataError:
    """The error for eval documents without a usable sample. The run would silently lack an eval loss."""
    data = recipe.data
    if data.eval_source:
        what, fix = (
            f"data.eval_source: {', '.join(source.name for source in data.eval_sources())}",
            "name other files, or leave data.eval_source out",
        )
    else:
        what, fix = f"data.eval_fraction: {data.eval_fraction:g} of the documents", "hold out more of them, or 0"
    return DataError(
        f"{what}: {n_documents} documents give no sample to evaluate on: {n_dropped} are longer than "
        f"data.sequence_length {data.sequence_length} (data.too_long: {data.too_long}), {n_documents - n_dropped} are "
        f"unusable or have no token to predict; {fix}"
    )


def _prompt(
    recipe: Recipe,
    tok: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    samples: Sequence[Sample],
    rows: Sequence[Encoded],
) -> list[int]:
    """The tokens that the text sample continues.

    Args:
        recipe: The recipe.
        tok: The tokenizer.
        config: The model's config.
        samples: Samples to take the prompt of.
        rows: Rows whose answers alone are learned, to take it of instead.
    """
    if text := recipe.output.sample_prompt:
        return [int(i) for i in tok(text)["input_ids"]]
    pairs = [(row.tokens, row.labels) for row in rows]
    if isinstance(samples[0], images.PicturedSample):  # its images go with its tokens
        return prompt_of([(samples[0].tokens_T.tolist(), samples[0].labels_T.tolist())], None)
    limit = preflight.most_positions(config)
    room = None if limit is None else max(1, limit - recipe.output.sample_tokens)
    return prompt_of(pairs or ((each.tokens_T.tolist(), each.labels_T.tolist()) for each in samples), room)
