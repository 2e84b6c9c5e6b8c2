"""`tigon train`, in order: read, refuse, prepare, sample, train, evaluate, sample, save, compare, report.

Everything up to `_prepare` only reads; the run folder is made after the last check that can refuse.
"""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.errors import RecipeError, RunFolderError, TigonError
from tigon.train import documents, folder, preflight
from tigon.train import recipe as recipes
from tigon.train.folder import RunFolder
from tigon.train.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from tigon.train.packing import Collator, Packed, Row


@dataclass(frozen=True)
class Prepared:
    """A run that nothing speaks against any more."""

    recipe: Recipe
    device: torch.device
    precision: str
    config: Any
    n_parameters: int
    tokenizer: Any
    train: Packed
    eval_rows: list[Row]
    collator: Collator
    prompt: list[int]
    data: dict[str, Any]


def train(path: Path, overrides: Sequence[str] = (), *, resume: bool = False) -> Path:
    """Carry out the recipe at `path`; returns the run folder. Raises RecipeError and its kinds before anything is
    written, or, when the run itself fails, after leaving the folder ready for --resume."""
    preflight.check_packages()
    command = shlex.join(["tigon", "train", str(path), *(word for text in overrides for word in ("--set", text))])
    recipe = recipes.load(path, overrides, gpu_present=preflight.gpu_present)
    documents.check_sources((*recipe.data.source, *recipe.data.eval_source))
    run = folder.find(recipe.output, recipe) if resume else None
    if run is None:
        folder.check(recipe.output, command)
    _quiet_libraries(recipe)

    from rich.console import Console

    console = Console(highlight=False)
    prepared = _prepare(recipe)
    if run is None:
        run = folder.create(recipe.output, command)
        _write_inputs(run, prepared)
    else:
        _check_same_data(run, prepared)
    _announce(console, run, prepared)
    try:
        _carry_out(run, prepared, console)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise RunFolderError(f"{run.path}: the disk is full; free some space, then `{command} --resume`") from None
    except KeyboardInterrupt:
        resumable = any((run.path / "checkpoints").glob("checkpoint-*"))
        hint = f"; continue with `{command} --resume`" if resumable else ""
        console.print(f"interrupted; {run.path} keeps what was written{hint}", markup=False, soft_wrap=True)
        raise
    return run.path


def _prepare(recipe: Recipe) -> Prepared:
    from tigon.train import model, tokenizer
    from tigon.train.packing import Collator, fingerprint, unigram_entropy

    device = preflight.check_device(recipe)
    config = model.load_config(recipe.model)
    preflight.check_lengths(recipe, config)
    n_parameters = model.count_parameters(config)
    preflight.check_disk(recipe, n_parameters)
    preflight.check_memory(recipe, device, n_parameters)
    data = recipe.data
    read = documents.read(data.source, data.format, data.max_text_mib)
    if data.eval_source:
        learned, held_out = read, documents.read(data.eval_source, data.format, None)
    else:
        learned, held_out = documents.hold_out(read, data.eval_fraction)
    tok = _tokenizer(recipe, learned)
    preflight.check_vocabulary(recipe, config, len(tok))
    train = _pack(recipe, tokenizer.encode(learned, tok))
    held = _pack(recipe, tokenizer.encode(held_out, tok)) if held_out else None
    eval_rows = held.rows if held else []
    _check_enough(recipe, len(train.rows))
    prompt = _prompt(recipe, tok, eval_rows or train.rows)
    pad_id = tok.pad_token_id if tok.pad_token_id is not None else (tok.eos_token_id or 0)
    flatten = data.packing and recipe.model.attention.startswith("flash")
    facts = {
        "documents": len(learned),
        "held_out_documents": len(held_out),
        "rows": len(train.rows),
        "tokens": train.n_tokens,
        "held_out_tokens": held.n_tokens if held else 0,
        "truncated_rows": train.n_truncated + (held.n_truncated if held else 0),
        "dropped_rows": train.n_dropped + (held.n_dropped if held else 0),
        "tokenizer_size": len(tok),
        "parameters": n_parameters,
        "unigram_entropy": unigram_entropy(eval_rows or train.rows),
        "fingerprint": fingerprint([*train.rows, *eval_rows]),
    }
    precision = preflight.resolve_precision(recipe.train.precision, device)
    collator = Collator(pad_id, data.packing, flatten)
    return Prepared(recipe, device, precision, config, n_parameters, tok, train, eval_rows, collator, prompt, facts)


