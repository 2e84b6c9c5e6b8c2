"""Files of the plan's cache: what is remembered, what makes it invalid, and what is done with damaged files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner_helpers import H200, request_of

from forks import forks, python
from tigon.cli import plan_answers
from tigon.planner.estimate import estimate
from tigon.planner.request import Request
from tigon.planner.simulate import model_states
from tigon.planner.trace.cache import disk_cache
from tigon.planner.trace.cache import step_tapes as cache
from tigon.planner.trace.cache.trace_key import TraceKey


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TIGON_CACHE", raising=False)
    _forget()
    yield tmp_path / "tigon" / "plans"
    _forget()


def _forget() -> None:
    """Drop what this process remembers, so that the next estimate is that of a new process."""
    cache._traces.clear()
    cache._tapes.clear()
    model_states._model_weights.cache_clear()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that were traced."""
    requests, plain = [], cache.trace

    def noted(request: Request, *args: Any, **kwargs: Any) -> Any:
        requests.append(request)
        return plain(request, *args, **kwargs)

    monkeypatch.setattr(cache, "trace", noted)
    return requests


REQUEST = request_of(precision="bf16", kernels="tigon", evaluated=True, accumulate=2)


def test_second_process_gives_the_same_estimate_without_a_trace(
    traced: list[Request], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = estimate(REQUEST, gpu=H200)
    assert len(traced) == 2  # the first micro-batch, and a later one
    _forget()
    monkeypatch.setattr(model_states, "_built_weights", lambda key: pytest.fail("the model was built"))
    assert estimate(REQUEST, gpu=H200) == first
    assert len(traced) == 2
    assert {path.name.split("-")[0] for path in folder.iterdir()} == {"trace", "weights"}


@pytest.mark.parametrize(
    "changed",
    [
        {"batch": 3}, {"seq": 32}, {"masked": True},
        {"settings": REQUEST.settings.having({"train.checkpointing": "full"})},
        {"config": request_of(shape={"hidden_size": 32}).config},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_another_question_is_traced(changed: dict[str, Any], traced: list[Request]) -> None:
    estimate(REQUEST, gpu=H200)
    _forget()
    estimate(replace(REQUEST, **changed), gpu=H200)
    assert len(traced) == 4


def test_files_of_another_version_are_not_used(traced: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    estimate(REQUEST, gpu=H200)
    _forget()
    monkeypatch.setattr(disk_cache, "_versions", lambda: "another torch")
    estimate(REQUEST, gpu=H200)
    assert len(traced) == 4


@pytest.mark.parametrize("content", [b"", b"half of a fi", None], ids=["empty", "damaged", "another program's"])
def test_damaged_files_are_traced_again_and_rewritten(
    content: bytes | None, traced: list[Request], folder: Path
) -> None:
    first = estimate(REQUEST, gpu=H200)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    for path in whole:
        path.write_bytes(content if content is not None else _with_another_answer(path))
    _forget()
    assert estimate(REQUEST, gpu=H200) == first
    assert len(traced) == 4
    assert {path: path.read_bytes() for path in folder.iterdir()} == whole


def _with_another_answer(path: Path) -> bytes:
    import json
    import zlib

    stored = json.loads(zlib.decompress(path.read_bytes()))
    return zlib.compress(json.dumps({**stored, "answer": {"segments": 3}}).encode())


def test_nothing_is_read_or_written_with_tigon_cache_0(
    traced: list[Request], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGON_CACHE", "0")
    estimate(REQUEST, gpu=H200)
    _forget()
    estimate(REQUEST, gpu=H200)
    assert len(traced) == 4
    assert not folder.exists()


def test_folder_that_cannot_be_made_is_no_error(traced: list[Request], tmp_path: Path) -> None:
    (tmp_path / "tigon").write_text("a file in the folder's place")
    estimate(REQUEST, gpu=H200)
    assert len(traced) == 2


def test_plans_that_repeat_the_same_layers_share_their_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGON_CACHE", "0")
    recorded: list[tuple[str, int, bool, bool]] = []
    plain = cache.recorded

    def noted(request: Request, gpu: Any, layers: int, *flags: bool, training: bool) -> Any:
        recorded.append((request.settings.train.checkpointing, layers, training, flags[-1]))
        return plain(request, gpu, layers, *flags, training=training)

    monkeypatch.setattr(cache, "recorded", noted)
    estimates = {}
    for kind in ("none", "full", "full:4,none:4", "full:5,none:3", "mlp:8"):
        request = request_of(shape={"num_hidden_layers": 8}, checkpointing=kind, kernels="tigon", evaluated=True)
        shared = estimate(request, gpu=H200)
        with monkeypatch.context() as alone:
            alone.setattr(cache, "_shared", None)
            cache._traces.clear()
            assert estimate(request, gpu=H200) == shared
        estimates[kind] = shared
    # The second plan and the last evaluate like the first, and the fourth repeats the layers of the third.
    assert recorded == [
        ("none", 3, True, True), ("full", 3, True, False), ("full:3,none:3", 6, True, True), ("mlp:3", 3, True, False),
    ]  # fmt: skip
    assert len({one.peak_allocated_bytes for one in estimates.values()}) == 5


def test_oldest_files_go_when_the_folder_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        disk_cache.write("trace", str(number), number)
        for path in folder.iterdir():
            os.utime(path, (path.stat().st_mtime - 10,) * 2)
    size = sum(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setattr(disk_cache, "MAX_BYTES", size)
    disk_cache.write("trace", "the newest", 5)
    kept = [disk_cache.read("trace", str(number)) for number in range(4)]
    assert kept[0] is None and kept[3] == 3
    assert disk_cache.read("trace", "the newest") == 5


def test_objective_without_a_text_of_its_own_is_not_written(folder: Path) -> None:
    class Own(type(REQUEST.objective)):  # type: ignore[misc]
        pass

    assert TraceKey(replace(REQUEST, objective=Own())).portable_text is None


OPTIONS: dict[str, Any] = {"as_json": False, "images": None, "assignments": (), "plot": None, "batch": 2}


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    """A call of `tigon plan` whose search only prints. Gives whether it ran, and what was printed."""

    def call(model: str, *, warning: str = "", **changes: Any) -> tuple[bool, str]:
        runs: list[str] = []

        def run(model: str, **options: Any) -> None:
            runs.append(model)
            print(f"plan of {model} with {options['batch']}")
            print(warning, end="", file=sys.stderr)

        plan_answers.print_once(run, model, OPTIONS | changes)
        return bool(runs), capsys.readouterr().out

    return call


def test_answer_of_a_repeated_plan_is_printed_from_its_file(printed: Any) -> None:
    first = printed("tigon-demo")
    assert first == (True, "plan of tigon-demo with 2\n")
    assert printed("tigon-demo") == (False, first[1])
    assert printed("tigon-demo", batch=3)[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COLUMNS", "71"),
        ("FORCE_COLOR", "1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    ],
)
def test_answer_depends_on_the_environment(
    name: str, value: str, printed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("COLUMNS", "FORCE_COLOR", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    printed("tigon-demo")
    monkeypatch.setenv(name, value)
    assert printed("tigon-demo")[0]
    assert not printed("tigon-demo")[0]


def test_answer_depends_on_the_config_file_and_the_versions(
    printed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert printed(str(tmp_path))[0] and not printed(str(tmp_path))[0]
    file.write_text('{"hidden_size": 32}')
    assert printed(str(tmp_path))[0]
    monkeypatch.setattr(disk_cache, "_versions", lambda: "another torch")
    assert printed(str(tmp_path))[0]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("recipe.yaml", {}), ("someone/a-model-of-the-hub", {}), ("tigon-demo", {"images": 1}),
        ("tigon-demo", {"assignments": ["post_training.beta=1"]}), ("tigon-demo", {"plot": Path("charts")}),
        ("tigon-demo", {"warning": "a word on stderr"}),
    ],
    ids=lambda value: str(value).strip("{}"),
)  # fmt: skip
def test_plan_that_depends_on_more_is_computed_each_time(model: str, options: dict[str, Any], printed: Any) -> None:
    assert printed(model, **options)[0] and printed(model, **options)[0]


@forks
def test_repeated_plan_prints_the_same_without_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; from tigon.cli import plan_answers; from tigon.cli.commands import plan; "
        "plan_answers.print_once(plan.run, 'tigon-demo', {"
        "'gpu': '1GiB', 'batch': 2, 'seq': 64, 'kernels': 'none', 'checkpointing': 'none', 'precision': 'bf16', "
        "'optimizer': 'adamw', 'as_json': True, 'assignments': (), 'plot': None, 'images': None}); "
        "print('transformers' in sys.modules, file=sys.stderr)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    first = python(code=script)  # this process has imported transformers
    second = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert (first.stderr.split()[-1], second.stderr.split()[-1]) == ("True", "False")
