"""Trackers of `train.report_to`: TensorBoard's files, and stand-ins for the packages of the others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_helpers import records

from tigon.recipe.keys import TRACKERS

STAND_IN = """\
import json, sys, types

def _note(kind, **values):
    with open({log!r}, "a") as handle:
        handle.write(json.dumps(dict(tracker={name!r}, kind=kind, **values), default=str) + "\\n")

def _module(name, **values):
    sys.modules[name] = made = types.ModuleType(name)
    vars(made).update(values)
    return made

__version__ = "9.9.9"

class _Config(dict):
    def update(self, values, **kwargs):
        _note("config", values=values)
"""
WANDB = """
class ConfigError(Exception): pass
_module("wandb.sdk"); _module("wandb.sdk.lib"); _module("wandb.sdk.lib.config_util", ConfigError=ConfigError)
class _Summary(dict):
    def update(self, values): _note("final", values=values)
class _Run:
    summary, id, name = _Summary(), "1", "r"
    def _label(self, **kwargs): pass
run = None
config = _Config()
def init(**kwargs):
    global run
    run = _Run()
    import os
    _note("start", mode=os.environ.get("WANDB_MODE"), folder=os.environ.get("WANDB_DIR"), **kwargs)
def log(values): _note("log", values=values)
def define_metric(*args, **kwargs): pass
def Table(dataframe): return dataframe.to_dict("list")
def finish():
    global run
    run = None
    _note("end")
