"""`tigon train`, in order: read, check, prepare, sample, train, evaluate, sample, save, compare, report.

Everything up to `prepare` only reads, but a restart by torchrun removes the folder of an attempt that saved no
checkpoint and no model.
The run folder is created after the last check.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.data import reading, sources
from tigon.data.image_rows import PicturedRows
from tigon.data.packing import SampleDataset
from tigon.errors import TigonError
from tigon.objectives import recipe_checks
from tigon.objectives.base import FinalSave
from tigon.objectives.post_training_rules import is_post_training
from tigon.recipe.keys import Recipe
from tigon.techniques.lora import lora
from tigon.trainer import model, open_folder, run_folder, run_lines
from tigon.trainer.checkpoint import checkpoint, final_model, nvme_swap, resume_rules
from tigon.trainer.distributed import launch, signals, torchrun
from tigon.trainer.evaluation import harness
from tigon.trainer.evaluation.token_mean import EvaluationFailed, perplexity
from tigon.trainer.guards import fault_messages, prediction, preflight, self_test
from tigon.trainer.prepare import Prepared, connect, prepare, quiet_libraries
from tigon.trainer.run_folder import RunFolder

BASE = "base"  # a preset's weights before the run's own steps

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from tigon.trainer.report.comparison import Repeat


def train(
    path: Path, overrides: Sequence[str] = (), *, resume: bool = False, auto: bool = False,
    require: Callable[[Path, Recipe], None] | None = None, max_restarts: int = 0,
) -> Path:  # fmt: skip
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
    command = _command(path, overrides)
    recipe = recipe_checks.load(path, overrides, gpu_present=preflight.gpu_present)
    if require is not None:
        require(path, recipe)
    recipe_checks.check_trained_base(recipe)
    preflight.check_process(recipe.train.workers)
    preflight.check_trackers(recipe.train.report_to)
    _check_data(recipe)
    resume = resume or torchrun.interrupted(recipe.output) is not None
    run, asked = None, recipe
    if resume and _looks_for_run():
        if division := run_folder.division(recipe):
            overrides = [*overrides, *division]
            recipe = recipe_checks.load(path, overrides, gpu_present=preflight.gpu_present)
        run = run_folder.find(recipe.output, recipe)
    elif not resume and (launch.rank() == 0 or torchrun.launch_name() is None):
        run_folder.check(recipe.output, command)
    quiet_libraries(recipe)
    checkpoint.no_pickles()
    device = preflight.check_device(recipe)
    if auto:
        overrides = prediction.with_auto(recipe, overrides, device, resume=resume)
        recipe = recipe_checks.load(path, overrides, gpu_present=preflight.gpu_present)
    if (max_restarts or recipe.sharding.gpus > 1) and not launch.started_by_launcher():
        preflight.check_techniques(recipe, device)
        words = [*_words(overrides), *(["--resume"] if resume else [])]
        arguments = ["-m", "tigon", "train", str(path), *words]
        if code := torchrun.start(arguments, recipe.sharding.gpus, max_restarts=max_restarts):
            raise SystemExit(code)
        return _newest_folder(recipe, run)

    with ExitStack() as held:
        if run is not None and launch.rank() == 0:
            held.enter_context(run_folder.locked(run.path))
            run = run_folder.with_checkpoint(run, recipe)
        connect(recipe, device)
        open_folder.check_same_recipe(asked)
        return _train_alone_or_joined(recipe, device, run, path, overrides, held)


def _looks_for_run() -> bool:
    """Whether this process checks the run folder to resume. On several machines the main process does it for all."""
    return launch.rank() == 0 or not launch.has_several_nodes()


def _command(path: Path, overrides: Sequence[str]) -> str:
    """The command of this run, without --resume."""
    return shlex.join(["tigon", "train", str(path), *_words(overrides), *torchrun.options()])


def _words(overrides: Sequence[str]) -> list[str]:
    """The overrides as options of the command line."""
    return [word for text in overrides for word in ("--set", text)]


def _check_data(recipe: Recipe) -> None:
    """Refuse data that is missing or has a malformed row, before slow imports. Every process reads all of it later."""
    data = recipe.data
    sources.check(data.sources())
    sources.check(data.eval_sources(), "data.eval_source")
    # Rows for post-training are read by the objective, which needs the model's config.
    if data.bad_rows == "error" and not launch.started_by_launcher() and not is_post_training(recipe):
        reader = PicturedRows(data.images, data.format) if data.images else None
        reading.first_look((*data.sources(), *data.eval_sources()), reader=reader)


def _train_alone_or_joined(
    recipe: Recipe, device: torch.device, run: RunFolder | None, path: Path, overrides: Sequence[str], held: ExitStack
) -> Path:
    """One process's part of a run, up to its end. held: The stack that releases the folder locks when the run ends."""
    from rich.console import Console

    console = Console(highlight=False, quiet=launch.rank() > 0)
    if launch.has_several_nodes():  # only the main process has looked for the run and divided its samples
        run, overrides = launch.broadcast((run, overrides))
        recipe = recipe_checks.load(path, overrides, gpu_present=preflight.gpu_present)
    prepared = prepare(recipe, device)
    open_folder.check_same_data(prepared.data)
    held.enter_context(nvme_swap.own_files(recipe.sharding.nvme_folder))
    command = _command(path, overrides)
    if run is None:
        run = open_folder.create(prepared, command, held)
    else:
        run = open_folder.join(run, prepared, console)
    run_lines.announce(console, run, prepared)
    prepared = _predict(console, prepared, path, overrides)
    with signals.sigterm_interrupts():
        try:
            _carry_out(run, prepared, console)
        except signals.Stopped as stop:
            if launch.rank() == 0:
                print(f"tigon: {stop}", file=sys.stderr)
            launch.shutdown_distributed(together=stop.together)
            raise SystemExit(stop.exit_code) from None
        except KeyboardInterrupt:
            resumable = any((run.path / run_folder.CHECKPOINTS).glob("checkpoint-*"))
            hint = f"; continue with `{command} --resume`" if resumable else ""
            console.print(f"interrupted; {run.path} keeps its files{hint}", markup=False, soft_wrap=True)
            raise
        except Exception as error:
            known = None if isinstance(error, TigonError) else fault_messages.to_user_error(error, run, command)
            if known is None:
                raise
            raise known from error
    if launch.started_by_launcher():
        launch.shutdown_distributed()
    return run.path


