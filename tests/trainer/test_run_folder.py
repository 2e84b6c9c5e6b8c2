"""Run folders that are someone else's, in use, read-only or hostile; runs resumed under other circumstances."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from trainer_helpers import records, train_losses, tree, weights

from tigon.errors import RunFolderError
from tigon.trainer.checkpoint import checkpoint
from tigon.trainer.folder import folder_lock, run_folder


def reseal(path: Path, **facts: object) -> None:
    """A manifest that agrees with the files as they are now: what someone who means harm would write."""
    said = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["facts"]
    (path / "manifest.json").unlink()
    checkpoint._write_manifest(path, checkpoint.step_of(path), {**said, **facts})


REFUSED = {
    "batch": (("train.batch_size=2",), r"the run had train\.batch_size: 4, the recipe now has 2"),
    "accumulation": (("train.gradient_accumulation=2",), r"train\.gradient_accumulation: 1, the recipe now has 2"),
    "seed": (("train.seed=2",), r"train\.seed: 1, the recipe now has 2"),
    "precision": (("train.precision=bf16",), r"train\.precision: auto, the recipe now has bf16"),
    "optimizer": (("train.optimizer=sgd",), r"train\.optimizer: adamw, the recipe now has sgd"),
    "two of them": (
        ("train.seed=2", "model.kernels=tigon"),
        r"model\.kernels: none, .* tigon; the run had train\.seed: 1, ",
    ),
}


def test_resume_that_changes_the_numbers_is_refused_and_names_the_difference(cut, tigon):
    path, run, _ = cut
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    for sets, message in REFUSED.values():
        words = [word for text in sets for word in ("--set", text)]
        line = tigon("train", path, "--resume", *words).error_line()
        assert re.search(message, line), line
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_resume_accepts_settings_that_change_no_number(cut, tigon):
    path, run, whole = cut
    sets = (
        "train.save_steps=1",
        "train.eval_steps=1",
        "train.log_steps=2",
        "train.workers=1",
        "train.keep_checkpoints=9",
    )
    outcome = tigon("train", path, "--resume", *(word for text in sets for word in ("--set", text)))
    assert outcome.code == 0, outcome.err
    assert weights(run, 4) == weights(whole, 4)
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}
    assert [r["step"] for r in records(run, "eval")] == [3, 4]
    assert [r["step"] for r in records(run, "train")] == [1, 2, 4]


def test_resume_in_another_environment_is_refused_or_warned_about(cut, tigon):
    path, run, whole = cut
    found = run / "checkpoints" / "checkpoint-2"
    reseal(found, precision="amp-bf16")
    line = tigon("train", path, "--resume").error_line()
    assert "written with train.precision amp-bf16, and this run has fp32" in line
    reseal(found, precision="fp32", versions={"torch": "2.6.0"}, device="cuda")
    outcome = tigon("train", path, "--resume")
    assert outcome.code == 0, outcome.err
    assert f"warning  torch 2.6.0 before, {torch.__version__} now: losses may differ in rounding" in outcome.out
    assert "warning  device cuda before, cpu now" in outcome.out
    assert train_losses(run) == train_losses(whole)


def test_resume_of_a_locked_run_folder_is_refused(cut, tigon, monkeypatch):
    path, run, _ = cut
    monkeypatch.setattr(folder_lock, "LOCK_PATIENCE", 0)
    before = tree(run)
    with run_folder.locked(run):
        line = tigon("train", path, "--resume").error_line()
    assert "another process is training into this run folder" in line and tree(run) == before
    assert tigon("train", path, "--resume").code == 0


def test_new_run_is_locked_against_a_resume(recipe, tigon, here, monkeypatch):
    from tigon.trainer import run

    seen = []

    def look(*arguments):
        with pytest.raises(RunFolderError, match="another process"), run_folder.locked(here / "runs" / "r"):
            pass
        seen.append(True)
        return original(*arguments)

    original = run._carry_out
    monkeypatch.setattr(folder_lock, "LOCK_PATIENCE", 0)
    monkeypatch.setattr(run, "_carry_out", look)
    assert tigon("train", recipe(train={"steps": 1})).code == 0 and seen


def test_link_in_a_run_folder_is_refused(cut, tigon, here):
    path, run, _ = cut
    outside = here / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("keep", encoding="utf-8")

    def linked(name: str) -> None:
        (run / name).rename(here / "moved")
        (run / name).symlink_to(outside if (here / "moved").is_dir() else outside / "secret.txt")
        line = tigon("train", path, "--resume").error_line()
        assert f"runs/r/{name}: a link to {outside}" in line
        (run / name).unlink()
        (here / "moved").rename(run / name)

    for name in ("metrics.jsonl", "checkpoints", "tensorboard", "checkpoints/checkpoint-2/rng_state.pth"):
        linked(name)
    assert tree(outside) == {"secret.txt"} and (outside / "secret.txt").read_text(encoding="utf-8") == "keep"
    assert tigon("train", path, "--resume").code == 0


PIPES = (
    "environment.json",
    "data.json",
    "metrics.jsonl",
    "tokenizer/tokenizer.json",
    "checkpoints/checkpoint-2/manifest.json",
)


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_a_run_folder_is_refused_at_once(cut, tigon, name):
    path, run, _ = cut
    (run / name).unlink()
    os.mkfifo(run / name)
    assert name in tigon("train", path, "--resume").error_line()


def test_a_pipe_in_a_checkpoint_is_a_problem_of_it(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    assert checkpoint.problem_of(tmp_path, 2) == "has an unreadable manifest.json"
    (tmp_path / "manifest.json").unlink()
    checkpoint._write_manifest(tmp_path, 2, {})
    os.mkfifo(tmp_path / "model.safetensors")
    assert checkpoint.problem_of(tmp_path, 2) == "holds model.safetensors, which is not a regular file"


WRONG_STATES = {
    "global_step": "x", "max_steps": None, "epoch": "x", "log_history": {}, "best_metric": "low",
    "best_global_step": 1.5, "best_model_checkpoint": 5, "stateful_callbacks": [], "total_flos": [],
    "num_input_tokens_seen": "x",
}  # fmt: skip


def test_a_trainer_state_of_wrong_types_is_one_line_though_the_manifest_agrees(cut, tigon):
    path, run, _ = cut
    folder = run / "checkpoints" / "checkpoint-2"
    state = json.loads((folder / "trainer_state.json").read_text())
    wrong = [{**state, name: value} for name, value in WRONG_STATES.items()]
    for content in (*wrong, {**state, "global_step": 3}, {**state, "log_history": [5]}, {}, [], "text", None):
        (folder / "trainer_state.json").write_text(json.dumps(content))
        reseal(folder)
        line = tigon("train", path, "--resume").error_line()
        assert "checkpoint-2 has a" in line and "trainer_state.json" in line


@pytest.mark.parametrize(
    "facts", [[["versions", {}]], {"versions": []}, {"processes": "x"}, {"samples_per_step": 0}, 5]
)
def test_metadata_of_wrong_types_is_one_line(cut, tigon, facts):
    path, run, _ = cut
    file = run / "checkpoints" / "checkpoint-2" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(
        json.dumps({**manifest, "facts": {**manifest["facts"], **facts} if isinstance(facts, dict) else facts})
    )
    tigon("train", path, "--resume").error_line()


def test_rotation_never_removes_the_target_of_a_link(tmp_path):
    """Links that appear while a run is on: neither a rotation nor a save goes through them."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep.txt").write_text("keep", encoding="utf-8")
    where = tmp_path / "checkpoints"
    for step in (1, 2):
        (where / f"checkpoint-{step}").parent.mkdir(exist_ok=True)
        (where / f"checkpoint-{step}").symlink_to(outside)
    written = checkpoint.scratch(where, 2) / "checkpoint-2"
    written.mkdir(parents=True)
    (written / "model.safetensors").write_bytes(b"x")
    (where / ".writing-1").symlink_to(outside)
    checkpoint.clear(where / "none")
    checkpoint.publish(where, 2, {}, keep=1)
    checkpoint.clear(where)
    assert tree(outside) == {"keep.txt"}
    assert checkpoint.newest(where).path.name == "checkpoint-2" and not (where / "checkpoint-1").exists()


