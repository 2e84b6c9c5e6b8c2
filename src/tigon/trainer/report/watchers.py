"""The callbacks that show and record a run while it trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tigon.objectives.metric_sections import section_of
from tigon.report.table import Table
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.distributed import launch
from tigon.trainer.evaluation import harness
from tigon.trainer.evaluation.generations import Generations
from tigon.trainer.folder import run_folder
from tigon.trainer.folder.run_folder import RunFolder
from tigon.trainer.post_training.completions import EVENT, Rows, table_of
from tigon.trainer.report.progress import MetricsWriter, ProgressDisplay
from tigon.trainer.report.tracking import Trackers

if TYPE_CHECKING:
    from rich.console import Console
    from torch.utils.tensorboard import SummaryWriter
    from transformers import PreTrainedModel

    from tigon.trainer.guarded import GuardedTrainer
    from tigon.trainer.prepare import Prepared


@dataclass(frozen=True)
class Watchers:
    """The callbacks of one run. Processes other than the main one have only the display, which is quiet there."""

    run: RunFolder
    display: ProgressDisplay
    writer: SummaryWriter | None = None
    generations: Generations | None = None
    trackers: Trackers | None = None

    def write_texts(self, model: PreTrainedModel, step: int, best_step: int | None) -> None:
        """Write the texts of `eval.generate` by the trained model; see `Generations.finish`."""
        if self.generations is not None:
            self.generations.finish(model, step, best_step)

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Give the trackers the figures of the whole run, and end them."""
        if self.trackers is None:
            return
        figures = final_figures(self.run, outcome)
        if self.writer is not None:
            for name, value in figures.items():
                self.writer.add_scalar(name, value, self.run.last_step)
        self.trackers.finish(figures)


def watch(run: RunFolder, prepared: Prepared, trainer: GuardedTrainer, console: Console, stack: ExitStack) -> Watchers:
    """Add the callbacks to the trainer. stack: closes their files when training ends."""
    recipe = prepared.recipe
    names, display = recipe.train.report_to, ProgressDisplay(console, section_of(prepared.objective))

    if launch.rank() > 0:
        return Watchers(run, display)
    details = {"recipe": recipe.as_mapping(), "environment": run.read_json(run_folder.ENVIRONMENT)}
    if prepared.prediction is not None:
        details["plan"] = prepared.prediction.as_mapping()
    writer = None
    if "tensorboard" in names:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = checkpoint.step_of(run.checkpoint) + 1 if run.checkpoint else None
        writer = stack.enter_context(SummaryWriter(str(run.path / "tensorboard"), purge_step=purge_step))
        for name, value in details.items():
            writer.add_text(name, f"```json\n{json.dumps(value, indent=2)}\n```")
    trackers, generations = Trackers(names, run.path, details, console.out), None
    stack.callback(trackers.finish, {})  # if the run fails
    if prepared.prompts:
        generations = Generations(run, prepared, console.out, trainer.step.speed.restart)
    for callback in filter(None, (MetricsWriter(run, writer), trackers, display, generations)):
        trainer.add_callback(callback)
    if trainer.completions is not None:
        tables: list[Callable[[Rows, int], None]] = [trackers.completions]
        if writer is not None:
            tables.append(partial(_write_completions, writer))
        trainer.completions.show(run.append, console, tables)
        trainer.add_callback(trainer.completions)
    return Watchers(run, display, writer, generations, trackers)


def _write_completions(writer: SummaryWriter, rows: Rows, step: int) -> None:
    """The completions of a record as TensorBoard's text, in a table of Markdown."""
    titles, cells = table_of([{"event": EVENT, **row} for row in rows], 1)
    writer.add_text("completions", Table(titles, cells, texts=(0, 1, 2)).markdown(), step)


def final_figures(run: RunFolder, outcome: Mapping[str, Any]) -> dict[str, float]:
    """The figures of the whole run, for trackers.

    Args:
        run: The run folder.
        outcome: The part of the run's summary that `run.py` has when training ends.
    """
    train = [record for record in run.records() if record["event"] == "train"]
    names = ("eval_loss", "eval_perplexity", "train_s", "best_step", "stopped_early_step")
    figures = {f"final/{name}": outcome[name] for name in names}
    figures["final/memory_peak_bytes"] = max((record["memory_peak_bytes"] for record in train), default=None)
    for kind, values in (outcome["memory"] or {}).items():
        figures[f"final/{kind}_peak_allocated_bytes"] = values["peak_allocated_bytes"]
    for task, metric, value, _ in harness.metric_rows(outcome["lm_eval"] or {}):
        figures[f"lm_eval/{task}/{metric}"] = value
    return {name: float(value) for name, value in figures.items() if value is not None}