def _newest_folder(recipe: Recipe, resumed: RunFolder | None) -> Path:
    """The run folder that the started processes have written."""
    path = resumed.path if resumed is not None else run_folder.newest(recipe.output)
    assert path is not None, "the processes exited with code 0 but left no run folder"
    return path


def _predict(console: Console, prepared: Prepared, path: Path, overrides: Sequence[str]) -> Prepared:
    """Print the planner's prediction of the run, and add it to `prepared`."""
    command = _command(path, overrides)
    predicted = None
    if launch.rank() == 0:
        predicted, lines = prediction.announce(
            prepared.recipe, prepared.config, prepared.settings, prepared.device,
            evaluated=bool(prepared.eval_samples), command=command,
        )  # fmt: skip
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
    return replace(prepared, command=command, prediction=predicted)


def _build(run: RunFolder, prepared: Prepared, kernels: str) -> tuple[Any, Any]:
    """Build the model. Returns (model, patch report or None)."""
    from tigon.trainer import engine  # loads transformers

    recipe, objective = prepared.recipe, prepared.objective
    section = prepared.starting_model(run.path)
    if run.checkpoint is not None:
        section = engine.kept_base(section, prepared.settings, run.path / BASE)
    built, patched = engine.build(
        section, prepared.config, prepared.settings, prepared.run_info, device=prepared.device,
        seed=recipe.train.seed, kernels=kernels, base=run.path / BASE, saves_adapters=recipe.output.save_model,
        ops=self_test.without(prepared.wrong_ops), reads_whole_weights=objective.planned().reads_whole_weights,
    )  # fmt: skip
    built = objective.attach(built)
    lora.keep_trained_in_fp32(built, prepared.settings)
    return built, patched


