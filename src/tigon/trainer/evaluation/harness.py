"""Runs tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) on the trained model."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.errors import RecipeError
from tigon.trainer.folder.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tigon.recipe.keys import Recipe

_RESULTS_FILE = "lm_eval.json"
_INSTALL_COMMAND = "pip install 'lm_eval>=0.4.4'"
_KEY = "eval.lm_eval"


def check_tasks(tasks: Sequence[str]) -> None:
    """Check before the run that every task can be found.

    Raises:
        RecipeError: The package is not installed, a `.yaml` file does not exist, or there is no such task.
    """
    if not tasks:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise RecipeError(f"{_KEY} needs lm-evaluation-harness, not installed here: {_INSTALL_COMMAND}")
    files = [task for task in tasks if task.endswith((".yaml", ".yml"))]
    for file in files:
        if not Path(file).is_file():
            raise RecipeError(f"{_KEY}: {file}: no such file; name a task, or the .yaml file of one")
    names = [task for task in tasks if task not in files]
    if not names:
        return
    from lm_eval.tasks import TaskManager

    with _quietly():
        known = set(TaskManager().all_tasks)
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(
            f"{_KEY}: {', '.join(unknown)}: no such task in lm-evaluation-harness; `lm_eval ls tasks` lists them"
        )


def compute_metrics(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[str], limit: int | None, batch_size: int
) -> dict[str, dict[str, float]]:
    """Run the tasks, and return their metrics.

    Args:
        model: The trained model.
        tokenizer: Its tokenizer.
        tasks: Names of tasks, or `.yaml` files.
        limit: Samples per task; None means all.
        batch_size: Sequences per batch.

    Returns:
        The metrics of each task, by task and metric: `{"hellaswag": {"acc,none": 0.31, ...}}`.

    Raises:
        RecipeError: A task's `.yaml` file cannot be read.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    was_training = model.training
    model.eval()
    try:
        with _quietly():
            device = str(next(model.parameters()).device)
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=device)
            options = {"limit": limit, "log_samples": False, "bootstrap_iters": 1000}
            lm_eval_output = simple_evaluate(model=wrapped, tasks=[_load_task(task) for task in tasks], **options)
    finally:
        model.train(was_training)
    results: Mapping[str, Mapping[str, Any]] = (lm_eval_output or {}).get("results", {})
    return {
        task: {name: float(value) for name, value in row.items() if "," in name and _is_number(value)}
        for task, row in results.items()
    }


def evaluate_and_save(
    run: RunFolder,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    announce: Callable[[str], None],
) -> dict[str, dict[str, float]] | None:
    """Run the tasks of `eval.lm_eval`, write their results to lm_eval.json, and print them.

    If a task fails, the reason is printed, None is returned, and the run continues.

    Args:
        run: The run folder.
        model: The trained model.
        tokenizer: Its tokenizer.
        recipe: The recipe of the run.
        announce: Prints a line.
    """
    options = recipe.eval
    if not options.lm_eval:
        return None
    announce(f"lm_eval  {', '.join(options.lm_eval)} ...")
    try:
        results = compute_metrics(model, tokenizer, options.lm_eval, options.lm_eval_limit, recipe.train.batch_size)
    except Exception as error:  # for example a data set that cannot be downloaded; the package raises many kinds
        reason = " ".join(str(error).split())[:300]
        announce(f"warning  eval.lm_eval failed: {type(error).__name__}: {reason}")
        return None
    run.write_json(_RESULTS_FILE, results)
    for task, metric, value, standard_error in metric_rows(results):
        margin = "" if standard_error is None else f" (standard error {standard_error:.4f})"
        announce(f"lm_eval  {task}: {metric} {value:.4f}{margin}")
    return results


def metric_rows(results: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str, float, float | None]]:
    """(task, metric, value, standard error) of every metric, for the console and the report."""
    rows = []
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, variant = name.partition(",")
            if metric.endswith("_stderr") or not variant:
                continue
            shown = metric if variant == "none" else f"{metric} ({variant})"
            rows.append((task, shown, value, metrics.get(f"{metric}_stderr,{variant}")))
    return rows


def _load_task(task: str) -> Any:
    """The config of a task in a file; a name unchanged."""
    if not task.endswith((".yaml", ".yml")):
        return task
    import yaml

    try:
        config = yaml.safe_load(Path(task).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RecipeError(f"{_KEY}: {task}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the package's log lines and progress bars, and those of the git that it calls, off the console."""
    logger = logging.getLogger("lm_eval")
    level, console = logger.level, os.dup(2)
    logger.setLevel(logging.ERROR)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(console, 2)
        os.close(console)
        logger.setLevel(level)
