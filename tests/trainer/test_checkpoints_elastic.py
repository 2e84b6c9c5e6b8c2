"""Checkpoints for another number of processes or another engine, and checkpoints that are written in the background."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from test_technique_runs import fsdp_rank
from trainer_helpers import SMALL, records, small_trainer

from forks import forks, in_forks
from tigon.data.packing import BlankPadded, SampleDataset
from tigon.errors import RunFolderError
from tigon.medusa import load_heads
from tigon.recipe.keys import Recipe, ShardingConfig, TrainConfig
from tigon.trainer.checkpoint import checkpoint, distributed_checkpoint, resume_rules
from tigon.trainer.guarded import GuardedTrainer
from tigon.trainer.run import train

# --- the samples of a step ---------------------------------------------------------------------------------------


def steps_of(processes: int, batch: int, accumulation: int, n_samples: int) -> list[list[int]]:
    """The samples of each optimizer step of an epoch, over all processes, without blank ones."""
    from accelerate.data_loader import BatchSamplerShard

    order = torch.randperm(n_samples, generator=torch.Generator().manual_seed(0)).tolist()
    sampler = BlankPadded(order, batch * processes)
    shards = [
        BatchSamplerShard(torch.utils.data.BatchSampler(sampler, batch, drop_last=False), processes, rank)
        for rank in range(processes)
    ]
    micro_steps = list(zip(*(list(shard) for shard in shards), strict=True))
    taken = [
        [index for micro in micro_steps[i : i + accumulation] for part in micro for index in part if index >= 0]
        for i in range(0, len(micro_steps), accumulation)
    ]
    return [sorted(step) for step in taken]


@pytest.mark.parametrize("n_samples", [23, 24, 25, 36])
def test_each_step_of_an_epoch_has_the_same_samples_on_any_number_of_processes(n_samples):
    alone = steps_of(1, 12, 1, n_samples)
    assert sorted(index for step in alone for index in step) == list(range(n_samples))
    for processes, batch, accumulation in ((1, 3, 4), (2, 6, 1), (2, 3, 2), (3, 2, 2), (4, 3, 1), (6, 1, 2)):
        assert steps_of(processes, batch, accumulation, n_samples) == alone, (processes, batch, accumulation)


def test_blank_sample_has_tokens_but_no_labels():
    from trainer_helpers import rows

    data = rows()
    blank = data[next(iter(BlankPadded([], 1)), -1)]
    assert isinstance(data, SampleDataset) and torch.equal(blank.tokens_T, data[0].tokens_T)
    assert (blank.labels_T == -100).all() and (data[0].labels_T != -100).any()


def run_of(batch: int = 4, accumulation: int = 1, gpus: int = 1, **sharding: object) -> Recipe:
    own = ShardingConfig(gpus=gpus, **sharding)  # type: ignore[arg-type]
    return Recipe(train=TrainConfig(steps=1, batch_size=batch, gradient_accumulation=accumulation), sharding=own)


@pytest.mark.parametrize(
    ("before", "now", "batch", "accumulation"),
    [
        (run_of(4, 1, 2), run_of(4, 1, 1), 4, 2),
        (run_of(4, 2, 1), run_of(4, 2, 2), 4, 1),
        (run_of(4, 1, 1), run_of(4, 1, 2), 2, 1),
        (run_of(4, 3, 2), run_of(4, 3, 8), 3, 1),
        (run_of(5, 1, 2), run_of(5, 1, 1, fsdp=True), 5, 2),
        (run_of(4, 1, 4, sequence=2), run_of(4, 1, 8, sequence=2), 2, 1),
        (run_of(4, 1, 2, sequence=2), run_of(4, 1, 4), 1, 1),
    ],
)
def test_samples_of_a_step_are_divided_for_the_processes(tmp_path, before, now, batch, accumulation):
    overrides = resume_rules.batch_overrides(tmp_path, before, now)
    assert overrides == (f"train.batch_size={batch}", f"train.gradient_accumulation={accumulation}")
    train = replace(now.train, batch_size=batch, gradient_accumulation=accumulation)
    assert not resume_rules.batch_overrides(tmp_path, before, replace(now, train=train)), (
        "a launched process divides again"
    )


def test_step_that_processes_cannot_share_is_refused_with_the_numbers_that_can(tmp_path):
    with pytest.raises(RunFolderError, match=r"the run has 6 samples per step, which 4 processes .* 1, 2, 3, 6$"):
        resume_rules.batch_overrides(tmp_path, run_of(3, 1, 2), run_of(3, 1, 4))
    with pytest.raises(RunFolderError, match=r"the run has 4 samples per step, which 6 processes .* one of 4, 8$"):
        tensor = {"fsdp": True, "tensor": 2}  # FSDP2 needs two groups of two processes
        resume_rules.batch_overrides(tmp_path, run_of(1, 1, 8, **tensor), run_of(1, 1, 6, **tensor))
    with pytest.raises(RunFolderError, match=r"the run has 1 samples per step, .*; resume with sharding.tensor: 1$"):
        resume_rules.batch_overrides(tmp_path, run_of(1, 1, 1), run_of(1, 1, 4, **tensor))
    with pytest.raises(RunFolderError, match=r"the run has 6 samples per step, which 8 processes .* 2, 4, 6, 12$"):
        resume_rules.batch_overrides(tmp_path, run_of(3, 1, 4, sequence=2), run_of(3, 1, 8, sequence=2))


def test_deepspeed_reads_its_own_checkpoints_only_and_no_other_engine_reads_them(tmp_path):
    zero = run_of(4, 1, 2, zero=2)
    assert resume_rules.engine_problem(tmp_path, zero, zero) is None
    for before, now in (
        (zero, run_of(4, 2, 1, zero=2)), (run_of(4, 1, 2), zero), (run_of(4, 1, 2, fsdp=True), zero),
        (zero, run_of(4, 1, 2, zero=3)), (zero, run_of(4, 1, 2)), (zero, run_of(4, 1, 2, fsdp=True)),
    ):  # fmt: skip
        problem = resume_rules.engine_problem(tmp_path, before, now)
        assert problem is not None and "DeepSpeed reads only its own checkpoints" in problem
        assert "`tigon export " in problem


def test_states_of_a_compiled_optimizer_are_not_moved_between_engines(tmp_path):
    before, now = (run_of(4, 1, 2), run_of(4, 1, 2, fsdp=True))
    before, now = (replace(each, train=replace(each.train, optimizer="adamw-torchao-8bit")) for each in (before, now))
    assert "adamw-torchao-8bit" in str(resume_rules.engine_problem(tmp_path, before, now))


# --- counters and random states ------------------------------------------------------------------------------------


def test_counters_of_two_processes_give_one_process_the_same_record(tmp_path):
    def counted(loss_sum: float, losses: list[float]) -> dict[str, object]:
        gate = {"skipped": 1, "in_a_row": 0, "taken": 5, "loss_sum": loss_sum, "n_summed": 2}
        return {"gate": gate, "reward_stop": [0.5, 1, 0], "heads": {"losses": losses, "hits": [[1.0], [2.0]]}}

    both = [counted(3.0, [1.0, 2.0]), counted(5.0, [3.0, 4.0])]
    first, second = (resume_rules.redistribute_counters(both, rank) for rank in range(2))
    assert first["gate"]["loss_sum"] == second["gate"]["loss_sum"] == 4.0 and first["gate"]["skipped"] == 1
    assert first["reward_stop"] == second["reward_stop"] == [0.5, 1, 0]
    assert first["heads"] == {"losses": [4.0, 6.0], "hits": [[2.0], [4.0]]}
    assert second["heads"] == {"losses": [0.0, 0.0], "hits": [[0.0], [0.0]]}


# --- runs ----------------------------------------------------------------------------------------------------------

STEPS, SAVED, SAMPLES = 6, 3, 12  # an epoch ends after step 5, with 2 of its 62 samples left over for a sixth step
ENGINES: dict[str, tuple[int, bool, tuple[str, ...]]] = {
    "one": (1, False, ()),
    "ddp in the background": (2, False, ("train.save_async=true",)),
    "fsdp2": (2, True, ("output.save_model=true",)),
}
ADAPTERS, HEADS = ("lora.rank=4", "output.save_model=true"), ("heads.stage=1", "heads.count=2", "train.log_steps=2")
ENGINES |= {"fsdp2, adapters": (2, True, ADAPTERS), "one, adapters": (1, False, ADAPTERS)}
ENGINES |= {"ddp, heads": (2, False, HEADS), "one, heads": (1, False, HEADS), "fsdp2, heads": (2, True, HEADS)}
NUMBERS = ("loss", "grad_norm", "learning_rate", "head1_loss", "head2_loss")


def in_processes(here: Path, path: Path, engine: str, *sets: str, resume: bool = False) -> None:
    processes, sharded, own = ENGINES[engine]
    words = [f"sharding.gpus={processes}", *own, *sets]
    said = here / "stderr.txt"
    rank_of: Callable[..., object] = fsdp_rank if sharded else train
    statuses = in_forks(lambda rank: rank_of(path, words, resume=resume), processes, said=said)
    assert statuses == [0] * processes, said.read_text()[-3000:]


def numbers(run: Path) -> list[dict[str, float]]:
    return [{name: each[name] for name in NUMBERS if name in each} for each in records(run, "train")]


@pytest.fixture
def uninterrupted(recipe, here, kept) -> Callable[[str], tuple[Path, Path]]:
    """uninterrupted(engine): the recipe and the finished run of this engine."""
    settings = {"steps": STEPS, "save_steps": SAVED, "keep_checkpoints": 9}

    def of(engine: str) -> tuple[Path, Path]:
        path = recipe(
            model={"kernels": "tigon"}, train={**settings, "batch_size": SAMPLES // ENGINES[engine][0]},
            output={"name": "r"},
        )  # fmt: skip
        kept(f"elastic {engine}", here, lambda: in_processes(here, path, engine))
        return path, here / "runs" / "r"

    return of


@forks
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("ddp in the background", "one"),
        ("one", "fsdp2"),
        ("fsdp2", "one"),
        ("ddp in the background", "fsdp2"),
        ("fsdp2, adapters", "one, adapters"),
        ("ddp, heads", "one, heads"),
    ],
)
def test_run_continues_exactly_on_other_processes_or_with_another_engine(uninterrupted, here, before, now):
    """The steps after the checkpoint cross the end of an epoch whose samples the processes cannot share equally.

    A record of the heads lies across the checkpoint.
    """
    if "adapters" in before:
        pytest.importorskip("peft")
    path, run = uninterrupted(before)
    whole = numbers(run)
    shutil.rmtree(run / "checkpoints" / f"checkpoint-{STEPS}")
    (run / "summary.json").unlink()
    in_processes(here, path, now, resume=True)
    resumed_numbers = numbers(run)
    assert len(resumed_numbers) == len(whole)
    for step, (expected, number) in enumerate(zip(whole, resumed_numbers, strict=True)):
        assert number == pytest.approx(expected, rel=2e-5), step  # rounding; without the moments it is over 1e-3
    (resumed,) = records(run, "resume")
    n_before, n_now = ENGINES[before][0], ENGINES[now][0]
    assert any(f"processes: {n_before} before, {n_now} now" in text for text in resumed["warnings"]) == (
        n_before != n_now
    )


@forks
def test_heads_of_a_sharded_model_are_saved_whole(recipe, here, monkeypatch):
    """As with an optimizer whose states PyTorch's distributed format does not hold."""
    monkeypatch.setattr(resume_rules, "writes_distributed", lambda recipe: False)
    train = {"steps": 2, "save_steps": 2, "batch_size": 2}
    in_processes(here, recipe(train=train), "fsdp2, heads", "output.save_model=true")
    run = here / "runs" / "r"
    saved = load_file(run / "checkpoints" / "checkpoint-2" / "model.safetensors")
    trained = load_heads(run / "heads")[1]
    assert saved.keys() == {f"draft_heads.{name}" for name in trained}
    assert all(torch.equal(saved[f"draft_heads.{name}"], tensor) for name, tensor in trained.items())