def _carry_out(run: RunFolder, prepared: Prepared, console: Console) -> None:
    """Train, compare and write the report.

    Raises:
        Stopped: A signal came. Before the final weights are saved, the run ends with a checkpoint for --resume.
            Afterwards the run ends complete, but its comparison may lack kernels.
    """
    from tigon.trainer.report import model_card, report  # loads transformers

    with signals.StopRequest(speaks=launch.rank() == 0) as stop:
        summary = _train_and_save(run, prepared, console, stop)
        if launch.rank() > 0:  # comparison and report are the main process's
            return
        # The trained model has been freed by now, so the comparison has the whole device.
        repeats = _compare(run, prepared, console, stop)
        summary["comparison"] = [repeat.as_mapping() for repeat in repeats]
        result = {name: value for name, value in summary.items() if name != "sample"}
        run.append({"event": "result", "step": _last_step(run), **result})
        report.write(run, summary, prepared.objective)
        for folder in final_model.folders_in(run.path) if prepared.recipe.output.save_model else ():
            if unserved := model_card.write(run, folder, prepared.recipe, summary, prepared.objective):
                console.print(f"serving  {unserved}", markup=False, soft_wrap=True)
        run.write_json(run_folder.SUMMARY, summary)
        run_lines.conclude(console, run, summary, prepared.objective)
        if stop.number:
            cut = any(repeat.stopped for repeat in repeats)
            kept = f"the run is complete{' except its comparison' if cut else ''}"
            raise signals.Stopped(stop.number, _last_step(run), kept, together=False)


def _train_and_save(run: RunFolder, prepared: Prepared, console: Console, stop: signals.StopRequest) -> dict[str, Any]:
    """Train and save the final weights. Returns the run's summary without the comparison.

    Raises:
        Stopped: A signal came before the final weights were saved.
    """
    from tigon.trainer import engine  # loads transformers
    from tigon.trainer.first_phase import train_base  # loads transformers
    from tigon.trainer.report.progress import ProgressDisplay  # loads transformers

    recipe, tok, objective = prepared.recipe, prepared.tokenizer, prepared.objective
    train_base(prepared, run.path, [ProgressDisplay(console)] if launch.rank() == 0 else [])
    with fault_messages.explain_out_of_memory(run, prepared):
        built, patched = _build(run, prepared, recipe.model.kernels)
    engine.refuse_nonfinite(built, recipe.model)
    # All processes would have to take part in sampling from sharded weights.
    alone = launch.rank() == 0 and not prepared.settings.sharding.divides_weights
    writes_text = objective.trl is None or objective.trl.writes_text
    n_sample, seed = recipe.output.sample_tokens if alone and writes_text else 0, recipe.train.seed
    if launch.rank() == 0 and recipe.output.sample_tokens and not alone:
        console.print("sample   no text sample: the weights are sharded", markup=False)
    sample = {"prompt": prepared.prompt_text, "before": "", "after": ""}
    if prepared.rows is not None and writes_text and built.generation_config.eos_token_id is None:
        built.generation_config.eos_token_id = tok.eos_token_id  # a preset has none, and answers have an end
    if n_sample:
        sample["before"] = model.sample(built, tok, prepared.prompt, n_sample, seed, prepared.prompt_inputs)
    with fault_messages.explain_out_of_memory(run, prepared):
        trainer, outcome = _train(run, prepared, built, console, stop)
    if n_sample:
        sample["after"] = model.sample(built, tok, prepared.prompt, n_sample, seed, prepared.prompt_inputs)
    decoded = None
    if n_sample and objective.added is not None:
        decoded = objective.added.sampled(built, prepared.eval_samples or prepared.train.samples, tok.eos_token_id)
    _end_if_asked(prepared, trainer)
    if not prepared.settings.sharding.divides_weights:
        _save_model(run, prepared, built, trainer)  # after sampling: it may detach the objective's heads
    return {
        **outcome,
        "unigram_entropy": prepared.data.get("unigram_entropy"),
        "skipped_steps": trainer.gate.skipped,
        "evaluation_error": trainer.evaluation_error,
        "patch": "\n".join(filter(None, ["unpatched" if patched is None else str(patched), trainer.fused])),
        "decoded": decoded,
        "sample": sample,
    }