"""
MLFLOW = """
utils = _module("mlflow.utils"); utils.validation = _module(
    "mlflow.utils.validation", MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
_active = None
def is_tracking_uri_set(): return False
def set_tracking_uri(uri): _note("start", uri=uri)
def get_tracking_uri(): return ""
def set_experiment(name): pass
class _Run:
    class info: run_id = "1"
def active_run(): return _active
def start_run(run_name=None, nested=False):
    global _active
    _active = _Run()
def log_params(values, **kwargs): pass
def log_dict(value, file): _note("config", values={file[:-5]: value})
def log_table(columns, file): _note("table", values={file[:-5]: columns})
def log_metrics(metrics, step=None, **kwargs):
    _note("final" if "final/train_s" in metrics else "log", values=metrics, step=step)
def end_run():
    global _active
    _active = None
    _note("end")
"""
TRACKIO = """
class _Current:
    def get(self): return None
class context_vars:
    current_space_id = _Current()
config = _Config()
def init(space_id=None, **kwargs): _note("start", space=space_id, **kwargs)
def log(values): _note("final" if "final/train_s" in values else "log", values=values)
def Table(dataframe): return dataframe.to_dict("list")
def finish(): _note("end")
"""
BODIES = {"wandb": WANDB, "mlflow": MLFLOW, "trackio": TRACKIO}


@pytest.fixture
def stand_ins(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Packages of the trackers' names that note each call in calls.jsonl."""
    packages, log = here / "packages", here / "calls.jsonl"
    for name, body in BODIES.items():
        (packages / name).mkdir(parents=True)
        text = STAND_IN.format(name=name, log=str(log)) + body
        (packages / name / "__init__.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(packages))
    before = dict(os.environ)
    for variable in list(os.environ):
        if variable.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(variable)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in BODIES}
    yield log
    for name in [name for name in sys.modules if name.split(".")[0] in BODIES]:
        del sys.modules[name]
    sys.modules.update(hidden)
    for variable in [name for name in os.environ if name not in before]:
        del os.environ[variable]


def calls(log: Path, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["tracker"] == name]


def scalars(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def test_every_tracker_of_the_recipe_has_its_settings() -> None:
    from tigon.trainer.report.tracking import KINDS

    assert tuple(KINDS) == TRACKERS


def test_tensorboard_has_each_record_once_and_the_recipe(recipe: Any, tigon: Any) -> None:
    assert tigon("train", recipe(train={"eval_steps": 2})).code == 0
    run = Path("runs/r")
    board = scalars(run / "tensorboard")
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4]
    losses = [(record["step"], pytest.approx(record["eval_loss"])) for record in records(run, "eval")]
    assert [(event.step, event.value) for event in board.Scalars("eval/loss")] == losses
    assert board.Scalars("final/memory_peak_bytes")[0].value > 0
    assert {"recipe/text_summary", "environment/text_summary"} <= set(board.Tags()["tensors"])


def test_none_writes_no_files_of_tensorboard(recipe: Any, tigon: Any) -> None:
    assert tigon("train", recipe(train={"report_to": "none"})).code == 0
    assert not Path("runs/r/tensorboard").exists()
    assert records(Path("runs/r"), "train")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_gets_recipe_environment_every_record_once_and_the_final_figures(
    name: str, recipe: Any, tigon: Any, stand_ins: Path
) -> None:
    outcome = tigon("train", recipe(train={"report_to": name, "eval_steps": 2}))
    assert outcome.code == 0, outcome.err
    noted = calls(stand_ins, name)
    kinds = [call["kind"] for call in noted]
    assert kinds.count("start") == kinds.count("end") == kinds.count("final") == 1
    assert kinds.index("final") < kinds.index("end") == len(kinds) - 1
    stored = {key for call in noted if call["kind"] == "config" for key in call["values"]}
    stored |= {key for call in noted if call["kind"] == "config" for key in call["values"].get("tigon", ())}
    assert {"recipe", "environment"} <= stored
    logged = [call["values"] for call in noted if call["kind"] == "log"]
    for ours, theirs in (("loss", ("train/loss", "loss")), ("eval_loss", ("eval/loss", "eval_loss"))):
        event = "eval" if ours == "eval_loss" else "train"
        found = [values[key] for values in logged for key in theirs if key in values]
        assert found == [record[ours] for record in records(Path("runs/r"), event)]
    final = next(call["values"] for call in noted if call["kind"] == "final")
    assert {"final/eval_loss", "final/eval_perplexity", "final/memory_peak_bytes", "final/train_s"} <= set(final)
    assert f"tracker  {name}:" in outcome.out


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_gets_completions_with_their_rewards(name: str, stand_ins: Path) -> None:
    from tigon.trainer.report.tracking import Trackers

    said: list[str] = []
    rows = [
        {"label": "step 5", "prompt": "p", "text": "a", "reward": 1.5, "rewards": {"right": 1.0, "short": 0.5}},
        {"label": "step 5", "prompt": "p", "text": "b", "reward": 0.0, "rewards": {"right": 0.0}},
    ]
    Trackers([name], Path("runs/r"), {}, said.append).completions(rows, 5)
    (table,) = [call["values"]["completions"] for call in calls(stand_ins, name) if "completions" in call["values"]]
    assert table == {
        "step": [5, 5], "record": ["step 5"] * 2, "prompt": ["p", "p"], "completion": ["a", "b"],
        "reward": ["1.50", "0.00"], "right": ["1.00", "0.00"], "short": ["0.50", ""],
    }  # fmt: skip
    assert not said


def test_trackers_stay_on_this_machine_unless_their_own_variables_say_otherwise(
    recipe: Any, tigon: Any, stand_ins: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tigon("train", recipe(train={"report_to": list(TRACKERS)})).code == 0
    start = {name: next(c for c in calls(stand_ins, name) if c["kind"] == "start") for name in TRACKERS}
    assert (start["wandb"]["mode"], start["wandb"]["folder"]) == ("offline", "runs/r")
    assert (
        start["mlflow"]["uri"].startswith(("sqlite:///", "file:///")) and str(here / "runs") in start["mlflow"]["uri"]
    )
    assert start["trackio"]["space"] is None and os.environ["TRACKIO_DIR"] == str(here / "runs" / "trackio")
    for variable in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    stand_ins.unlink()
    assert tigon("train", recipe(train={"report_to": ["wandb", "mlflow"]}, output={"name": "s"})).code == 0
    start = {name: next(c for c in calls(stand_ins, name) if c["kind"] == "start") for name in ("wandb", "mlflow")}
    assert start["wandb"]["mode"] is None
    assert start["mlflow"]["uri"] == "http://tracking.example"


def test_a_tracker_that_fails_during_training_is_named_once_and_training_goes_on(
    recipe: Any, tigon: Any, stand_ins: Path
) -> None:
    package = stand_ins.parent / "packages" / "trackio" / "__init__.py"
    text = package.read_text(encoding="utf-8").replace(
        "def log(values):", "def log(values):\n    raise OSError('gone')\n"
    )
    package.write_text(text.replace("\n _note", "\n    _note"), encoding="utf-8")
    outcome = tigon("train", recipe(train={"report_to": "trackio"}))
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("trackio failed and gets no more records: OSError: gone") == 1
    assert len(records(Path("runs/r"), "train")) == 4


def test_a_tracker_that_cannot_start_ends_the_run_in_one_line(recipe: Any, tigon: Any, stand_ins: Path) -> None:
    package = stand_ins.parent / "packages" / "wandb" / "__init__.py"
    with package.open("a", encoding="utf-8") as handle:
        handle.write("\ndef init(**kwargs): raise ValueError('no such project')\n")
    line = tigon("train", recipe(train={"report_to": "wandb"})).error_line()
    assert "train.report_to: wandb cannot start: ValueError: no such project" in line


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused_with_the_install_command(
    name: str, recipe: Any, tigon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.util import find_spec

    monkeypatch.setattr("importlib.util.find_spec", lambda n, *a: None if n == name else find_spec(n, *a))
    assert f"pip install {name}" in tigon("train", recipe(train={"report_to": name})).error_line()
    assert not Path("runs").exists()


def test_none_beside_a_tracker_is_refused(recipe: Any, tigon: Any) -> None:
    assert "keep one" in tigon("train", recipe(train={"report_to": ["none", "tensorboard"]})).error_line()
