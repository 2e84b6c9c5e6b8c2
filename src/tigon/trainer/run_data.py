"""The data of a run: reads its documents, tokenises them, and makes samples of them, or rows for a trainer of TRL.

`read_documents`, `tokenise` and `samples_of` are called in this order. Each refuses what it cannot use.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.data import cache, documents, images, preferences, tokenizer
from tigon.data.chat import chat_template, row_notes
from tigon.data.document_table import Documents, Texts, split_eval, used_by_weight
from tigon.data.packing import fingerprint, unigram_entropy
from tigon.data.source import reading
from tigon.data.tokenizer import IGNORE_INDEX
from tigon.data.tokens import Encoder, Tokens, learns_an_end
from tigon.errors import DataError, RecipeError
from tigon.recipe.keys import Recipe
from tigon.trainer import model
from tigon.trainer.distributed import launch
from tigon.trainer.guards import auto_packing, preflight
from tigon.trainer.guards.recipe_warnings import RunSize, epochs_of, steps_of

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

    from tigon.data.packing import Packed, Sample
    from tigon.data.tokenizer import Encoded
    from tigon.objectives.base import Objective, RowEncoder
    from tigon.techniques.keys.settings import Settings

    _Rows = tuple[datasets.Dataset, datasets.Dataset]
    _Tokens = tuple[Sequence[Encoded], Sequence[Encoded]]


@dataclass(frozen=True, kw_only=True)
class SourceDocuments:
    """The documents that a recipe names."""

    read: Documents
    """All of `data.source`."""
    train: Documents
    evaluated: Documents
    bad: documents.BadRows


def read_documents(recipe: Recipe, objective: Objective) -> SourceDocuments:
    """Read `data.source` and `data.eval_source`, or hold out a part of the first."""
    data, bad = recipe.data, documents.BadRows(recipe.data.bad_rows)
    layout, folder = objective.rows(data).layout, _cache(recipe)
    read = reading.read(data.sources(), layout, data.max_text_mib, bad, cached=folder)
    if data.eval_source:
        train, evaluated = read, reading.read(data.eval_sources(), layout, None, bad, "data.eval_source", folder)
    else:
        train, evaluated = split_eval(read, data.eval_fraction)
    return SourceDocuments(read=read, train=used_by_weight(train), evaluated=evaluated, bad=bad)


def _cache(recipe: Recipe) -> Path | None:
    return cache.default_folder() if recipe.data.cache else None


@dataclass(frozen=True, kw_only=True)
class TokenisedDocuments:
    """The documents of a run as tokens, and what made them."""

    source: SourceDocuments
    tokenizer: Any
    processor: ProcessorMixin | None
    """The processor of a model that reads images too. It holds the tokenizer."""
    rendering: chat_template.Rendering
    encoder: Encoder
    train: Sequence[Encoded]
    evaluated: Sequence[Encoded]
    warnings: tuple[str, ...] = ()

    def cache_line(self) -> tuple[str, ...]:
        """The line that says how many documents' tokens the cache had."""
        n, folder = self.encoder.n_cached, self.encoder.folder
        return (f"tokens   of {n:,} documents from the cache, {folder}",) if n else ()