def _save_model(run: RunFolder, prepared: Prepared, built: Any, trainer: Any) -> None:
    """Save the final weights if `output.save_model` is set. Every process calls it. The weights change their dtype."""
    recipe, objective = prepared.recipe, prepared.objective
    if not recipe.output.save_model:
        return
    target = final_model.FinalModel(
        run=run.path, model=prepared.starting_model(run.path), config=prepared.config, settings=prepared.settings,
        output=recipe.output,
    )  # fmt: skip
    final = FinalSave(
        folder=run.path, sharded=prepared.settings.sharding.divides_weights, is_first=launch.rank() == 0,
        gathered_state=trainer.gathered_state, save_model=partial(target.save, built, trainer),
        save_state=partial(target.save_state, built),
    )  # fmt: skip
    written = True
    if objective.added is not None:
        written = objective.added.save(built, final)
    else:
        final.save_model()
    if final.is_first and written:
        for folder in final_model.folders_in(run.path):
            prepared.saved_tokenizer.save_pretrained(folder)


def _train(
    run: RunFolder, prepared: Prepared, built: Any, console: Console, stop: signals.StopRequest
) -> tuple[Any, dict[str, Any]]:
    """Train and evaluate. Sharded weights are saved before the evaluation, because an evaluation that runs out of
    memory ends all processes.

    Returns:
        The trainer, and a mapping with `eval_loss` (None without eval samples), `train_s` and `memory`.
    """
    from tigon.trainer import guarded  # loads transformers
    from tigon.trainer.report.watchers import watch  # loads transformers

    trainer = _make_trainer(run, prepared, built, stop)
    started_s = time.perf_counter()
    with ExitStack() as stack:
        watchers = watch(run, prepared, trainer, console, stack)
        try:
            trainer.train(resume_from_checkpoint=str(run.checkpoint) if run.checkpoint else None)
        except Exception as error:
            if run.checkpoint is None or trainer.step.speed.n_micro_batches or isinstance(error, TigonError):
                raise
            if prediction.is_out_of_memory(error) or fault_messages.is_no_checkpoints_fault(error, run):
                raise
            raise fault_messages.unreadable(run, error) from error
        finally:
            watchers.display.close()
        outcome = {
            "train_s": time.perf_counter() - started_s,
            "memory": prediction.compared(prepared.prediction, prepared.device),
            "best_step": trainer.best_step,
            "stopped_early_step": trainer.state.global_step if trainer.stopped_early() else None,
        }
        stop.promise = "ending once everything is saved"
        _end_if_asked(prepared, trainer)
        trainer.gate.settle(trainer.state.global_step)
        guarded.refuse_nonfinite_weights(built, trainer.state.global_step)
        if prepared.settings.sharding.divides_weights:
            _save_model(run, prepared, built, trainer)
        eval_loss = _final_eval_loss(trainer) if prepared.eval_samples else None
        _end_if_asked(prepared, trainer)
        watchers.write_texts(built, trainer.state.global_step, trainer.best_step)
        outcome |= {"eval_loss": eval_loss, "eval_perplexity": _perplexity(prepared, eval_loss)}
        if prepared.recipe.eval.lm_eval:  # may take hours, in which a killed run keeps what it has learned
            trainer.save_last()
        outcome["lm_eval"] = harness.run_tasks(
            run, built, prepared.tokenizer, prepared.recipe.eval, prepared.recipe.train.batch_size, watchers.announce
        )
        watchers.finish(outcome)
        return trainer, outcome


