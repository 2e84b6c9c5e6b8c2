"""What only GPUs show of faults: steps left out without waiting, memory that really runs out, processes that wait for
each other by NCCL."""

from __future__ import annotations

import gc
import math
import os
import resource
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_finite_steps import StepMeter, spoil
from test_two_processes import adopting, ended, reached, start
from trainer_helpers import SMALL, cut_back, losses, records, rows, small_trainer, train_keys

from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe, TrainConfig
from tigon.techniques.optimizers.table import OPTIMIZERS
from tigon.trainer.checkpoint import checkpoint

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
ENGINES = {"ddp": {}, "zero-2": {"zero": 2}, "fsdp2": {"fsdp": True}}


def trainer_of(folder, **train):
    values = {"steps": 5, "batch_size": 4, "learning_rate": 0.01, "log_steps": 1, "galore_rank": 8, **train}
    return small_trainer(folder, Recipe(model=SMALL, train=TrainConfig(**values)), device=CUDA, evaluate=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_that_is_not_finite_moves_no_weight_on_the_gpu(name, tmp_path):
    row = OPTIMIZERS[name]
    if row.package:
        pytest.importorskip(row.package)
    trainer = trainer_of(tmp_path, **train_keys(row))
    spoil(trainer, "nan", {3})
    watch = StepMeter(trainer)
    trainer.train()
    trainer.gate.settle(5)
    moved = [not torch.equal(watch.weights[step], watch.weights[step - 1]) for step in range(1, 6)]
    assert moved == [True, True, False, True, True] and trainer.gate.skipped == 1
    assert bool(torch.isfinite(watch.weights[5]).all())


def test_run_on_the_gpu_stops_at_most_one_step_past_its_limit(tmp_path):
    """The host learns of a bad step while the next one runs, so it may stop one step late, with unchanged weights."""
    trainer = trainer_of(tmp_path, steps=20, max_skipped_steps=2, log_steps=50)
    spoil(trainer, "gradient", set(range(3, 21)))
    with pytest.raises(RecipeError, match="3 steps in a row, up to step 5"):
        trainer.train()
    assert trainer.state.global_step <= 5


def test_loss_scale_that_is_too_large_does_not_count_as_divergence(tmp_path):
    trainer = trainer_of(tmp_path, precision="amp-fp16", max_skipped_steps=0)
    trainer.train()
    assert trainer.gate.skipped == 0
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses and all(math.isfinite(loss) for loss in losses)


def test_evaluation_in_too_little_memory_has_the_same_loss(tmp_path):
    """The memory that the process may have is cut until a batch of all rows does not fit."""
    trainer = trainer_of(tmp_path, batch_size=512)
    trainer.eval_dataset = rows(512)
    want = trainer.evaluate()["eval_loss"]
    trainer.args.per_device_eval_batch_size = 512
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes = torch.cuda.memory_allocated() + 24 * 2**20
    torch.cuda.set_per_process_memory_fraction(free_bytes / torch.cuda.get_device_properties(CUDA).total_memory)
    try:
        got = trainer.evaluate()["eval_loss"]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert trainer.args.per_device_eval_batch_size < 512, "it all fitted, so nothing was shown"
    assert got == pytest.approx(want, rel=1e-5)


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> the number of its process."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "environ").read_text().split("\0") if parent == launcher else []
            found.update((int(word.removeprefix("RANK=")), int(folder.name)) for word in words if word[:5] == "RANK=")
    return found


def newest(run: Path) -> int:
    found = checkpoint.newest(run / "checkpoints")
    assert not found.passed_over
    return checkpoint.step_of(found.path)


def further(run: Path, here: Path, path: Path, gpus: int = 2) -> tuple[subprocess.Popen[str], int]:
    """The run, resumed and some steps on, and the step of the checkpoint that it went on from."""
    step, logged = newest(run), records(run, "train")[-1]["step"]
    process = start(here, path, "--resume", gpus=gpus)
    reached(run, logged + 4, process)
    return process, step


def of_two(engine: str, recipe) -> Path:
    """A run of two processes that saves often."""
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    train = {"steps": 100_000, "batch_size": 2, "save_steps": 3, "device": "cuda"}
    return recipe(train=train, sharding={"gpus": 2, **ENGINES[engine]})


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


OTHER_GPUS = [(engine, gpus) for engine in ("ddp", "fsdp2") for gpus in (1, 4)]
"""DeepSpeed reads checkpoints of as many processes only."""


@two_gpus
@pytest.mark.parametrize(("engine", "gpus"), [*((engine, 2) for engine in ENGINES), *OTHER_GPUS])
def test_kill_of_one_process_on_gpus_ends_both_and_the_run_resumes(engine, gpus, recipe, here):
    """SIGKILL to rank 1; then, resumed with as many processes or others, SIGTERM to the launcher."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    path, run = of_two(engine, recipe), here / "runs" / "r"
    process = start(here, path)
    reached(run, 5, process)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    _, said = process.communicate(timeout=90)
    assert process.returncode == 2 and "process 1 of 2 was killed (SIGKILL)" in said, said

    process, step = further(run, here, path, gpus)
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=90)
    assert process.returncode == 143 and f"from checkpoint-{step}" in out, said
    assert f"stopped by SIGTERM after step {newest(run)}; checkpoint-{newest(run)} is complete" in said
    warned = any(f"processes: 2 before, {gpus} now" in text for text in records(run, "resume")[-1]["warnings"])
    assert warned == (gpus != 2)


@two_gpus
@pytest.mark.parametrize("engine", ENGINES)
def test_processes_on_gpus_save_and_end_if_their_launcher_is_killed(engine, recipe, here):
    path, run = of_two(engine, recipe), here / "runs" / "r"
    with adopting(), ThreadPoolExecutor() as threads:
        process = start(here, path)
        reached(run, 5, process)
        ranks = ranks_of(process.pid)
        process.kill()
        process.wait()
        read = threads.submit(process.communicate)  # or PyTorch's warnings of the store that is gone fill the pipe
        statuses = [ended(ranks[rank], within_s=60) for rank in range(2)]
        _, said = read.result()
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [143, 143], said
    assert records(run, "train")[-1]["step"] == newest(run), "no checkpoint of the last step"
    process, step = further(run, here, path)
    process.kill()
    out, _ = process.communicate()
    assert f"from checkpoint-{step}" in out


# --- a resume with other processes or another engine, and a disk that is full ----------------------------------------

STEPS, SAVED, SAMPLES = 8, 4, 8
CHANGES = {
    "DDP of 2 to one": (("ddp", 2), ("ddp", 1)),
    "one to DDP of 2": (("ddp", 1), ("ddp", 2)),
    "DDP of 2 to FSDP2": (("ddp", 2), ("fsdp2", 2)),
    "FSDP2 to one": (("fsdp2", 2), ("ddp", 1)),
}


def finished(here: Path, path: Path, how: tuple[str, int], *words: str) -> None:
    """A run of this engine on so many GPUs, up to its end."""
    engine, gpus = how
    sets = [f"sharding.{key}={str(value).lower()}" for key, value in ENGINES[engine].items()]
    process = start(here, path, *(word for text in sets for word in ("--set", text)), *words, gpus=gpus)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0, said[-3000:]


@two_gpus
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_run_on_gpus_continues_with_other_processes_or_another_engine(change, recipe, here):
    """The losses after the checkpoint are those of the run that was not stopped."""
    before, now = change
    train = {"steps": STEPS, "batch_size": SAMPLES // before[1], "save_steps": SAVED, "device": "cuda"}
    path, run = recipe(train={**train, "precision": "fp32", "keep_checkpoints": 9}), here / "runs" / "r"
    finished(here, path, before)
    whole = losses(run)
    cut_back(run, "cut", STEPS)
    finished(here, path, now, "--set", "output.name=cut", "--resume")
    assert losses(here / "runs" / "cut") == pytest.approx(whole, rel=2e-5)
    warned = any(
        f"processes: {before[1]} before, {now[1]} now" in text
        for text in records(here / "runs" / "cut", "resume")[-1]["warnings"]
    )
    assert warned == (before[1] != now[1])


@two_gpus
@pytest.mark.parametrize("engine", ENGINES)
def test_file_that_cannot_be_written_ends_both_processes_and_keeps_the_last_checkpoint(engine, recipe, here):
    """No file of process 0 may grow any more, as on a full disk. Then the run goes on from the checkpoint before."""
    path, run = of_two(engine, recipe), here / "runs" / "r"
    process = start(here, path)
    reached(run, 5, process)
    log = (run / "metrics.jsonl").stat().st_size
    resource.prlimit(ranks_of(process.pid)[0], resource.RLIMIT_FSIZE, (log + 2**14, log + 2**14))
    _, said = process.communicate(timeout=120)
    assert process.returncode not in (0, None)
    assert "a file grew too large" in said or "the disk is full" in said, said[-3000:]
    assert newest(run) >= 3
    process, _ = further(run, here, path)
    process.kill()
    process.communicate()