def test_read_only_folder_is_refused_before_the_work(recipe, tigon, here, monkeypatch):
    (here / "runs").mkdir()
    # root, which tests may run as, may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "runs")
    assert "runs: not a folder that can be written to" in tigon("train", recipe()).error_line()
    assert tree(here / "runs") == set()


def test_missing_parent_folders_are_made_and_a_file_among_them_is_refused(recipe, tigon, here):
    assert tigon("train", recipe(output={"folder": "no/such/runs"}, train={"steps": 1})).code == 0
    assert (here / "no" / "such" / "runs" / "r" / "summary.json").exists()
    (here / "file").touch()
    assert "file: not a folder" in tigon("train", recipe(output={"folder": "file/runs"})).error_line()


def test_foreign_folder_is_refused_and_left_as_it_is(recipe, tigon, here):
    mine = here / "runs" / "r"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("mine", encoding="utf-8")
    for words in ((), ("--resume",)):
        assert "runs/r" in tigon("train", recipe(), *words).error_line()
    assert tree(mine) == {"thesis.txt"}


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "scheduler.pt"])
def test_pickle_with_a_matching_manifest_is_not_executed(name, cut, tigon, here):
    path, run, _ = cut
    found = run / "checkpoints" / "checkpoint-2"
    torch.save(Bomb(here / "exploded"), found / name)
    assert "damaged" in tigon("train", path, "--resume").error_line()
    reseal(found)
    line = tigon("train", path, "--resume").error_line()
    assert "checkpoint-2: cannot be loaded" in line and not (here / "exploded").exists()