def _tokenizer(recipe: Recipe, learned: Sequence[documents.Document]) -> Any:
    from tigon.train import model, tokenizer

    name = recipe.data.tokenizer
    if name == "auto" and model.is_preset(recipe.model.name):
        texts = [document.text for document in learned]
        return tokenizer.train_bpe(texts, recipe.data.vocab_size, tokenizer.default_cache_folder())
    own = name == "auto"
    return tokenizer.load_tokenizer(
        recipe.model.name if own else name,
        revision=recipe.model.revision if own else None,
        trust_remote_code=recipe.model.trust_remote_code,
    )


def _pack(recipe: Recipe, encoded: Any) -> Packed:
    from tigon.train.packing import pack

    data = recipe.data
    return pack(
        encoded, data.sequence_length, packing=data.packing, cross_document=data.cross_document_attention,
        too_long=data.too_long,
    )  # fmt: skip


def _check_enough(recipe: Recipe, n_rows: int) -> None:
    batches = {"train.batch_size": recipe.train.batch_size}
    if recipe.comparison.steps and recipe.comparison.batch_size:
        batches["comparison.batch_size"] = recipe.comparison.batch_size
    for name, size in batches.items():
        if n_rows < size:
            raise RecipeError(
                f"data.source gives {n_rows} rows of {recipe.data.sequence_length} tokens, fewer than {name} {size}; "
                "lower it or data.sequence_length, or add text"
            )


def _prompt(recipe: Recipe, tok: Any, rows: Sequence[Row]) -> list[int]:
    """The tokens that the text sample continues."""
    text = recipe.output.sample_prompt
    if text:
        return [int(i) for i in tok(text)["input_ids"]]
    return [int(i) for i in rows[0].tokens_T[:24]]


def _write_inputs(run: RunFolder, prepared: Prepared) -> None:
    import yaml

    text = yaml.safe_dump(prepared.recipe.as_mapping(), sort_keys=False, allow_unicode=True)
    run.write_text(folder.RECIPE, "# The resolved recipe of this run.\n" + text)
    run.write_json(folder.ENVIRONMENT, preflight.environment(prepared.device))
    run.write_json(folder.DATA, prepared.data)
    run.append({"event": "data", "step": 0, **prepared.data})
    prepared.tokenizer.save_pretrained(run.path / "tokenizer")


def _check_same_data(run: RunFolder, prepared: Prepared) -> None:
    before = run.read_json(folder.DATA)
    if before["fingerprint"] != prepared.data["fingerprint"]:
        raise RunFolderError(
            f"{run.path}: the data changed since the run began ({before['tokens']} tokens then, "
            f"{prepared.data['tokens']} now); restore it, or start a new run without --resume"
        )