def _perplexity(prepared: Prepared, eval_loss: float | None) -> float | None:
    """exp of the eval loss; None if it is not the loss per token of one head."""
    if eval_loss is None or prepared.rows is not None or prepared.objective.added is not None:
        return None
    return next(iter(perplexity(eval_loss)), None)


def _make_trainer(run: RunFolder, prepared: Prepared, built: Any, stop: signals.StopRequest) -> Any:
    """tigon's trainer, or TRL's if the objective names one."""
    from transformers import EarlyStoppingCallback

    from tigon.trainer import engine, guarded  # loads transformers
    from tigon.trainer import trainer as trainers  # loads transformers
    from tigon.trainer.guards.document_mixing import DocumentMixing  # loads transformers

    recipe = prepared.recipe
    safeguards = guarded.Safeguards(
        stop=stop, max_skipped_steps=recipe.train.max_skipped_steps,
        metadata=fault_messages.checkpoint_metadata(prepared), distributed=resume_rules.writes_distributed(recipe),
        in_background=recipe.train.save_async,
    )  # fmt: skip
    if prepared.rows is not None:
        from tigon.trainer import post_training  # loads transformers

        trainer: Any = post_training.make(run.path, prepared, built, safeguards)
    else:
        args = trainers.arguments(
            recipe.train, prepared.settings, prepared.run_info, folder=run.path / "checkpoints", device=prepared.device,
            evaluate=bool(prepared.eval_samples),
            reads_images=prepared.processor is not None and prepared.settings.lora.rank is None,
        )  # fmt: skip
        eval_samples = SampleDataset(prepared.eval_samples) if prepared.eval_samples else None
        trainer = trainers.make(
            built, args, prepared.collator, SampleDataset(prepared.train.samples), eval_samples,
            engine.make_optimizer(recipe.train, prepared.settings), safeguards, prepared.objective,
        )  # fmt: skip
        data, samples = recipe.data, prepared.train.samples
        if data.packing and not data.cross_document_attention and recipe.sharding.sequence == 1:
            trainer.add_callback(DocumentMixing(trainer, samples, recipe.model.name, prepared.settings))
    if recipe.train.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(recipe.train.early_stopping_patience))
    return trainer


def _end_if_asked(prepared: Prepared, trainer: Any) -> None:
    """If a signal came, save a checkpoint of the last step and raise Stopped. Every process calls it together."""
    if not trainer.asked_to_stop():
        return
    trainer.save_last()
    step = trainer.state.global_step
    kept = f"{checkpoint.name_of(step)} is complete; continue with `{prepared.command} --resume`"
    raise signals.Stopped(trainer.safeguards.stop.number, step, kept, together=True)


def _final_eval_loss(trainer: Any) -> float | None:
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


def _compare(run: RunFolder, prepared: Prepared, console: Console, stop: signals.StopRequest) -> list[Repeat]:
    from tigon.trainer.report.comparison import compare  # loads transformers

    recipe = prepared.recipe
    if recipe.comparison.steps == 0:
        return []
    return compare(
        recipe.comparison.kernels,
        lambda kernels: _build(run, prepared, kernels)[0],
        train=replace(recipe.train, batch_size=recipe.comparison.batch_size or recipe.train.batch_size),
        settings=prepared.settings,
        run_info=prepared.run_info,
        steps=recipe.comparison.steps,
        folder=run.path / "checkpoints",
        device=prepared.device,
        collator=prepared.collator,
        samples=SampleDataset(prepared.train.samples),
        objective=prepared.objective,
        announce=lambda text: console.print(text, markup=False, soft_wrap=True),
        stop=stop,
    )


def _last_step(run: RunFolder) -> int:
    return max((int(record["step"]) for record in run.records()), default=0)
