"""Heads whose weight is not whole outside their own forward: ZeRO-3's hooks, and FSDP2 on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_run import both_runs, layers_of_both
from trl_cases import FSDP2, FUSED, SHARDED_TEACHER, ZERO3
from trl_runs import Result, build, compare, model, of_time

import tigon
from forks import forks, in_forks
from partitioned import Partitioned
from second_proofs import proved_by
from tigon.integrations.trl.forward import FusedForward
from tigon.trainer.distributed import launch
from two_ranks import assert_right, gradients_of
from two_ranks import run as run_scenarios

pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[dev]')")

IDS = torch.randint(5, 64, (2, 12), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.3, -100)


def with_fused_head(policy: Any, tigon: bool = True) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(policy, temperature=0.9, outputs=("log_probs", "entropy"))
    if tigon:
        FusedForward(policy)
    return policy


def loss_of(policy: Any, rows: slice = slice(None)) -> torch.Tensor:
    """A loss with gradients through log-probabilities and entropy."""
    outputs = policy(input_ids=IDS[rows], labels=LABELS[rows], fused_lm_head=True)
    return (outputs.log_probs.square() + 0.1 * outputs.entropy).sum()


def test_head_that_zero3_partitions_is_gathered_by_its_own_forward() -> None:
    want, got = with_fused_head(model(), tigon=False), with_fused_head(model())
    shard = Partitioned(got.lm_head)
    expected, loss = loss_of(want), loss_of(got)
    assert shard.gathers == 1 and got.lm_head.weight.numel() == 0
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert shard.gathers == 2
    assert largest_error(gradients_of(got), gradients_of(want)) < 1e-5


def largest_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max() / want[n].abs().max()) for n in want)


def error_against_one_process(sharded: Any, rank: int) -> float:
    """The largest relative error of the mean of both ranks' gradients, with one row of the batch on each rank."""
    whole = with_fused_head(model(), tigon=False)
    (sum(loss_of(whole, slice(i, i + 1)) for i in range(2)) / 2).backward()
    want = gradients_of(whole)
    loss_of(sharded, slice(rank, rank + 1)).backward()
    return largest_error(gradients_of(sharded), want)


def fsdp2(rank: int, mesh: Any, *, own_head: bool, order: str) -> float:
    from torch.distributed.fsdp import fully_shard

    policy = model()
    if order == "fused first":
        with_fused_head(policy)
    for layer in policy.model.layers:
        fully_shard(layer, mesh=mesh)
    if own_head:
        fully_shard(policy.lm_head, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    if order == "sharded first":
        with_fused_head(policy)
    return error_against_one_process(policy, rank)


@pytest.mark.second_proof("a partitioned head is tested above, DeepSpeed itself in techniques/test_sharding.py")
def test_zero3_logs_trls_numbers(tmp_path: Path) -> None:
    """DeepSpeed itself, in two gloo processes on the CPU."""
    pytest.importorskip("deepspeed")
    here = Path(__file__).parent
    path = os.pathsep.join([str(Path(tigon.__file__).parents[1]), str(here), *sys.path])
    shared = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    with launch.reserved_address() as meeting:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(here / "zero3_run.py"), *ZERO3], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, cwd=tmp_path, env={**shared, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]  # fmt: skip
        said = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(stderr[-3000:] for _, stderr in said)
    results = json.loads(said[0][0].split("RESULT")[1])
    for trainer, state in ZERO3.items():
        got, want = (results[f"{trainer} {kind}"] for kind in ("fused", "plain"))
        assert bool(got["fused"]) == (state == FUSED), trainer
        assert state == FUSED or SHARDED_TEACHER in str(got["unfused"])
        for ours, theirs in zip(got["logs"], want["logs"], strict=True):
            assert {k: v for k, v in ours.items() if not of_time(k)} == pytest.approx(
                {k: v for k, v in theirs.items() if not of_time(k)}, rel=1e-4, abs=1e-6, nan_ok=True
            ), trainer


SCENARIOS = {
    "fsdp2": lambda rank, mesh: fsdp2(rank, mesh, own_head=False, order="fused first"),
    "fsdp2 with the head as a unit of its own": lambda rank, mesh: fsdp2(
        rank, mesh, own_head=True, order="fused first"
    ),
    "fsdp2 before fuse": lambda rank, mesh: fsdp2(rank, mesh, own_head=True, order="sharded first"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model()  # saved before the processes are copied
    from trl.trainer import utils  # noqa: F401  # imported once, before the processes are copied

    return run_scenarios(SCENARIOS, Path(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fsdp2_gives_the_gradients_of_one_process(scenario: str, found: Any) -> None:
    assert_right(found, scenario)


@forks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "trainer",
    proved_by(
        lambda trainer: trainer in ("SFT", "DPO", "Distillation"),
        list(FSDP2),
        "another trainer asks the same of the sharded head",
    ),
)
def test_trainer_under_fsdp2_logs_and_learns_what_trl_alone_does(trainer: str, tmp_path: Path) -> None:
    """TRL's own trainers with Accelerate's FSDP2, in two gloo processes."""
    build(trainer)  # imports and models, before the processes are copied
    said = tmp_path / "stderr"
    assert in_forks(lambda rank: both_runs(rank, trainer, tmp_path), 2, said=said) == [0, 0], said.read_text()[-3000:]
    for rank in range(2):
        want, got = (Result(**torch.load(tmp_path / f"{fused}-{rank}.pt")) for fused in (False, True))
        assert bool(got.fused) == (FSDP2[trainer] == FUSED)
        compare(got, want, 1e-4)


@forks
@pytest.mark.filterwarnings("ignore")
def test_reference_that_fsdp2_sharded_gets_the_layers_of_the_policy(tmp_path: Path) -> None:
    """TRL shards the reference while it builds the trainer, and the policy when the training begins."""
    build("DPO")  # imports and models, before the processes are copied
    said = tmp_path / "stderr"
    assert in_forks(lambda rank: layers_of_both(rank, tmp_path), 2, said=said) == [0, 0], said.read_text()[-3000:]
    for rank in range(2):
        policys, references = torch.load(tmp_path / f"{rank}")
        assert policys == references and ("model.norm", "rms_norm") in policys