def _announce(console: Console, run: RunFolder, prepared: Prepared) -> None:
    recipe, data = prepared.recipe, prepared.data
    tokens = recipe.train.batch_size * recipe.train.gradient_accumulation * recipe.data.sequence_length
    name, millions = recipe.model.name, prepared.n_parameters / 1e6
    lines = [
        f"run      {run.path}" + (f", from {run.checkpoint.name}" if run.checkpoint else ""),
        f"model    {name}, {millions:,.1f} M parameters, kernels: {recipe.model.kernels}",
        f"data     {', '.join(recipe.data.source)}: {data['tokens']:,} tokens in {data['rows']:,} rows, "
        f"{data['held_out_tokens']:,} held out; unigram entropy {data['unigram_entropy']:.3f} nats",
        f"device   {prepared.device}, {prepared.precision}, {tokens:,} tokens a step",
    ]
    if data["truncated_rows"] or data["dropped_rows"]:
        counts = f"{data['truncated_rows']} rows truncated, {data['dropped_rows']} dropped"
        lines.append(f"warning  {counts} (data.too_long: {recipe.data.too_long})")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _build(prepared: Prepared, kernels: str) -> tuple[Any, Any]:
    """(model, patch report or None)"""
    import torch

    from tigon.train import model

    dtype = torch.bfloat16 if prepared.precision == "pure-bf16" else torch.float32
    recipe = prepared.recipe
    built = model.build(recipe.model, prepared.config, dtype=dtype, device=prepared.device, seed=recipe.train.seed)
    return built, model.patch(built, kernels)


def _carry_out(run: RunFolder, prepared: Prepared, console: Console) -> None:
    """Train, compare, report."""
    from tigon.train import report

    summary = _train_and_save(run, prepared, console)
    # The trained model is gone by now: the comparison has the device to itself.
    summary["comparison"] = [repeat.as_mapping() for repeat in _compare(run, prepared, console)]
    result = {name: value for name, value in summary.items() if name != "sample"}
    run.append({"event": "result", "step": _last_step(run), **result})
    report.write(run, summary)
    run.write_json(folder.SUMMARY, summary)
    _conclude(console, run, summary)


def _train_and_save(run: RunFolder, prepared: Prepared, console: Console) -> dict[str, Any]:
    """What the run found, but for the comparison."""
    import torch

    from tigon.train import model

    recipe, tok = prepared.recipe, prepared.tokenizer
    built, patched = _build(prepared, recipe.model.kernels)
    n_sample, seed = recipe.output.sample_tokens, recipe.train.seed
    sample = {"prompt": tok.decode(prepared.prompt), "before": "", "after": ""}
    if n_sample:
        sample["before"] = model.sample(built, tok, prepared.prompt, n_sample, seed)
    started_s = time.perf_counter()
    try:
        eval_loss = _train(run, prepared, built, console)
    except torch.OutOfMemoryError:
        raise RecipeError(
            f"out of GPU memory with train.batch_size {recipe.train.batch_size} and data.sequence_length "
            f"{recipe.data.sequence_length}; lower one of them, or set train.gradient_checkpointing: true"
        ) from None
    train_s = time.perf_counter() - started_s
    if n_sample:
        sample["after"] = model.sample(built, tok, prepared.prompt, n_sample, seed)
    if recipe.output.save_model:
        built.save_pretrained(run.path / "model")
        tok.save_pretrained(run.path / "model")
    return {
        "eval_loss": eval_loss,
        "unigram_entropy": prepared.data["unigram_entropy"],
        "train_s": train_s,
        "patch": "unpatched" if patched is None else str(patched),
        "sample": sample,
    }


