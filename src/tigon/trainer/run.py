"""`tigon train`, in order: read, check, prepare, sample, train, evaluate, sample, save, compare, report.

Everything up to `prepare` only reads, but a restart by torchrun removes the folder of an attempt that saved no
checkpoint and no model.
The run folder is created after the last check.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.data.image_rows import PicturedRows
from tigon.data.source import reading, sources
from tigon.errors import TigonError
from tigon.objectives import recipe_checks
from tigon.objectives.base import FinalSave
from tigon.objectives.rules.classify import classifies
from tigon.objectives.rules.post_training import is_post_training
from tigon.recipe.keys import Recipe
from tigon.techniques.lora import lora
from tigon.trainer import engine
from tigon.trainer.checkpoint import checkpoint, final_model, nvme_swap, resume_rules
from tigon.trainer.distributed import agreement, launch, signals, torchrun
from tigon.trainer.evaluation import generate, harness
from tigon.trainer.evaluation.token_mean import EvaluationFailed, perplexity
from tigon.trainer.folder import open_folder, run_folder
from tigon.trainer.folder.run_folder import RunFolder
from tigon.trainer.guards import fault_messages, prediction, preflight
from tigon.trainer.prepare import Prepared, connect, prepare, quiet_libraries
from tigon.trainer.report import run_lines
from tigon.trainer.setup import Request

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from torch import nn

    from tigon.models import PatchReport
    from tigon.trainer.guarded import GuardedTrainer

BASE = "base"  # a preset's weights before the run's own steps


def train(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    auto: bool = False,
    require: Callable[[Path, Recipe], None] | None = None,
    max_restarts: int = 0,
) -> Path:
    """Train as the recipe at `path` says.

    Args:
        path: The recipe file.
        overrides: `section.key=value` texts that replace keys of the recipe.
        resume: Continue the newest unfinished run of this recipe.
        auto: Change the recipe to the planner's recommendation for this GPU before training.
        require: Called with the path and the recipe; it raises if the caller's command cannot run this recipe.
        max_restarts: How often the processes are started again after a failure. They continue from the last checkpoint.

    Returns:
        The run folder.

    Raises:
        TigonError: A check before the run refused the recipe, and nothing was written; or the run failed, and its
            folder is ready for --resume if it has a checkpoint.
        SystemExit: A signal stopped the run, or a process of a run on several GPUs failed.
    """
    preflight.check_packages()
    request = Request(path, tuple(overrides))
    recipe = request.recipe()
    if require is not None:
        require(path, recipe)
    recipe_checks.check_trained_base(recipe)
    preflight.check_process(recipe.train.workers)
    preflight.check_trackers(recipe.train.report_to)
    _check_data(recipe)
    resume = resume or torchrun.interrupted(recipe.output) is not None
    run, asked = None, recipe
    # On several machines the main process looks for the run to resume, for all.
    if resume and (launch.rank() == 0 or not launch.has_several_nodes()):
        request = request.having(run_folder.division(recipe))
        recipe = request.recipe()
        run = run_folder.find(recipe.output, recipe)
    elif not resume and (launch.rank() == 0 or torchrun.launch_name() is None):
        run_folder.check(recipe.output, request.command)
    quiet_libraries(recipe)
    checkpoint.no_pickles()
    device = preflight.check_device(recipe)
    if auto:
        request = request.having(prediction.choices_of_auto(recipe, device, resume=resume))
        recipe = request.recipe()
    if (max_restarts or recipe.sharding.gpus > 1) and not launch.started_by_launcher():
        preflight.check_techniques(recipe, device)
        words = ["-m", "tigon", "train", *request.words, *(["--resume"] if resume else [])]
        if code := torchrun.start(words, recipe.sharding.gpus, max_restarts=max_restarts):
            raise SystemExit(code)
        written = run_folder.newest(recipe.output) if run is None else run.path
        assert written is not None, "the processes exited with code 0 but left no run folder"
        return written

    with ExitStack() as held:
        if run is not None and launch.rank() == 0:
            held.enter_context(run_folder.locked(run.path))
            run = run_folder.with_checkpoint(run, recipe)
        connect(recipe, device)
        agreement.check_same_recipe(asked)
        return _train_alone_or_joined(request, recipe, device, run, held)


def _check_data(recipe: Recipe) -> None:
    """Refuse data that is missing or has a malformed row, before slow imports. Every process reads all of it later."""
    data = recipe.data
    sources.check(data.sources())
    sources.check(data.eval_sources(), "data.eval_source")
    # Rows for post-training and classification are read by the objective, which needs the model's config.
    if (
        data.bad_rows == "error"
        and not launch.started_by_launcher()
        and not (is_post_training(recipe) or classifies(recipe))
    ):
        reader = PicturedRows(data.images, data.format) if data.images else None
        reading.first_look((*data.sources(), *data.eval_sources()), reader=reader)


def _train_alone_or_joined(
    request: Request, recipe: Recipe, device: torch.device, run: RunFolder | None, held: ExitStack
) -> Path:
    """One process's part of a run, up to its end. held: The stack that releases the folder locks when the run ends."""
    from rich.console import Console

    console = Console(highlight=False, quiet=launch.rank() > 0)
    if launch.has_several_nodes():  # only the main process has looked for the run and divided its samples
        run, request = launch.broadcast((run, request))
        recipe = recipe if launch.rank() == 0 else request.recipe()
    prepared = replace(prepare(recipe, device), command=request.command)
    agreement.check_same_data(prepared.data)
    held.enter_context(nvme_swap.own_files(prepared.recipe.sharding.nvme_folder))
    run = open_folder.create(prepared, held) if run is None else open_folder.join(run, prepared, console)
    run_lines.announce(console, run, prepared)
    if launch.rank() == 0:
        predicted, lines = prediction.announce(prepared, prepared.command, evaluated=bool(prepared.eval_samples))
        for line in lines:
            console.out(line)
        prepared = replace(prepared, prediction=predicted)
    with signals.sigterm_interrupts():
        try:
            _carry_out(run, prepared, console)
        except signals.Stopped as stop:
            if launch.rank() == 0:
                print(f"tigon: {stop}", file=sys.stderr)
            launch.shutdown_distributed(on_every_rank=stop.on_every_rank)
            raise SystemExit(stop.exit_code) from None
        except KeyboardInterrupt:
            hint = f"; continue with `{request.command} --resume`" if run.has_checkpoints else ""
            console.out(f"interrupted; {run.path} keeps its files{hint}")
            raise
        except Exception as error:
            known = None if isinstance(error, TigonError) else fault_messages.to_user_error(error, run, request.command)
            if known is None:
                raise
            raise known from error
    if launch.started_by_launcher():
        launch.shutdown_distributed()
    return run.path


