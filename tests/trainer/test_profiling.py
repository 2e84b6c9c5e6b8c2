"""`tigon profile` as it is typed: what it writes, whether its numbers are the run's, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trainer_helpers import TINY_MODEL, tree

from browser import look, needs_chromium
from tigon.planner.simulate.ledger import COMPONENTS
from tigon.profiler.render import result
from tigon.profiler.timeline.timeline import CATEGORIES, PHASES

pytest.importorskip("jinja2")
FILES = {"profile.json", "profile.html", "timeline.svg", "trace.json", "ops.json"}


def profiled(tigon, path, *flags):
    outcome = tigon("profile", path, "--out", "p", *flags)
    assert outcome.code == 0, outcome.err
    return outcome, result.read(path.parent / "p" / "profile.json")


def test_profile_files_describe_the_run(recipe, tigon, here):
    path = recipe(train={"steps": None, "epochs": 1, "save_steps": 1, "eval_steps": 1})
    outcome, profile = profiled(tigon, path, "--set", "model.kernels=tigon")
    assert tree(here / "p") == FILES and tree(here) == {"text.txt", "recipe.yaml", "p", *(f"p/{f}" for f in FILES),
                                                       *(p for p in tree(here) if p.startswith("cache"))}  # fmt: skip
    assert "peak " in outcome.out and "wrote    p/profile.html" in outcome.out
    bands = [(band.name, band.step) for band in profile.timeline.bands()]
    assert bands == [("load", 0), *((name, step) for step in (1, 2) for name in PHASES[1:])]
    from tigon.recipe.keys import ModelConfig
    from tigon.trainer import model

    shapes = model.parameter_shapes(model.load_config(ModelConfig(name="tigon-demo", config=TINY_MODEL)))
    n_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    last = list(map(dict, profile.timeline.live_bytes()))[-1]
    assert 0 <= last["weights"] - n_bytes < 512, "parameters, the rotary table, and the trainer's counters"
    assert 0 <= last["optimizer"] - 2 * n_bytes < 512
    assert last["gradients"] == last["activations"] == last["logits"] == 0
    trace = json.loads((here / "p" / "trace.json").read_text(encoding="utf-8"))
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    ops = json.loads((here / "p" / "ops.json").read_text(encoding="utf-8"))
    assert {"name", "time_ms", "share", "launches", "flops", "flops_per_s"} == set(ops[0])
    mm = next(row for row in ops if row["name"] == "aten::mm")
    assert mm["flops"] > 0 and mm["launches"] >= 3 * 7


def test_profile_has_the_peak_of_a_run(recipe, tigon, here):
    """Beside the trainer's own measurement of the second step, in which nothing is hooked or recorded but memory."""
    from tigon.objectives import recipe_checks
    from tigon.profiler.recording.peak import PeakMeter, training_state
    from tigon.trainer import engine, prepare
    from tigon.trainer import trainer as trainers

    path = recipe(model={"kernels": "tigon"})
    _, profile = profiled(tigon, path)
    prepared = prepare.prepare(
        recipe_checks.load(path, ["train.steps=2"], gpu_present=lambda: False), torch.device("cpu")
    )
    built, _ = engine.build(prepared, here / "base")
    trainer = trainers.make(prepared, built, replace(prepared.training_data, eval=None), here)
    from transformers import TrainerCallback

    meter, peaks = PeakMeter(prepared.device), []

    class Meter(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                meter.start(training_state(kwargs["model"], kwargs["optimizer"]))

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                peaks.append(meter.stop().peak_bytes)

    trainer.add_callback(Meter())
    trainer.train()
    assert profile.peak.phase.step == 2
    # what the meter does not know of: two fetched batches of three tensors, and the trainer's own few scalars
    batches = 2 * 3 * 4 * 32 * 8
    assert batches <= profile.peak.nbytes - peaks[0] <= batches + 512


def test_profile_of_a_causal_model_does_not_need_trl(recipe, tigon, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    for name in ("tigon.trainer.post_training.trl_trainer", "tigon.trainer.measuring.profiled_run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    profiled(tigon, recipe())


def test_profile_shows_checkpointing_and_accumulation(recipe, tigon):
    _, full = profiled(tigon, recipe(train={"checkpointing": "full", "gradient_accumulation": 2}), "--steps", "1")
    assert full.timeline.phases[-1].step == 1
    assert [band.name for band in full.timeline.bands()].count("forward") == 2, "one a micro-batch"
    assert "checkpoints" in full.timeline.categories
    assert any(phase.recomputed and phase.layer == 0 for phase in full.timeline.phases)


@needs_chromium
def test_two_profiles_are_shown_side_by_side(recipe, tigon, here, monkeypatch):
    """Each profile comes from a separate command, run in this process because starting one takes 10 s."""
    from tigon.trainer.measuring import profile

    def run_here(command, **_):
        assert command[1:3] == ["-m", "tigon"]
        done = tigon(*command[3:])
        return subprocess.CompletedProcess(command, done.code, done.out, done.err)

    monkeypatch.setattr(profile, "subprocess", SimpleNamespace(run=run_here))
    outcome = tigon("profile", recipe(), "--steps", "1", "--beside-set", "model.kernels=tigon", "--out", "p")
    assert outcome.code == 0, outcome.err
    assert tree(here / "p") == {"profile.html", "timeline.svg", "A", "B", *(f"{x}/{f}" for x in "AB" for f in FILES)}
    page = look(here / "p" / "profile.html", width=1200)
    assert page.console == () and 'data-drawn="2"' in page.dom
    assert "A: measured" in outcome.out and "B: measured" in outcome.out
    labels = [result.read(here / "p" / x / "profile.json").timeline.label for x in "AB"]
    assert "kernels none" in labels[0] and "kernels tigon" in labels[1]
    broken = tigon("profile", recipe(), "--beside-set", "data.sequence_length=4096", "--out", "q")
    assert "at most 128 tokens" in broken.error_line() and not (here / "q").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "0"], "--steps 0"),
        (["--set", "sharding.gpus=2"], "sharding.gpus is 2"),
        (["--set", "train.nothing=1"], "train.nothing"),
        (["--beside-set", "model.kernels=all"], "model.kernels"),
        (["--beside", "missing.yaml"], "missing.yaml"),
        (["--out", "recipe.yaml"], "recipe.yaml exists and is not an empty folder"),
        (["--out", "recipe.yaml/p"], "cannot be created"),
        (["--set", "data.sequence_length=4096"], "sequence_length"),
        (["--set", "data.source=none.txt"], "none.txt"),
    ],
)
def test_wrong_input_is_refused_in_one_line_and_leaves_nothing(recipe, tigon, here, flags, words):
    path = recipe()
    before = tree(here)
    assert words in tigon("profile", path, *flags).error_line()
    assert {name for name in tree(here) if not name.startswith("cache")} == before