def tokenise(
    recipe: Recipe, config: PreTrainedConfig, objective: Objective, source: SourceDocuments
) -> TokenisedDocuments:
    """Load or train the tokenizer, and tokenise the documents with it."""
    data = recipe.data
    rows = objective.rows(data)
    processor = rows.load_processor()
    tok = _tokenizer(recipe, source.train) if processor is None else processor.tokenizer
    rendering = chat_template.choose(tok, data.template, data.learn, model.end_ids(recipe, config))
    preflight.check_vocabulary(recipe, config, len(tok))
    warnings: tuple[str, ...] = ()
    if objective.trl is not None:
        _check_chat(tok, source.read[0])
        warnings = tuple(filter(None, [preferences.without_template((source.train, source.evaluated), tok)]))
    n_ids = config.get_text_config().vocab_size
    encoder = Encoder(tok, n_ids, rendering, source.bad, _cache(recipe))
    encodes: Encoder | images.Encoder | RowEncoder = encoder
    if rows.encoder is not None:
        encodes = rows.encoder(tok, source.train, n_ids, source.bad)
    elif processor is not None:
        encodes = images.Encoder(processor, rendering, n_ids, data.image_size, source.bad)
    return TokenisedDocuments(
        source=source,
        tokenizer=tok,
        processor=processor,
        rendering=rendering,
        encoder=encoder,
        train=encodes.encode(source.train),
        evaluated=encodes.encode(source.evaluated),
        warnings=warnings,
    )


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What a run trains on and evaluates on."""

    recipe: Recipe
    """The recipe, in which `data.packing: auto` is decided."""
    objective: Objective
    tokens: TokenisedDocuments
    encoded: tuple[Sequence[Encoded], Sequence[Encoded]]
    """The tokens that became samples or rows: for training and for evaluation."""
    train: Packed
    evaluated: Packed | None
    size: RunSize
    n_texts: tuple[int, int]
    """Documents, or texts of a trainer of TRL: for training and for evaluation."""
    rows: tuple[datasets.Dataset, datasets.Dataset] | None = None
    """The rows that a trainer of TRL takes; None: the Trainer takes the samples."""
    n_dropped: int = 0
    """Rows of a trainer of TRL that were left out because they are too long."""
    packing_line: tuple[str, ...] = ()

    @property
    def eval_samples(self) -> Sequence[Sample]:
        return self.evaluated.samples if self.evaluated else []

    @property
    def shown_samples(self) -> Sequence[Sample]:
        """The samples that prompts are taken of."""
        return self.eval_samples or self.train.samples

    def summary(self, n_parameters: int) -> dict[str, Any]:
        """The figures of data.json."""
        train, evaluated, size, source = self.train, self.evaluated, self.size, self.tokens.source
        summary = {
            "documents": self.n_texts[0],
            "held_out_documents": self.n_texts[1],
            "rows": size.n_samples if self.rows is None else len(self.rows[0]),
            "steps": steps_of(self.recipe, size),
            "epochs": epochs_of(self.recipe, size),
            "tokens": train.n_tokens,
            "held_out_tokens": evaluated.n_tokens if evaluated else 0,
            "truncated_rows": train.n_truncated + (evaluated.n_truncated if evaluated else 0),
            "dropped_rows": train.n_dropped + (evaluated.n_dropped if evaluated else 0) + self.n_dropped,
            "bad_rows": len(source.bad.problems),
            "tokenizer_size": len(self.tokens.tokenizer),
            "parameters": n_parameters,
            **(
                _of_samples(train.samples, self.eval_samples, size)
                if self.rows is None and self.objective.packs
                else {}
            ),
            "fingerprint": fingerprint(itertools.chain(train.samples, self.eval_samples)),
        }
        if self.tokens.processor is not None:
            parts = (source.train, source.evaluated)
            summary["images"] = sum(len(document.images) for part in parts for document in part)
        return summary

    def row_warnings(self) -> tuple[str, ...]:
        """What the rows have that the run does not teach.

        TRL makes the tokens and labels of its rows. It reads special tokens in a text, and which ends it learns is not
        known.
        """
        train, evaluated = (Tokens.of(part) for part in self.encoded)
        if not self.objective.packs:  # a label stands beside the text
            return ()
        is_trl = self.rows is not None
        without = {row_notes.MARK_IN_TEXT} if is_trl else ()
        warnings = row_notes.warnings_of([*train.noted(), *evaluated.noted()], without=without)
        if not is_trl and not train.are_text.all():
            learned = self.encoded[0]
            if not learns_an_end(learned, self.tokens.tokenizer, self.tokens.rendering):
                warnings += (row_notes.no_end(len(learned)),)
        return warnings


def samples_of(
    recipe: Recipe, config: PreTrainedConfig, objective: Objective, tokens: TokenisedDocuments, data_parallel_size: int
) -> RunData:
    """Make the samples or rows of a run, and check that a step and an evaluation have enough of them.

    data_parallel_size: the number of processes that read different samples.
    """
    source = tokens.source
    encoded: _Tokens = tokens.train, tokens.evaluated
    n_texts, n_dropped = (len(source.train), len(source.evaluated)), 0
    rows: _Rows | None = None
    packing_line: tuple[str, ...] = ()
    if objective.trl is not None:
        rows, encoded, n_texts, n_dropped = _rows_of_trl(recipe, tokens)
    if not objective.packs:
        recipe = replace(recipe, data=replace(recipe.data, packing=False))
    if objective.trl is None and tokens.processor is None:
        recipe, train, packing_line = auto_packing.chosen(recipe, config, encoded[0], objective, data_parallel_size)
    else:
        train = objective.rows(recipe.data).pack(encoded[0])
    if rows is not None and not train.samples:
        raise DataError(
            f"{recipe.data.source_names}: post_training.base_steps trains on answers, and no row has one; add the "
            "column completion, or set post_training.base_steps: 0"
        )
    evaluated = objective.rows(recipe.data).pack(encoded[1]) if n_texts[1] else None
    n_samples, n_eval = len(train.samples if rows is None else rows[0]), len(evaluated.samples if evaluated else ())
    size = _size(recipe, objective, encoded[0], n_samples, n_eval, data_parallel_size)
    writes = objective.trl is not None and objective.trl.scores
    _check_enough(recipe, n_samples, size, recipe.post_training.generations if writes else None)
    _check_schedule(recipe, steps_of(recipe, size))
    if evaluated is not None and not evaluated.samples:
        raise _nothing_to_evaluate(recipe, n_texts[1], evaluated.n_dropped + n_dropped)
    return RunData(
        recipe=recipe,
        objective=objective,
        tokens=tokens,
        encoded=encoded,
        train=train,
        evaluated=evaluated,
        size=size,
        n_texts=n_texts,
        rows=rows,
        n_dropped=n_dropped,
        packing_line=packing_line,
    )


def _rows_of_trl(recipe: Recipe, tokens: TokenisedDocuments) -> tuple[_Rows, _Tokens, tuple[int, int], int]:
    """The rows that a trainer of TRL takes, the tokens of their texts, and the numbers of texts and of dropped rows."""
    data, parts = recipe.data, (tokens.source.train, tokens.source.evaluated)
    texts = Tokens.of(tokens.train), Tokens.of(tokens.evaluated)
    fitting, encoded = preferences.fitting(parts, texts, data.sequence_length, too_long=data.too_long)
    folder = _cache(recipe)
    rows = preferences.as_dataset(fitting[0], folder), preferences.as_dataset(fitting[1], folder)
    n_dropped = sum(map(len, parts)) - sum(map(len, fitting))
    return rows, encoded, (len(texts[0].rows), len(texts[1].rows)), n_dropped


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


def _check_chat(tok: PreTrainedTokenizerBase, row: documents.Document) -> None:
    """Refuse messages without a chat template. TRL's trainers have no plain headers to fall back to."""
    if preferences.is_chat(row) and not getattr(tok, "chat_template", None):
        raise DataError(
            f"{row.origin}: the row has messages, but the tokenizer has no chat template; use a tokenizer with one, or "
            "write the prompt and the answers as text"
        )