def _build(run: RunFolder, prepared: Prepared, kernels: str) -> tuple[nn.Module, PatchReport | str | None]:
    """Build the model. Returns (model, its patch report, Liger's version or None)."""
    section = prepared.starting_model(run.path)
    if run.checkpoint is not None:
        section = engine.kept_base(section, prepared.settings, run.path / BASE)
    setup = prepared.with_model(replace(section, kernels=kernels))
    built, patched = engine.build(setup, run.path / BASE, saves_adapters=prepared.recipe.output.save_model)
    built = prepared.objective.attach(built)
    lora.set_trained_dtypes(built, prepared.settings)
    return built, patched


def _carry_out(run: RunFolder, prepared: Prepared, console: Console) -> None:
    """Train, compare and write the report.

    Raises:
        Stopped: A signal came. Before the final weights are saved, the run ends with a checkpoint for --resume.
            Afterwards the run ends complete, but its comparison may lack kernels.
    """
    from tigon.trainer.measuring import comparison  # loads transformers
    from tigon.trainer.report import model_card, report  # loads transformers

    with signals.StopRequest(confirms=launch.rank() == 0) as stop:
        summary = _train_and_save(run, prepared, console, stop)
        if launch.rank() > 0:  # comparison and report are the main process's
            return
        repeats = []
        if prepared.recipe.comparison.steps:  # the trained model is freed by now, so it has the whole device
            repeats = comparison.compare(
                prepared, lambda kernels: _build(run, prepared, kernels)[0], run.path, console.out, stop
            )
        summary["comparison"] = [repeat.as_mapping() for repeat in repeats]
        result = {name: value for name, value in summary.items() if name != "sample"}
        run.append({"event": "result", "step": run.last_step, **result})
        report.write(run, summary, prepared.objective)
        for folder in final_model.folders_in(run.path) if prepared.recipe.output.save_model else ():
            if unserved := model_card.write(run, folder, prepared.recipe, summary, prepared.objective):
                console.out(f"serving  {unserved}")
        run.write_json(run_folder.SUMMARY, summary)
        run_lines.conclude(console, run, summary, prepared.objective)
        if stop.number:
            cut = any(repeat.stopped for repeat in repeats)
            kept = f"the run is complete{' except its comparison' if cut else ''}"
            raise signals.Stopped(stop.number, run.last_step, kept, on_every_rank=False)


