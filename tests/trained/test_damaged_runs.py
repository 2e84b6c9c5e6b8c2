"""Every file of a finished run is damaged in every way: each command answers, or refuses in one line, at once.

A command that answers must have read what the run wrote: its weights are compared.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tigon.errors import RunFolderError
from tigon.trainer.checkpoint import checkpoint as checkpoint_files

PATIENCE_S = 300  # no command here takes more than a few seconds
HUGE_BYTES = 2**30 + 1  # sparse, so it takes no space
MORE_BYTES = 6 * 2**30  # that a command may use; one that reads a device would take all
RUNS = {"whole": (), "adapters": ("lora.rank=2", "output.merge=true")}
USED = {"whole": "model/", "adapters": "adapters/"}
pytestmark = pytest.mark.second_proof("each guard has a test of its own; this one looks for files without a guard")


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def make_run(finished: Path, checkpoint: Path, tigon: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """make_run(kind): the folder of a finished run with checkpoints, made once."""

    def make(kind: str) -> Path:
        monkeypatch.chdir(finished)
        monkeypatch.setenv("XDG_CACHE_HOME", str(finished / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        if not (finished / "recipe.yaml").exists():
            rows = [{"prompt": f"Name {i}.", "completion": f"Name {i} it is."} for i in range(24)]
            (finished / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            recipe = {
                "model": {"name": str(checkpoint)},
                "data": {"source": "rows.jsonl", "sequence_length": 64, "eval_fraction": 0},
                "train": {"steps": 4, "batch_size": 2, "save_steps": 2, "precision": "amp-bf16", "device": "cpu"},
                "output": {"name": "r", "sample_tokens": 0},
            }  # fmt: skip
            (finished / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        if not (finished / kind).exists():
            words = [word for text in RUNS[kind] for word in ("--set", text)]
            assert tigon("train", "recipe.yaml", *words).code == 0
            (finished / "runs" / "r").rename(finished / kind)
        return finished / kind

    return make


Damage = Callable[[Path, random.Random], None]


def missing(file: Path, _: random.Random) -> None:
    file.unlink()


def empty(file: Path, _: random.Random) -> None:
    file.write_bytes(b"")


def truncated(file: Path, chance: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: chance.randrange(len(content)) if content else 0])


def flipped(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(8):
        if content:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(bytes(content))


def wrong_type(file: Path, chance: random.Random) -> None:
    """For an object in JSON: one value of another type, or a list in place of the object. For others: JSON."""
    try:
        declared = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        file.write_text("[5]", encoding="utf-8")
        return
    values = [None, -1, 10**30, 1.5, float("nan"), "text", [], {}, [5], {"a": 5}, True]
    if isinstance(declared, dict) and declared and chance.random() < 0.8:
        declared[chance.choice(sorted(declared))] = chance.choice(values)
    else:
        declared = chance.choice(values)
    file.write_text(json.dumps(declared), encoding="utf-8")


def pipe(file: Path, _: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path, _: random.Random) -> None:
    file.unlink()
    file.mkdir()


def dangling(file: Path, _: random.Random) -> None:
    file.unlink()
    file.symlink_to("/nowhere/at/all")


def device(file: Path, _: random.Random) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def huge(file: Path, _: random.Random) -> None:
    os.truncate(file, HUGE_BYTES)


def foreign(file: Path, chance: random.Random) -> None:
    """Another file of the same run."""
    others = sorted(path for path in file.parent.iterdir() if path.is_file() and path != file)
    if others:
        shutil.copyfile(chance.choice(others), file)


DAMAGES: tuple[Damage, ...] = (
    missing, empty, truncated, flipped, wrong_type, wrong_type, wrong_type, pipe, folder, dangling, device, huge,
    foreign,
)  # fmt: skip


def cases(run: Path, copies: Path, names: list[str]) -> Iterator[tuple[str, Path]]:
    """(what was damaged, a copy of the run with this damage)"""
    for i, name in enumerate(names):
        for j, damage in enumerate(DAMAGES):
            copy = copies / "copy" / run.name
            shutil.rmtree(copies / "copy", ignore_errors=True)
            shutil.copytree(run, copy)
            damage(copy / name, random.Random(1000 * i + j))
            yield f"{name} {damage.__name__} {j}", copy


def files_of(run: Path) -> list[str]:
    skipped = ("charts/", "tensorboard/", "report.")
    names = [path.relative_to(run).as_posix() for path in sorted(run.rglob("*")) if path.is_file()]
    return [name for name in names if not name.startswith(skipped)]


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_size for path in sorted(folder.rglob("*"))}


def one_line(outcome: Any) -> bool:
    return outcome.code == 2 and len(outcome.err.strip().splitlines()) == 1 and outcome.err.startswith("tigon: ")


def equal(one: Path, other: Path) -> bool:
    ours, theirs = (
        {n: t for f in sorted(p.glob("*.safetensors")) for n, t in load_file(f).items()} for p in (one, other)
    )
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def attempt(tigon: Any, *arguments: Any) -> tuple[Any, str]:
    """(the outcome, "") or (None, the traceback's last line)"""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True, file=sys.__stderr__)
    try:
        return tigon(*arguments), ""
    except BaseException as error:
        return None, f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("command", ["chat", "export", "merge"])
def test_chat_and_export_of_a_damaged_run(command, kind, make_run, tigon, tmp_path):
    run, faults, n = make_run(kind), [], 0
    sound = tmp_path / "sound"
    options = {"chat": (), "export": (), "merge": ("--merge",)}[command]
    if command == "merge" and kind == "whole":
        pytest.skip("there is nothing to merge")
    if command != "chat":
        assert tigon("export", run, sound, *options).code == 0
    used = [name for name in files_of(run) if name.startswith((USED[kind], "recipe.yaml"))]
    for what, copy in cases(run, tmp_path, used):
        n += 1
        before = contents(copy)
        target = tmp_path / "out"
        shutil.rmtree(target, ignore_errors=True)
        words = (
            ("chat", copy, "--prompt", "hi", "--max-tokens", 2)
            if command == "chat"
            else ("export", copy, target, *options)
        )
        outcome, fault = attempt(tigon, *words)
        if outcome is not None and outcome.code == 0:
            altered = "flipped" in what or "foreign" in what or "wrong_type" in what
            if command != "chat" and not altered and not equal(target, sound):
                fault = "other weights were written"
        elif outcome is not None and not one_line(outcome):
            fault = f"code {outcome.code}: {outcome.err[-300:]}"
        if contents(copy) != before:
            fault = fault or "the run was changed"
        if [path.name for path in tmp_path.iterdir() if path.name not in ("copy", "sound", "out")]:
            fault = fault or f"left {list(tmp_path.iterdir())}"
        if fault:
            faults.append(f"{what}: {fault}")
    print(n, "cases")
    assert not faults, f"{len(faults)} of {n}:\n" + "\n".join(faults)


def reseal(folder: Path) -> None:
    """A manifest that agrees with the files as they are now: what someone who means harm would write."""
    facts = checkpoint_files.metadata_of(folder)
    (folder / "manifest.json").unlink()
    checkpoint_files._write_manifest(folder, checkpoint_files.step_of(folder), facts)


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("resealed", [False, True], ids=["as it is", "with a manifest of the damage"])
def test_resume_of_a_damaged_run(kind, resealed, make_run, tigon, tmp_path):
    run, faults = make_run(kind), []
    result = "model" if kind == "whole" else "adapters"
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    for name in ("model", "adapters", "checkpoints/checkpoint-4", "charts", "tensorboard"):
        shutil.rmtree(cut / name, ignore_errors=True)
    (cut / "summary.json").unlink()
    names, first = files_of(cut), list(RUNS).index(kind)
    if resealed:
        names = [name for name in names if name.startswith("checkpoints/") and not name.endswith("manifest.json")]
    # A resume takes most of a second: each file in one way, or in two of a checkpoint's, and each way for some file.
    ways = range(first, len(DAMAGES), 7) if resealed else (first,)
    chosen = {i * len(DAMAGES) + (5 * i + way) % len(DAMAGES) for i in range(len(names)) for way in ways}
    words = [word for text in (*RUNS[kind], f"output.folder={tmp_path / 'copy'}", "output.name=cut")
             for word in ("--set", text)]  # fmt: skip
    for number, (what, copy) in enumerate(cases(cut, tmp_path, names)):
        if number not in chosen:
            continue
        if resealed:
            try:
                reseal(copy / "checkpoints" / "checkpoint-2")
            except (OSError, RunFolderError):  # a link or a folder
                continue
        outcome, fault = attempt(tigon, "train", "recipe.yaml", *words, "--resume")
        if outcome is not None and outcome.code == 0:
            if not resealed and not equal(copy / result, run / result):
                fault = "other weights were trained"
        elif outcome is not None and not one_line(outcome):
            fault = f"code {outcome.code}: {outcome.err[-300:]}"
        if fault:
            faults.append(f"{what}: {fault}")
    assert not faults, f"{len(faults)} of {len(chosen)}:\n" + "\n".join(faults)
