"""Trackers of `train.report_to`: wandb, MLflow and trackio, through transformers' own callbacks.

transformers' callbacks end the tracker's run when training ends. The last evaluation, the peak of memory and the tasks
of lm-evaluation-harness come later, so `Trackers` holds the callbacks and ends them with the run. It also gives every
tracker the recipe, the environment and the plan, which the callbacks do not take. TensorBoard's files are written
by `progress.MetricsWriter`.

Nothing leaves the machine unless the user has configured it. `offline` of each row sets the tracker's own variables.
A variable that is set already keeps its value.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tigon.errors import RecipeError
from tigon.trainer.post_training.completions import EVENT, Rows, table_of

PROJECT = "tigon"


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """One tracker."""

    offline: Callable[[Path], Mapping[str, str]]
    """Environment variables, for a run folder, that keep everything on this machine."""
    describe: Callable[[Any, Mapping[str, Any]], None]
    """Called with the tracker's module and nested values to store with the run."""
    finish: Callable[[Any, Mapping[str, float], int], None]
    """Called with the module, the final figures and the last step."""
    completions: Callable[[Any, Rows, int], None]
    """Called with the module, the completions of a record with their rewards, and the step."""
    where: Callable[[Path], str]
    """Says where the run's files are and how to see them, for the console."""


def _wandb_variables(run: Path) -> dict[str, str]:
    # With a key in the environment the user has asked for wandb's server.
    online = "WANDB_API_KEY" in os.environ
    return {
        **({} if online else {"WANDB_MODE": "offline"}),
        "WANDB_DIR": str(run),
        "WANDB_PROJECT": PROJECT,
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_ERROR_REPORTING": "false",
    }


def _wandb_where(run: Path) -> str:
    if os.environ.get("WANDB_MODE") != "offline":
        return f"WANDB_MODE={os.environ.get('WANDB_MODE', 'online')}"
    return f"offline, in {run / 'wandb'}; `wandb sync {run / 'wandb'}/offline-run-*` uploads it"


def _mlflow_variables(run: Path) -> dict[str, str]:
    # mlflow-skinny comes without SQLAlchemy, and keeps its runs in files.
    folder = run.parent.resolve()
    in_database = importlib.util.find_spec("sqlalchemy") is not None
    return {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}" if in_database else (folder / "mlruns").as_uri(),
        "MLFLOW_EXPERIMENT_NAME": PROJECT,
        **({} if in_database else {"MLFLOW_ALLOW_FILE_STORE": "true"}),
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }


def _mlflow_where(run: Path) -> str:
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return f"{uri}; `mlflow ui --backend-store-uri {uri}` shows it"