def trains_tokenizer(recipe: Recipe) -> bool:
    return recipe.data.tokenizer == "auto" and model.is_preset(recipe.model.name)


def _tokenizer(recipe: Recipe, train_docs: Documents) -> Any:
    name = recipe.data.tokenizer
    if trains_tokenizer(recipe):
        return tokenizer.train_bpe(Texts(train_docs), recipe.data.vocab_size, cache.default_folder("tokenizers"))
    own = name == "auto"
    return tokenizer.load_tokenizer(
        recipe.model.name if own else name,
        revision=recipe.model.revision if own else None,
        trust_remote_code=recipe.model.trust_remote_code,
    )


def _size(
    recipe: Recipe,
    objective: Objective,
    encoded: Sequence[Encoded],
    n_samples: int,
    n_eval: int,
    data_parallel_size: int,
) -> RunSize:
    """The size of the run, for the number of its steps."""
    if objective.trl is not None and objective.trl.scores:  # a sample is a completion; TRL leaves out an unfull step
        per_step = recipe.train.samples_per_step * data_parallel_size
        n_samples *= recipe.post_training.generations
        n_samples -= n_samples % per_step
    of_text = objective.packs and Tokens.of(encoded).are_text.any()
    n_rows = n_samples if objective.trl is not None else 0 if of_text else len(encoded)
    return RunSize(n_samples, n_eval, data_parallel_size, n_rows=n_rows)