@forks
def test_export_of_a_sharded_checkpoint_is_the_trained_model(uninterrupted, tigon, here):
    """In one process without a GPU; the folder is that of the run's own model."""
    _, run = uninterrupted("fsdp2")
    last = run / "checkpoints" / f"checkpoint-{STEPS}"
    assert sorted(path.name for path in (last / "distributed").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    ]
    assert not list(last.glob("*.safetensors")), "the whole weights were gathered"
    done = tigon("export", last, here / "out")
    assert done.code == 0, done.err
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (here / "out", run / "model"))
    assert theirs.keys() - ours.keys() <= {"lm_head.weight"}, "only the tied weight may be left out"
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (here / "out" / "tokenizer.json").is_file() and not list(here.glob(".whole-*"))
    data = bytearray((last / "distributed" / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (last / "distributed" / "__1_0.distcp").write_bytes(data)
    assert "is damaged" in tigon("export", last, here / "again").error_line() and not (here / "again").exists()


def test_adapters_of_a_sharded_checkpoint_are_exported_in_pefts_layout(recipe, tigon, here):
    pytest.importorskip("peft")
    path = recipe(
        train={"save_steps": 4, "save_async": True}, lora={"rank": 4}, output={"save_model": True, "name": "r"}
    )
    assert tigon("train", path).code == 0
    last, run = here / "runs" / "r" / "checkpoints" / "checkpoint-4", here / "runs" / "r"
    done = tigon("export", last, here / "out")
    assert done.code == 0, done.err
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (here / "out", run / "adapters"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for source, out in ((last, "merged"), (run, "expected")):
        assert tigon("export", source, here / out, "--merge", "--dtype", "fp32").code == 0
    ours, theirs = (load_file(here / name / "model.safetensors") for name in ("merged", "expected"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# --- saves in the background -----------------------------------------------------------------------------------------


def background_trainer(folder: Path, steps: int = 4):
    """A trainer that saves every second step in the background."""
    settings = TrainConfig(steps=steps, batch_size=8, save_steps=2, keep_checkpoints=9, log_steps=1, learning_rate=0.01)
    trainer = small_trainer(folder, Recipe(model=SMALL, train=settings))
    trainer.safeguards = replace(trainer.safeguards, distributed=True, in_background=True)
    return trainer


@forks
def test_kill_while_a_checkpoint_is_written_leaves_the_last_complete_one(tmp_path):
    def act(_: int) -> None:
        trainer = background_trainer(tmp_path)
        original = checkpoint.publish

        def publish(folder, step, *arguments, **options):
            if step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            original(folder, step, *arguments, **options)

        with mock.patch.object(checkpoint, "publish", publish):
            trainer.train()

    (status,) = in_forks(act, fresh=False)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [".writing-4", "checkpoint-2"]
    assert (tmp_path / "checkpoints" / ".writing-4" / "checkpoint-4" / "distributed" / ".metadata").is_file()
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert found.path.name == "checkpoint-2" and not found.passed_over
    resumed, whole = background_trainer(tmp_path), background_trainer(tmp_path / "whole")
    resumed.train(str(found.path))
    whole.train()
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_checkpoint_holds_the_weights_of_its_step_though_training_goes_on(tmp_path):
    """The files are written only after the next step has changed the weights."""
    trainer, saved, trained_on = background_trainer(tmp_path, steps=3), {}, threading.Event()
    write, step = distributed_checkpoint.FileSystemWriter.write_data, trainer.training_step

    def write_data(*arguments):
        assert trained_on.wait(60)
        return write(*arguments)

    def training_step(*arguments, **options):
        if trainer.state.global_step == 2:
            saved.update({name: weight.clone() for name, weight in trainer.model.state_dict().items()})
        return step(*arguments, **options)

    def on_third_step(*arguments, **options):
        changed = trainer.model.state_dict()
        assert trainer.state.global_step < 3 or any(not torch.equal(saved[name], changed[name]) for name in saved)
        if trainer.state.global_step == 3:
            assert not (tmp_path / "checkpoints" / "checkpoint-2").exists(), "training waited for the save"
            trained_on.set()
        return mock.DEFAULT

    trainer.training_step = training_step
    boundaries = mock.Mock(wraps=trainer.keep_schedule, side_effect=on_third_step)
    trainer.keep_schedule = boundaries
    with mock.patch.object(distributed_checkpoint.FileSystemWriter, "write_data", write_data):
        trainer.train()
    whole = distributed_checkpoint.whole_weights(tmp_path / "checkpoints" / "checkpoint-2")
    assert whole and all(torch.equal(whole[name], saved[name]) for name in whole)


def test_full_disk_in_the_background_ends_the_run_at_its_next_save(tmp_path):
    trainer = background_trainer(tmp_path, steps=6)

    def write_data(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        mock.patch.object(distributed_checkpoint.FileSystemWriter, "write_data", write_data),
        pytest.raises(OSError, match=os.strerror(errno.ENOSPC)),
    ):
        trainer.train()
    assert trainer.state.global_step == 4 and not list((tmp_path / "checkpoints").iterdir())


@forks
@pytest.mark.parametrize("fault", ["full disk", "killed"])
def test_fault_of_one_process_in_the_background_ends_both_and_keeps_the_last_checkpoint(recipe, here, fault):
    path = recipe(train={"save_steps": 2, "save_async": True, "steps": 50, "batch_size": 2})
    write, n_saves = distributed_checkpoint.FileSystemWriter.write_data, 0

    def act(rank: int) -> None:
        def write_data(*arguments: object) -> object:
            nonlocal n_saves
            n_saves += 1
            if rank == 1 and n_saves == 2:
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*arguments)

        distributed_checkpoint.FileSystemWriter.write_data = write_data
        train(path, ["sharding.gpus=2"])

    said = here / "said"
    survivor, faulty = in_forks(act, 2, said=said)
    assert os.waitstatus_to_exitcode(survivor) == 1 and faulty != 0
    message = "the disk is full; free some space" if fault == "full disk" else "process 0 of 2 has lost another process"
    assert message in said.read_text(), said.read_text()[-3000:]
    checkpoints = here / "runs" / "r" / "checkpoints"
    assert [path.name for path in checkpoints.glob("checkpoint-*")] == ["checkpoint-2"]
    assert checkpoint.newest(checkpoints).path.name == "checkpoint-2"


@forks
def test_stopped_run_waits_for_its_save_in_the_background(recipe, here):
    """The message says that the checkpoint is complete."""
    path = recipe(train={"save_steps": 100, "save_async": True, "steps": 50})

    def act(_: int) -> None:
        write = distributed_checkpoint.FileSystemWriter.write_data

        def slow(*arguments: object) -> object:
            time.sleep(1)
            return write(*arguments)

        def training_step(self: GuardedTrainer, *arguments: object, **options: object) -> object:
            if self.state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, *arguments, **options)

        original, GuardedTrainer.training_step = GuardedTrainer.training_step, training_step
        distributed_checkpoint.FileSystemWriter.write_data = slow
        train(path)

    said = here / "said"
    (status,) = in_forks(act, said=said)
    assert os.waitstatus_to_exitcode(status) == 143, said.read_text()[-3000:]
    assert "after step 3; checkpoint-3 is complete" in said.read_text()
    found = checkpoint.newest(here / "runs" / "r" / "checkpoints")
    assert found.path.name == "checkpoint-3" and distributed_checkpoint.is_distributed(found.path)


def test_metadata_that_names_code_is_refused_and_not_run(tmp_path):
    trainer = background_trainer(tmp_path, steps=2)
    trainer.train()
    found = checkpoint.newest(tmp_path / "checkpoints").path
    assert distributed_checkpoint.whole_weights(found)

    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    (found / "distributed" / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(RunFolderError, match=r"\.metadata: not a list of tensors: it names posix\.mkdir"):
        distributed_checkpoint.whole_weights(found)
    with pytest.raises(RunFolderError, match="use another checkpoint"):
        background_trainer(tmp_path / "again").train(str(found))
    assert not (tmp_path / "harm").exists()


def test_saves_in_the_background_are_refused_where_they_cannot_be_made(recipe, tigon):
    path = recipe()
    for sets, message in (
        (("train.save_async=true",), "train.save_steps"),
        (("train.save_async=true", "train.save_steps=2", "sharding.zero=1"), "DeepSpeed writes its own"),
        (("train.save_async=true", "train.save_steps=2", "train.optimizer=galore"), "plain states"),
    ):
        words = [word for text in sets for word in ("--set", text)]
        assert message in tigon("train", path, *words).error_line()


def test_whole_states_are_named_by_the_parameters_of_their_groups():
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [second], "weight_decay": 0.1}, {"params": [first], "weight_decay": 0.0}])
    for parameter, gradient in ((first, 1.0), (second, 2.0)):
        parameter.grad = torch.full((2,), gradient)
    optimizer.step()
    named = distributed_checkpoint.by_name(optimizer.state_dict(), optimizer, {first: "first", second: "second"})
    assert named["state"]["second"]["exp_avg"].tolist() == pytest.approx([0.2, 0.2])
    assert [group["params"] for group in named["param_groups"]] == [["second"], ["first"]]
    assert named["param_groups"][0]["weight_decay"] == 0.1