def _train_and_save(run: RunFolder, prepared: Prepared, console: Console, stop: signals.StopRequest) -> dict[str, Any]:
    """Train and save the final weights. Returns the run's summary without the comparison.

    Raises:
        Stopped: A signal came before the final weights were saved.
    """
    from tigon.trainer.first_phase import train_base  # loads transformers
    from tigon.trainer.report.progress import ProgressDisplay  # loads transformers

    train_base(prepared, run.path, [ProgressDisplay(console)] if launch.rank() == 0 else [])
    with fault_messages.explain_out_of_memory(run, prepared):
        built, patched = _build(run, prepared, prepared.recipe.model.kernels)
    engine.refuse_nonfinite(built, prepared.recipe.model)
    sample = generate.begin_sample(prepared, built, console)
    with fault_messages.explain_out_of_memory(run, prepared):
        trainer, outcome = _train(run, prepared, built, console, stop)
    sample.after = sample.write(built)
    decoded = None
    if sample.n_tokens and trainer.added is not None:
        samples = prepared.eval_samples or prepared.train.samples
        decoded = trainer.added.sampled(built, samples, prepared.tokenizer.eos_token_id)
    _end_if_asked(prepared, trainer)
    if not prepared.settings.sharding.divides_weights:
        _save_model(run, prepared, built, trainer)  # after sampling: it may detach the objective's heads
    return {
        **outcome,
        "unigram_entropy": prepared.data.get("unigram_entropy"),
        "skipped_steps": trainer.gate.skipped,
        "evaluation_error": trainer.evaluation_error,
        "patch": "\n".join(
            filter(None, ["unpatched" if patched is None else str(patched), trainer.fused, str(trainer.generator)])
        ),
        "decoded": decoded,
        "sample": sample.as_mapping(),
    }


def _save_model(run: RunFolder, prepared: Prepared, built: nn.Module, trainer: GuardedTrainer) -> None:
    """Save the final weights if `output.save_model` is set. Every process calls it. The weights change their dtype."""
    if not prepared.recipe.output.save_model:
        return
    target = final_model.FinalModel(
        run=run.path,
        model=prepared.starting_model(run.path),
        config=prepared.config,
        settings=prepared.settings,
        output=prepared.recipe.output,
    )
    final = FinalSave(
        folder=run.path,
        sharded=prepared.settings.sharding.divides_weights,
        is_first=launch.rank() == 0,
        gathered_state=trainer.gathered_state,
        save_model=partial(target.save, built, trainer),
        save_state=partial(target.save_state, built),
    )
    written = True
    if trainer.added is not None:
        written = trainer.added.save(built, final)
    else:
        final.save_model()
    if final.is_first and written:
        for folder in final_model.folders_in(run.path):
            prepared.saved_tokenizer.save_pretrained(folder)


def _train(
    run: RunFolder, prepared: Prepared, built: nn.Module, console: Console, stop: signals.StopRequest
) -> tuple[GuardedTrainer, dict[str, Any]]:
    """Train and evaluate. Sharded weights are saved before the evaluation, because an evaluation that runs out of
    memory ends all processes.

    Returns:
        The trainer, and a mapping with `eval_loss` (None without eval samples), `train_s` and `memory`.
    """
    from tigon.trainer.checkpoint import atomic_save  # loads transformers
    from tigon.trainer.report.watchers import watch  # loads transformers

    trainer = _make_trainer(run, prepared, built, stop)
    if trainer.completions_line:
        console.out(trainer.completions_line)
    started_s = time.perf_counter()
    with ExitStack() as stack:
        watchers = watch(run, prepared, trainer, console, stack)
        try:
            trainer.train(resume_from_checkpoint=str(run.checkpoint) if run.checkpoint else None)
        except Exception as error:
            if trainer.step.speed.n_micro_batches or not fault_messages.is_checkpoints_fault(error, run):
                raise
            raise fault_messages.unreadable(run, error) from error
        finally:
            watchers.display.close()
        outcome = {
            "train_s": time.perf_counter() - started_s,
            "memory": prediction.compared(prepared.prediction, prepared.device),
            "best_step": trainer.best_step,
            "stopped_early_step": trainer.state.global_step if trainer.stopped_early() else None,
            "stopped_because": trainer.stopped_early(),
        }
        stop.confirmation = "ending once everything is saved"
        _end_if_asked(prepared, trainer)
        trainer.gate.settle(trainer.state.global_step)
        atomic_save.refuse_nonfinite_weights(built, trainer.state.global_step)
        if prepared.settings.sharding.divides_weights:
            _save_model(run, prepared, built, trainer)
        eval_loss = _final_eval_loss(trainer) if prepared.eval_samples else None
        _end_if_asked(prepared, trainer)
        watchers.write_texts(built, trainer.state.global_step, trainer.best_step)
        outcome |= {"eval_loss": eval_loss, "eval_perplexity": _perplexity(prepared, eval_loss)}
        outcome["labels"] = None if eval_loss is None else _labels(trainer)
        if prepared.recipe.eval.lm_eval:  # may take hours, in which a killed run keeps what it has learned
            trainer.save_last()
        outcome["lm_eval"] = harness.evaluate_and_save(run, built, prepared.tokenizer, prepared.recipe, console.out)
        watchers.finish(outcome)
        return trainer, outcome