def _train(run: RunFolder, prepared: Prepared, built: Any, console: Console) -> float | None:
    """Train and evaluate; the final held-out loss in nats, None when nothing was held out."""
    from torch.utils.tensorboard import SummaryWriter

    from tigon.train import trainer as trainers
    from tigon.train.packing import RowDataset
    from tigon.train.progress import MetricsWriter, ProgressDisplay

    recipe = prepared.recipe
    args = trainers.arguments(
        recipe.train, folder=run.path / "checkpoints", precision=prepared.precision, device=prepared.device,
        evaluate=bool(prepared.eval_rows),
    )  # fmt: skip
    eval_rows = RowDataset(prepared.eval_rows) if prepared.eval_rows else None
    trainer = trainers.TigonTrainer(built, args, prepared.collator, RowDataset(prepared.train.rows), eval_rows)
    purge_step = folder.step_of(run.checkpoint) + 1 if run.checkpoint else None
    display = ProgressDisplay(console)
    with SummaryWriter(str(run.path / "tensorboard"), purge_step=purge_step) as writer:
        for callback in (MetricsWriter(run, writer), display):
            trainer.add_callback(callback)
        try:
            trainer.train(resume_from_checkpoint=str(run.checkpoint) if run.checkpoint else None)
        except Exception as error:
            if run.checkpoint is None or trainer.n_micro_steps or isinstance(error, TigonError):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            raise RunFolderError(
                f"{run.checkpoint}: cannot be loaded ({reason}); remove it to resume from the checkpoint before"
            ) from error
        finally:
            display.close()
        trainers.refuse_nonfinite_weights(built, trainer.state.global_step)
        return _final_eval_loss(run, trainer) if eval_rows is not None else None


def _final_eval_loss(run: RunFolder, trainer: Any) -> float:
    """The held-out loss after the last step, from the records when that step was an evaluation's anyway."""
    for record in reversed(run.records()):
        if record["event"] == "eval" and record["step"] == trainer.state.global_step:
            return float(record["eval_loss"])
    return float(trainer.evaluate()["eval_loss"])


def _compare(run: RunFolder, prepared: Prepared, console: Console) -> list[Any]:
    from tigon.train.comparison import compare
    from tigon.train.packing import RowDataset

    recipe = prepared.recipe
    if recipe.comparison.steps == 0:
        return []
    return compare(
        recipe.comparison.kernels,
        lambda kernels: _build(prepared, kernels)[0],
        train=replace(recipe.train, batch_size=recipe.comparison.batch_size or recipe.train.batch_size),
        steps=recipe.comparison.steps,
        folder=run.path / "checkpoints",
        precision=prepared.precision,
        device=prepared.device,
        collator=prepared.collator,
        rows=RowDataset(prepared.train.rows),
        announce=lambda text: console.print(text, markup=False),
    )


def _last_step(run: RunFolder) -> int:
    return max((int(record["step"]) for record in run.records()), default=0)


def _conclude(console: Console, run: RunFolder, summary: dict[str, Any]) -> None:
    from rich.table import Table

    from tigon.train.progress import format_bytes

    if summary["eval_loss"] is not None:
        gap = summary["unigram_entropy"] - summary["eval_loss"]
        side = "below" if gap > 0 else "above"
        line = f"held-out loss {summary['eval_loss']:.4f} nats, {abs(gap):.2f} {side} the unigram entropy"
        console.print(line, markup=False)
    if summary["comparison"]:
        table = Table(title="the same steps, seed and rows", box=None, header_style="bold")
        for title in ("kernels", "last loss", "peak memory", "step alone", "tokens/s"):
            table.add_column(title, justify="left" if title == "kernels" else "right")
        for row in summary["comparison"]:
            if row["error"]:
                table.add_row(row["label"], row["error"], "", "", "")
            else:
                peak, rest = row["peak_bytes"], row["at_rest_bytes"]
                table.add_row(row["label"], f"{row['losses'][-1]:.6f}", format_bytes(peak), format_bytes(peak - rest),
                              f"{row['tokens_per_s']:,.0f}")  # fmt: skip
        console.print(table)
    console.print(f"report   {run.path / 'report.html'}", markup=False, soft_wrap=True)


def _quiet_libraries(recipe: Recipe) -> None:
    """No network unless a hub id is asked for, and none of the libraries' own chatter; both before their import."""
    from tigon.models.config import is_hub_id

    hub = [name for name in (recipe.model.name, recipe.data.tokenizer) if is_hub_id(name)]
    if not hub:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    try:
        import transformers
    except ImportError as error:  # it checks the versions of what it stands on
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(f"transformers cannot be imported: {reason}; pip install -U 'tigon[train]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