def _of_samples(samples: Sequence[Sample], eval_samples: Sequence[Sample], size: RunSize) -> dict[str, float]:
    """The figures of data.json that the rows of a trainer of TRL do not have."""
    return {
        **({"rows_per_sample": size.n_rows / len(samples)} if size.n_rows else {}),
        "learned_tokens": sum(int((sample.labels_T != IGNORE_INDEX).sum()) for sample in samples),
        "unigram_entropy": unigram_entropy(eval_samples or samples),
    }


def _check_enough(recipe: Recipe, n_samples: int, size: RunSize, completions: int | None) -> None:
    """Refuse fewer samples than a step needs; the Trainer would silently take smaller steps.

    completions: those of each prompt, if the run's samples are completions.
    """
    given = f"data.source gives {n_samples} samples of {recipe.data.sequence_length} tokens, fewer than"
    more = " or data.sequence_length, or add text"
    if completions is not None:
        given = f"data.source gives {n_samples} prompts with {completions} completions each, fewer than"
        more = ", or add prompts"
        n_samples *= completions
    batches = {"train.batch_size": recipe.train.batch_size}
    if recipe.comparison.steps and recipe.comparison.batch_size:
        batches["comparison.batch_size"] = recipe.comparison.batch_size
    for name, batch_size in batches.items():
        if n_samples < batch_size:
            advice = _gives_more(recipe, size, n_samples, batch_size, completions)
            raise RecipeError(f"{given} {name} {batch_size}; {advice}lower {name}{more}")
    train = recipe.train
    samples_per_step = train.samples_per_step * size.n_processes
    if n_samples < samples_per_step:
        factors = f"train.batch_size {train.batch_size} x train.gradient_accumulation {train.gradient_accumulation}"
        shared = " groups of" if recipe.sharding.sequence > 1 else ""
        factors += f" x {size.n_processes}{shared} processes" if size.n_processes > 1 else ""
        advice = _gives_more(recipe, size, n_samples, samples_per_step, completions)
        raise RecipeError(
            f"{given} the {samples_per_step} of one step ({factors}); {advice}lower one of these factors{more}"
        )


def _check_schedule(recipe: Recipe, n_steps: int) -> None:
    """Refuse a decay that does not fit; transformers would silently begin in the middle of it."""
    warmup, decay = recipe.train.warmup_steps, recipe.train.decay_steps
    if recipe.train.schedule != "warmup_stable_decay" or decay is None or warmup + decay <= n_steps:
        return
    most = n_steps - warmup
    fix = f"train.decay_steps to at most {most}" if most > 0 else f"both, to at most {n_steps} together"
    raise RecipeError(
        f"train.warmup_steps {warmup} and train.decay_steps {decay} exceed the run's {n_steps} steps; lower {fix}"
    )


def _gives_more(recipe: Recipe, size: RunSize, n_samples: int, wanted: int, completions: int | None) -> str:
    """The advice to train on the eval split too, or to give each row its own sample, if that makes enough of them.

    n_samples: before samples that fill no step are left out. completions: see `_check_enough`.
    """
    kept = size.n_eval_samples * (completions or 1)
    if not recipe.data.eval_source and n_samples < wanted <= n_samples + kept:
        return f"set data.eval_fraction: 0, which adds the {size.n_eval_samples} kept for evaluation, "
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