def _perplexity(prepared: Prepared, eval_loss: float | None) -> float | None:
    """exp of the eval loss; None if it is not the loss per token of one head."""
    objective = prepared.objective
    if eval_loss is None or not objective.writes_text or prepared.rows is not None or objective.added is not None:
        return None
    return next(iter(perplexity(eval_loss)), None)


def _labels(trainer: GuardedTrainer) -> dict[str, Any] | None:
    """The table of a classification's labels for the saved weights; None for any other objective."""
    objective = trainer.objective
    if (part := objective.labels_part) is None:
        return None
    # The last evaluation was of other weights, or of the run before it was resumed.
    if trainer.best_step is not None or part.table() is None:
        trainer.token_mean.metrics(trainer.eval_dataset, "eval")
        objective.metrics(trainer.model, trainer.accelerator.reduce)
    return part.table()


def _make_trainer(run: RunFolder, prepared: Prepared, built: nn.Module, stop: signals.StopRequest) -> GuardedTrainer:
    """The run's trainer with the callbacks that guard its training."""
    from transformers import EarlyStoppingCallback

    from tigon.trainer import guarded  # loads transformers
    from tigon.trainer import trainer as trainers  # loads transformers
    from tigon.trainer.guards.document_mixing import DocumentMixing  # loads transformers

    recipe = prepared.recipe
    safeguards = guarded.Safeguards(
        stop=stop,
        max_skipped_steps=recipe.train.max_skipped_steps,
        metadata=fault_messages.checkpoint_metadata(prepared),
        distributed=resume_rules.writes_distributed(recipe),
        in_background=recipe.train.save_async,
    )
    trainer = trainers.make(prepared, built, prepared.training_data, run.path, safeguards)
    data, is_alone = recipe.data, recipe.sharding.sequence == 1
    if prepared.rows is None and data.packing and not data.cross_document_attention and is_alone:
        trainer.add_callback(DocumentMixing(trainer, prepared.train.samples, recipe.model.name, prepared.settings))
    if recipe.train.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(recipe.train.early_stopping_patience))
    return trainer


def _end_if_asked(prepared: Prepared, trainer: GuardedTrainer) -> None:
    """If a signal came, save a checkpoint of the last step and raise Stopped. Every process calls it together."""
    stop = trainer.safeguards.stop
    if stop is None or not trainer.asked_to_stop():
        return
    trainer.save_last()
    step = trainer.state.global_step
    kept = f"{checkpoint.name_of(step)} is complete; continue with `{prepared.command} --resume`"
    raise signals.Stopped(stop.number, step, kept, on_every_rank=True)


def _final_eval_loss(trainer: GuardedTrainer) -> float | None:
    """The eval loss after the last step, taken from the records if the last step was evaluated anyway.

    None if evaluation ran out of memory, so that the trained weights are still saved, or if a signal ended it.
    """
    if trainer.best_step is not None:  # the weights are those of this step
        return float(trainer.state.best_metric)
    for record in reversed(trainer.state.log_history):
        if "eval_loss" in record and record["step"] == trainer.state.global_step:
            return float(record["eval_loss"])
    try:
        loss: float | None = trainer.evaluate().get("eval_loss")
        return loss
    except EvaluationFailed as error:
        trainer.evaluation_error = str(error)
        return None