def _trackio_variables(run: Path) -> dict[str, str]:
    return {
        "TRACKIO_DIR": str((run.parent / "trackio").resolve()),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def _trackio_where(run: Path) -> str:
    folder = os.environ.get("TRACKIO_DIR", "")
    return f"{folder}; `TRACKIO_DIR={folder} trackio show --project {PROJECT}` shows it"


def _describe_mlflow(mlflow: Any, details: Mapping[str, Any]) -> None:
    for name, value in details.items():
        mlflow.log_dict(value, f"{name}.json")


def _columns(rows: Rows, step: int) -> dict[str, list[Any]]:
    """The completions of a record as the columns of a table."""
    titles, cells = table_of([{"event": EVENT, **row} for row in rows], 1)
    columns = {title or "record": [cell[number] for cell in cells] for number, title in enumerate(titles)}
    return {"step": [step] * len(rows), **columns}


def _log_table(tracker: Any, rows: Rows, step: int) -> None:
    """For wandb and trackio, whose tables take a pandas data frame."""
    import datasets

    frame = datasets.Dataset.from_dict(_columns(rows, step)).to_pandas()
    tracker.log({"completions": tracker.Table(dataframe=frame), "train/global_step": step})


KINDS: Mapping[str, Tracker] = {
    "wandb": Tracker(
        offline=_wandb_variables,
        where=_wandb_where,
        describe=lambda wandb, details: wandb.config.update({PROJECT: dict(details)}, allow_val_change=True),
        completions=_log_table,
        finish=lambda wandb, figures, step: (wandb.run.summary.update(dict(figures)), wandb.finish())[1],
    ),
    "mlflow": Tracker(
        offline=_mlflow_variables,
        where=_mlflow_where,
        describe=_describe_mlflow,
        completions=lambda mlflow, rows, step: mlflow.log_table(_columns(rows, step), "completions.json"),
        finish=lambda mlflow, figures, step: mlflow.log_metrics(dict(figures), step=step),
    ),
    "trackio": Tracker(
        offline=_trackio_variables,
        where=_trackio_where,
        describe=lambda trackio, details: trackio.config.update(dict(details), allow_val_change=True),
        completions=_log_table,
        finish=lambda trackio, figures, step: trackio.log({**figures, "train/global_step": step}),
    ),
}


class Trackers(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """The trackers of a run. A tracker that fails during training is named once and left out from then on."""

    def __init__(
        self, names: Sequence[str], run: Path, details: Mapping[str, Any], announce: Callable[[str], None]
    ) -> None:
        """Make the callbacks of transformers.

        Args:
            names: Values of `train.report_to`; those that are not in `KINDS` are ignored.
            run: The run folder.
            details: Nested values to store with the run, by name.
            announce: Prints a line.
        """
        from transformers.integrations.integration_utils import get_reporting_integration_callbacks

        self._run, self._details, self._announce = run, details, announce
        self._inner: dict[str, Any] = {}
        self._started: set[str] = set()
        self._last: tuple[Any, ...] = ()
        for name in names:
            if name in KINDS:
                for variable, value in KINDS[name].offline(run).items():
                    os.environ.setdefault(variable, value)
                self._inner[name] = get_reporting_integration_callbacks([name])[0]()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel | None = None,
        **kwargs: object,
    ) -> None:
        """Start the trackers' runs.

        Raises:
            RecipeError: A tracker cannot start. Nothing has been trained yet.
        """
        self._last = (args, state, control)
        args.run_name, args.project = self._run.name, PROJECT
        for name, callback in self._inner.items():
            try:
                with redirect_stdout(io.StringIO()):
                    callback.on_train_begin(args, state, control, model=model, **kwargs)
                    KINDS[name].describe(importlib.import_module(name), self._details)
            except Exception as error:  # the packages raise dozens of kinds, for example for a server that is down
                reason = " ".join(str(error).split())[:200]
                raise RecipeError(
                    f"train.report_to: {name} cannot start: {type(error).__name__}: {reason}; mend its settings, or "
                    f"leave {name} out"
                ) from error
            self._started.add(name)
            self._announce(f"tracker  {name}: {KINDS[name].where(self._run)}")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        # TRL logs None or NaN for a metric without a value.
        numbers = {k: v for k, v in (logs or {}).items() if isinstance(v, (int, float)) and math.isfinite(v)}
        self._each("on_log", args, state, control, logs=numbers, **kwargs)

    def completions(self, rows: Rows, step: int) -> None:
        """Give the trackers a record's completions with their rewards."""
        for name in list(self._inner):
            try:
                KINDS[name].completions(importlib.import_module(name), rows, step)
            except Exception as error:
                self._drop(name, error)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._each("on_save", args, state, control, **kwargs)

    def _each(self, event: str, *args: object, **kwargs: object) -> None:
        for name, callback in list(self._inner.items()):
            try:
                getattr(callback, event)(*args, **kwargs)
            except Exception as error:
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        del self._inner[name]
        reason = " ".join(str(error).split())[:200]
        self._announce(f"warning  {name} failed and gets no more records: {type(error).__name__}: {reason}")

    def finish(self, figures: Mapping[str, float]) -> None:
        """End the trackers' runs. figures: the run's final figures; empty if the run has failed."""
        for name, callback in list(self._inner.items()):
            if name not in self._started:
                continue
            args, state, control = self._last
            try:
                with redirect_stdout(io.StringIO()):
                    KINDS[name].finish(importlib.import_module(name), figures, state.global_step)
                    callback.on_train_end(args, state, control)
            except Exception as error:
                self._drop(name, error)
        self._inner.clear()
