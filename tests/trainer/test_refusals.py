"""Bad input, typed as a user would: one line on stderr with the value, the limit and the next step; exit code 2; and
nothing written or lost."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from trainer_helpers import TINY_MODEL, tree

from forks import forks, in_forks, python
from tigon._install import install_command
from tigon.objectives import recipe_checks
from tigon.recipe.keys import ModelConfig
from tigon.trainer.folder import run_folder
from tigon.trainer.guarded import GuardedTrainer
from tigon.trainer.prepare import prepare as look_ahead
from tigon.trainer.run import train

SRC = Path(__file__).parents[2] / "src"

# what the recipe says differently, extra arguments, and what the line must say
CASES = {
    "adapters over the random weights of a published shape": (
        {"model": {"name": "smollm2-135m", "config": None}, "lora": {"rank": 4}},
        (),
        r"lora\.rank is 4, which freezes .* a preset's weights are random; set model\.name=HuggingFaceTB/SmolLM2-135M-"
        r"Instruct for its trained weights, or leave lora\.rank out",
    ),
    "adapters of DPO over random weights": (
        {"model": {"name": "smollm2-135m", "config": None}, "lora": {"rank": 4}, "train": {"objective": "dpo"}},
        (),
        r"set model\.name=HuggingFaceTB/\S+ for its trained weights, or post_training\.base_steps to train the preset",
    ),
    "heads over random weights": (
        {"model": {"name": "smollm2-135m", "config": None}, "heads": {"stage": 1, "count": 1}},
        (),
        r"heads\.stage is 1, which freezes .*, or heads\.base_steps to train the preset first",
    ),
    "unknown key": (
        {"train": {"batchsize": 2}},
        (),
        r"recipe\.yaml:\d+: train\.batchsize .*nearest key is train\.batch_size",
    ),
    "missing data file": ({"data": {"source": "none.txt"}}, (), r"none\.txt: no such file or folder"),
    "malformed row": ({"data": {"source": "bad.jsonl"}}, (), r"bad\.jsonl:2: not valid JSON"),
    "first document over the limit": (
        {"data": {"max_text_mib": 0.001}},
        (),
        r"text\.txt: the first document has (at least )?0\.0\d+ MiB of text, over data\.max_text_mib 0\.001",
    ),
    "empty evaluation data": (
        {"data": {"eval_source": "empty.txt"}},
        (),
        r"empty\.txt: no text in these files; .* in data\.eval_source",
    ),
    "evaluation data that is all dropped": (
        {"data": {"eval_source": "long.jsonl", "too_long": "drop"}},
        (),
        r"data\.eval_source: long\.jsonl: 20 documents give no sample to evaluate on: 20 are longer than "
        r"data\.sequence_length 32",
    ),
    "too little data": (
        {"data": {"source": "short.txt"}},
        (),
        r"\d+ samples of 32 tokens, fewer than train\.batch_size 4",
    ),
    "decay longer than the epochs": (
        {"train": {"steps": None, "epochs": 0.01, "schedule": "warmup_stable_decay", "decay_steps": 900}},
        (),
        r"train\.warmup_steps 0 and train\.decay_steps 900 exceed the run's (\d+) steps; lower train\.decay_steps to "
        r"at most \1$",
    ),
    "warm-up and decay longer than the epochs": (
        {
            "train": {
                "steps": None,
                "epochs": 0.01,
                "schedule": "warmup_stable_decay",
                "warmup_steps": 800,
                "decay_steps": 1,
            },
        },
        (),
        r"exceed the run's (\d+) steps; lower both, to at most \1 together",
    ),
    "accumulation beyond an epoch": (
        {"train": {"gradient_accumulation": 1000}},
        (),
        r"data\.source gives \d+ samples of 32 tokens, fewer than the 4000 of one step \(train\.batch_size 4 x "
        r"train\.gradient_accumulation 1000\); lower one of these factors",
    ),
    "sample beyond the positions": (
        {"output": {"sample_tokens": 120}},
        (),
        r"output\.sample_tokens is 120, after a prompt of 24 tokens, but tigon-demo takes at most 128 tokens; set "
        r"output\.sample_tokens to 104 or less",
    ),
    "a tokenizer without an end": ({"data": {"tokenizer": "/dev/zero"}}, (), r"/dev/zero: a tokenizer is a folder"),
    "sequence too long": (
        {"data": {"sequence_length": 129}},
        (),
        r"sequence_length is 129, but tigon-demo takes at most 128",
    ),
    "vocabulary too small": (
        {"model": {"config": {**TINY_MODEL, "vocab_size": 280}}},
        (),
        r"the tokenizer has \d+ tokens, but tigon-demo has a vocabulary of 280; set data\.vocab_size",
    ),
    "flash attention on the CPU": (
        {"model": {"attention": "flash_attention_2"}},
        (),
        r"needs a GPU and its package; use sdpa",
    ),
    "disk too small": (
        {"model": {"config": {**TINY_MODEL, "vocab_size": 2_000_000_000_000}}, "train": {"save_steps": 2}},
        (),
        r"runs: [\d.]+ GiB free, but the run needs [\d.,]+ GiB",
    ),
    "memory too small": (
        {"model": {"config": {**TINY_MODEL, "vocab_size": 2_000_000_000_000}}},
        (),
        r"weights, gradients and adamw states take \d+ GiB, but cpu has \d+ GiB; choose a smaller model",
    ),
    "half a character": ({"data": {"source": "half.jsonl"}}, (), r"half\.jsonl:1: text has half a surrogate pair at 3"),
    "comparison with a package that is not here": (
        {"comparison": {"steps": 2, "kernels": ["liger"]}},
        (),
        r"comparison\.kernels is liger, (but liger-kernel is not installed|whose kernels need a GPU)",
    ),
    "unknown model": (
        {"model": {"name": "lama-3.2-1b"}},
        (),
        r"'lama-3\.2-1b' is neither .* nearest preset is llama-3\.2-1b",
    ),
    "model of a run that was not made": (
        {"model": {"name": "runs/one/model"}},
        (),
        r"the run 'one' writes that folder when it ends",
    ),
    "folder that is no model": ({"model": {"name": "folder"}}, (), r"folder has no config\.json"),
    "pickled weights only": ({"model": {"name": "pickled"}}, (), r"pickled has no \.safetensors weights"),
    "unknown shape key": (
        {"model": {"config": {"num_layers": 2}}},
        (),
        r"model\.config\.num_layers is not a key of LlamaConfig; .* num_hidden_layers",
    ),
    "impossible shape": ({"model": {"config": {**TINY_MODEL, "num_attention_heads": 3}}}, (), r"model"),
    "heads that do not divide": (
        {},
        ("--set", "model.config.num_key_value_heads=3"),
        r"model\.config: tigon-demo cannot be trained with num_key_value_heads: 3: .*; change it",
    ),
    "unknown activation": ({}, ("--set", "model.config.hidden_act=foo"), r"with hidden_act: foo: KeyError: 'foo'"),
    "padding beyond the vocabulary": (
        {},
        ("--set", "model.config.pad_token_id=512"),
        r"with vocab_size: 512, pad_token_id: 512: .*within num_embeddings",
    ),
    "no layers": ({}, ("--set", "model.config.num_hidden_layers=0"), r"num_hidden_layers: 0: .* at least one layer"),
    "nothing in a layer": ({}, ("--set", "model.config.intermediate_size=0"), r"gate_proj\.weight would be empty"),
    "key that is no shape": ({}, ("--set", "model.config.return_dict=false"), r"return_dict does not change"),
    "no tokenizer there": ({"data": {"tokenizer": "folder"}}, (), r"folder: no tokenizer could be loaded"),
    "nothing to resume": ({}, ("--resume",), r"runs/r: no run to resume there"),
    "folder under a file": (
        {"output": {"folder": "text.txt/runs"}},
        (),
        r"text\.txt: not a folder that can be written to",
    ),
}


def prepare(here):
    (here / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    (here / "empty.txt").write_text("\n", encoding="utf-8")
    (here / "short.txt").write_text("a short text\nin two lines\n" * 3, encoding="utf-8")
    rows = [{"prompt": "p", "completion": "word " * 300}] * 20
    (here / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (here / "half.jsonl").write_text('{"text": "ok \\ud83d lonely"}\n', encoding="utf-8")
    (here / "folder").mkdir()
    (here / "pickled").mkdir()
    (here / "pickled" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (here / "pickled" / "pytorch_model.bin").write_bytes(b"x")


@pytest.mark.parametrize("sections, arguments, message", CASES.values(), ids=CASES.keys())
def test_bad_input_is_one_line_and_writes_nothing(recipe, tigon, here, sections, arguments, message):
    path = recipe(**sections)
    prepare(here)
    before = tree(here)
    line = tigon("train", path, *arguments).error_line()
    assert re.search(message, line), line
    assert {name for name in tree(here) - before if not name.startswith("cache")} == set()


def test_dynamic_rope_is_accepted_as_a_valid_shape():
    """A shape is tried without memory for its numbers, which these look at before the layers are reached."""
    pytest.importorskip("transformers")
    from tigon.trainer.model import load_config

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = load_config(ModelConfig(name="tigon-demo", config={**TINY_MODEL, "rope_parameters": rope}))
    assert config.rope_parameters["rope_type"] == "dynamic"


def test_a_missing_recipe_is_one_line(tigon, here):
    assert "none.yaml: no such recipe file" in tigon("train", "none.yaml").error_line()


@pytest.fixture
def finished(recipe, tigon, here):
    """(recipe, run folder) of a finished run with two checkpoints."""
    path = recipe(train={"save_steps": 2})
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    return path, here / "runs" / "r"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_existing_run_folder_is_kept_and_resume_offered(finished, tigon):
    path, run = finished
    line = tigon("train", path).error_line()
    assert "runs/r: this complete run folder exists; choose another with --set output.name" in line
    (run / "summary.json").unlink()
    before = contents(run)
    line = tigon("train", path).error_line()
    assert f"tigon train {path} --resume" in line and "runs/r: this run folder exists" in line
    assert contents(run) == before


def test_resume_refuses_what_it_cannot_continue_and_changes_nothing(finished, tigon, here):
    path, run = finished
    assert "this run is complete" in tigon("train", path, "--resume").error_line()
    (run / "summary.json").unlink()
    before = contents(run)
    line = tigon("train", path, "--resume", "--set", "train.batch_size=2").error_line()
    assert "the run had train.batch_size: 4, the recipe now has 2" in line
    (here / "text.txt").write_text((here / "text.txt").read_text(encoding="utf-8") + "more\n" * 50, encoding="utf-8")
    assert "the data changed since the run began" in tigon("train", path, "--resume").error_line()
    assert contents(run) == before
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "optimizer.pt").unlink()
    line = tigon("train", path, "--resume").error_line()
    assert (
        "no complete checkpoint" in line and "checkpoint-4 lacks optimizer.pt; checkpoint-2 lacks optimizer.pt" in line
    )
    shutil.rmtree(run)
    run.mkdir()
    (run / "mine.txt").write_text("keep", encoding="utf-8")
    assert "not a run folder" in tigon("train", path, "--resume").error_line()
    assert tree(run) == {"mine.txt"}


@forks
def test_run_killed_before_its_first_checkpoint_is_started_again_as_the_message_says(recipe, tigon, here):
    """--resume has no checkpoint, and a new run finds the folder: both messages name a way on that works."""
    path = recipe(train={"steps": 2}, output={"sample_tokens": 0})

    def killed_in_the_first_step(_: int) -> None:
        GuardedTrainer.training_step = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        train(path)

    (status,) = in_forks(killed_in_the_first_step)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (here / "runs" / "r" / "recipe.yaml").exists()
    line = tigon("train", path, "--resume").error_line()
    assert "no complete checkpoint to resume from: there is none; start without --resume and with another" in line
    line = tigon("train", path).error_line()
    assert "ended without a complete checkpoint" in line and "--resume" not in line
    assert tigon("train", path, "--set", "output.name=other").code == 0
    (remove,) = re.findall("`(rm -r [^`]+)`", line)
    subprocess.run(shlex.split(remove), check=True)
    assert tigon("train", path).code == 0


def test_folder_of_a_run_that_still_trains_or_has_weights_is_not_offered_for_removal(recipe, tigon, here):
    path = recipe(train={"steps": 1}, output={"sample_tokens": 0})
    assert tigon("train", path).code == 0
    (here / "runs" / "r" / "summary.json").unlink()
    with run_folder.locked(here / "runs" / "r"):
        line = tigon("train", path).error_line()
    (here / "runs" / "r" / "adapters").mkdir()
    (here / "runs" / "r" / "adapters" / "adapter_model.safetensors").touch()
    assert "holds trained weights in adapters/" in (kept := tigon("train", path).error_line()) and "rm -r" not in kept
    assert "another process is training into this run folder" in line and "rm -r" not in line


def test_a_numbered_folder_is_taken_when_the_recipe_asks_for_it(recipe, tigon, here):
    path = recipe(output={"if_exists": "number", "sample_tokens": 0}, train={"steps": 1})
    assert [tigon("train", path).code for _ in range(3)] == [0, 0, 0]
    assert {folder.name for folder in (here / "runs").iterdir()} == {"r", "r-2", "r-3"}


def test_a_disk_that_is_full_is_said_before_the_run(recipe, tigon, here, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40 - 2**20, 2**20))
    assert re.search(r"1\.0 MiB free, but the run needs [1-9][\d.]* MiB", tigon("train", recipe()).error_line())
    assert not (here / "runs").exists()


@forks
def test_disk_too_small_for_nvme_states_is_refused_before_the_run(recipe, here, monkeypatch):
    """Without this check DeepSpeed raises an AssertionError, or nothing refuses the run.

    The run first removes the files of a killed run, so their space counts as free.
    """
    pytest.importorskip("deepspeed")
    path = recipe(sharding={"zero": 3, "offload": "nvme", "nvme_folder": "swap"})
    left = here / "swap" / "zero_stage_3" / "optimizer" / "rank0" / "0.swp"
    left.parent.mkdir(parents=True)
    left.touch()
    os.truncate(left, 2**30)
    usage = shutil.disk_usage
    monkeypatch.setattr(
        "tigon.trainer.guards.preflight.shutil.disk_usage",
        lambda folder: usage(folder)._replace(free=0 if Path(folder).name == "swap" else 2**40),
    )
    loaded, said = recipe_checks.load(path, gpu_present=lambda: False), here / "said"
    assert in_forks(lambda _: look_ahead(loaded, torch.device("cpu")), said=said) == [0], said.read_text()
    left.parent.rename(left.parent.with_name("rank1"))  # this run has no rank 1, so it does not remove the file
    done = python("train", str(path), module="tigon", cwd=here)
    assert done.returncode == 2 and "set another sharding.nvme_folder" in done.stderr
    assert "swap: 0 free, but the run needs" in done.stderr and "Traceback" not in done.stderr
    assert not (here / "runs").exists()


def test_a_disk_that_fills_up_during_the_run_names_the_way_back(recipe, tigon, here, monkeypatch):
    import errno

    from tigon.trainer.guarded import GuardedTrainer

    original = GuardedTrainer._save_checkpoint

    def full(self, model, trial):
        if self.state.global_step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, model, trial)

    path = recipe(train={"save_steps": 2})
    monkeypatch.setattr(GuardedTrainer, "_save_checkpoint", full)
    line = tigon("train", path).error_line()
    assert "runs/r: the disk is full" in line and "--resume" in line
    monkeypatch.undo()


@forks
def test_a_missing_extra_names_the_command_that_installs_it(recipe, here):
    path = recipe()
    code = (
        "import sys; libraries = {{name for name in sys.modules if name.partition('.')[0] == {0!r}}}\n"
        "sys.modules.update(dict.fromkeys(libraries | {{{0!r}}})); sys.argv = ['tigon', 'train', {1!r}]\n"
        "from tigon.cli.app import main; main()"
    )
    for name, wanted in (("typer", "needs typer"), ("transformers", "needs transformers")):
        done = python(code=code.format(name, str(path)), source=SRC)
        assert done.returncode == 2 and wanted in done.stderr and install_command("train") in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert not (here / "runs").exists()


def test_the_hub_is_left_alone_unless_a_hub_id_is_asked_for(recipe, tigon, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    tigon("train", recipe(), "--set", "data.source=none.txt")
    from tigon.recipe.keys import ModelConfig, Recipe
    from tigon.trainer.prepare import quiet_libraries

    quiet_libraries(Recipe())
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1", "TRL would send the settings of a run"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("tigon.models.loading.hub.hub_is_reachable", lambda: True)
    quiet_libraries(Recipe(model=ModelConfig(name="owner/model")))
    assert "HF_HUB_OFFLINE" not in os.environ