def test_no_library_may_unpickle_once_a_run_has_begun(tmp_path, monkeypatch):
    """DeepSpeed asks for weights_only=False."""
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    torch.save(Bomb(tmp_path / "exploded"), tmp_path / "f.pt")
    checkpoint.no_pickles()
    with pytest.raises(Exception, match=r"[Ww]eights"):
        torch.load(tmp_path / "f.pt", weights_only=False)
    assert not (tmp_path / "exploded").exists()


HOSTILE = {
    "python object": ("train: !!python/object/apply:os.mkdir [exploded]\n", r"not valid YAML"),
    "billion laughs": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{','.join([f'*{m}'] * 9)}]\n" for m, n in zip("abcdefg", "bcdefgh", strict=True)),
        r"nested deeper than|more than 4096 values",
    ),
    "path in the name": ("output: {name: ../../x}\ntrain: {steps: 1}\n", r"output\.name is '\.\./\.\./x'"),
    "markup in the name": ("output: {name: '<script>'}\ntrain: {steps: 1}\n", r"output\.name is '<script>'"),
    "link in the name": ("output: {name: 'a/b'}\ntrain: {steps: 1}\n", r"must name one folder inside output\.folder"),
}


@pytest.mark.parametrize("text, message", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_recipe_is_refused_and_does_nothing(text, message, tigon, here):
    (here / "evil.yaml").write_text(text, encoding="utf-8")
    assert re.search(message, tigon("train", "evil.yaml").error_line())
    assert tree(here) == {"evil.yaml"}


def test_half_written_line_costs_no_other_record(tmp_path):
    """A full disk or a power cut leaves one; a resumed run writes after it."""
    run = run_folder.RunFolder(tmp_path)
    run.append({"event": "data", "step": 0})
    with run.metrics.open("a") as handle:
        handle.write('{"event": "tra')
    run.append({"event": "resume", "step": 1})
    assert run.records() == [{"event": "data", "step": 0}, {"event": "resume", "step": 1}]