def test_profile_overwrites_no_existing_folder(recipe, tigon, here):
    (here / "p").mkdir()
    (here / "p" / "mine.txt").write_text("kept", encoding="utf-8")
    assert "exists and is not an empty folder" in tigon("profile", recipe(), "--out", "p").error_line()
    assert tree(here / "p") == {"mine.txt"}
    from pathlib import Path

    from tigon.trainer.measuring.profile import _free

    assert _free(here, "p") == here / "p-2" and _free(Path("runs"), "x") == Path("runs/x")


def test_out_of_memory_keeps_the_recording(recipe, tigon, here, monkeypatch):
    """The recording up to the failure is the most useful profile."""
    from tigon.profiler.recording import watch

    real = watch.PhaseHooks.begin_optimizer

    def fails(self):
        real(self)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(watch.PhaseHooks, "begin_optimizer", fails)
    line = tigon("profile", recipe(), "--out", "p").error_line()
    assert "out of memory in step 1 with train.batch_size 4" in line and "p/profile.html" in line
    profile = result.read(here / "p" / "profile.json")
    assert [band.name for band in profile.timeline.bands()] == list(PHASES)
    assert profile.ops == () and "out of memory" in profile.details["stopped"]


def test_other_errors_leave_no_folder(recipe, tigon, here, monkeypatch):
    from tigon.profiler.recording import watch

    def fails(self):
        raise RuntimeError("a bug")

    monkeypatch.setattr(watch.PhaseHooks, "begin_optimizer", fails)
    (here / "mine").mkdir()
    for out in ("p", "mine", "a/b"):
        with pytest.raises(RuntimeError, match="a bug"):
            tigon("profile", recipe(), "--out", out)
    assert {name for name in tree(here) if not name.startswith("cache")} == {"text.txt", "recipe.yaml", "mine"}
    assert torch._C._len_torch_dispatch_stack() == 0


def test_profile_and_planner_share_component_names():
    assert CATEGORIES == COMPONENTS


@pytest.mark.gpu
def test_profile_of_a_gpu_is_complete(recipe, tigon, here):
    """Snapshot, prediction, kernels, and a peak that is the allocator's."""
    path = recipe(train={"device": "cuda", "precision": "amp-bf16"}, model={"kernels": "tigon"})
    _, profile = profiled(tigon, path)
    assert tree(here / "p") == {*FILES, "snapshot.pickle"}
    assert profile.predicted is not None and profile.predicted.phases["backward"] > 0
    assert any(row.launches and not row.name.startswith("aten::") for row in profile.ops), "Triton's kernels"
    own = profile.timeline.allocator_peak_bytes
    assert abs(own - profile.peak.nbytes) <= 0.05 * own
    assert {"weights", "gradients", "optimizer", "activations", "logits"} <= set(profile.timeline.categories)
    assert any(call.node for call in profile.timeline.call_table)
