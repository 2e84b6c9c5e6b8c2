"""Runs of four processes in two groups: hybrid sharding, tensor parallelism, and ZeRO++ with a second copy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_technique_runs import cut_back, fsdp_rank, need, succeeds, zero_rank
from trainer_helpers import TINY_MODEL, losses, records

from forks import forks
from tigon.trainer import run as run_module

HYBRID = ["train.batch_size=1", "sharding.gpus=4", "sharding.replicas=2"]


def in_four(here: Path, recipe: Path, sets: list[str], *, resume: bool = False) -> list[str]:
    """Train in four processes. Returns the placements and meshes of the weights at the end."""

    def act(rank: int) -> None:
        save_model = run_module._save_model

        def look(run: Any, prepared: Any, built: Any, trainer: Any) -> None:
            if rank == 0:
                kinds = {f"{weight.placements} on {tuple(weight.device_mesh.shape)}" for weight in built.parameters()}
                (here / "placements").write_text("\n".join(sorted(kinds)), encoding="utf-8")
            save_model(run, prepared, built, trainer)

        run_module._save_model = look  # in a copy of this process
        fsdp_rank(recipe, sets, resume=resume)

    said = succeeds(act, here, 4)
    assert "MaterializedLogitsWarning" not in said, "the loss was not fused"
    return (here / "placements").read_text(encoding="utf-8").splitlines()


@forks
def test_two_sharded_copies_train_as_one_process_and_resume_without_copies(recipe, tigon, here):
    """Four processes; the resumed run shards over two."""
    path = recipe(model={"kernels": "tigon"}, train={"save_steps": 2}, output={"name": "one", "save_model": True})
    assert tigon("train", path).code == 0
    runs = here / "runs"
    assert in_four(here, path, [*HYBRID, "output.name=hybrid"]) == ["(Replicate(), Shard(dim=0)) on (2, 2)"]
    assert losses(runs / "hybrid") == pytest.approx(losses(runs / "one"), rel=1e-5)
    steps = [[record["step"] for record in records(runs / name, "train")] for name in ("hybrid", "one")]
    assert steps[0] == steps[1], "each record is written once"
    cut_back(runs / "hybrid", "cut", 4)
    shutil.copytree(runs / "cut", runs / "fewer")
    in_four(here, path, [*HYBRID, "output.name=cut"], resume=True)
    assert losses(runs / "cut") == losses(runs / "hybrid")
    fewer = ["train.batch_size=2", "sharding.gpus=2", "output.name=fewer"]
    succeeds(lambda rank: fsdp_rank(path, fewer, resume=True), here, 2)
    assert losses(runs / "fewer") == pytest.approx(losses(runs / "one"), rel=1e-5)


@pytest.mark.second_proof("copies and shared rows are trained apart, and each leaves the other's processes alone")
@forks
def test_sharded_copies_whose_processes_share_rows_train_as_one_process(recipe, tigon, here):
    heads = {**TINY_MODEL, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = recipe(model={"kernels": "tigon", "config": heads}, output={"name": "one"})
    assert tigon("train", path).code == 0
    sets = ["train.batch_size=2", "sharding.gpus=4", "sharding.replicas=2", "sharding.sequence=2", "output.name=shared"]
    assert in_four(here, path, sets) == ["(Replicate(), Shard(dim=0)) on (2, 2)"]
    assert losses(here / "runs" / "shared") == pytest.approx(losses(here / "runs" / "one"), rel=1e-5)


TENSOR = ["train.batch_size=2", "sharding.gpus=4", "sharding.tensor=2"]
HEADS = {**TINY_MODEL, "num_attention_heads": 4, "num_key_value_heads": 2}
STRIDED = "(_StridedShard(dim=0, sf=2), Shard(dim=0)) on (2, 2)"
"""The placement of a weight that is divided by rows over a group, and then over the groups."""


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


@forks
def test_two_groups_that_divide_matrices_train_as_one_process_and_resume_without_groups(recipe, tigon, here):
    """The head is divided too. Checkpoints and the saved model are whole."""
    config = {**HEADS, "tie_word_embeddings": False}
    sections: dict[str, Any] = {"model": {"kernels": "tigon", "config": config}, "train": {"save_steps": 2}}
    path = recipe(**sections, output={"name": "one", "save_model": True})
    assert tigon("train", path).code == 0
    runs = here / "runs"
    kinds = in_four(here, path, [*TENSOR, "output.name=tensor"])
    assert kinds == ["(Shard(dim=0), Shard(dim=1)) on (2, 2)", "(Shard(dim=0),) on (2,)", STRIDED]
    assert losses(runs / "tensor") == pytest.approx(losses(runs / "one"), rel=1e-5)
    got, want = weights(runs / "tensor"), weights(runs / "one")
    assert {name: weight.shape for name, weight in got.items()} == {name: weight.shape for name, weight in want.items()}
    for name, weight in got.items():
        torch.testing.assert_close(weight, want[name], rtol=1e-2, atol=1e-3, msg=name)
    for event in ("eval", "result"):
        got_loss, want_loss = (records(runs / name, event)[0]["eval_loss"] for name in ("tensor", "one"))
        assert got_loss == pytest.approx(want_loss, rel=1e-5), event
    cut_back(runs / "tensor", "cut", 4)
    shutil.copytree(runs / "cut", runs / "fewer")
    in_four(here, path, [*TENSOR, "output.name=cut"], resume=True)
    assert losses(runs / "cut") == losses(runs / "tensor")
    fewer = ["train.batch_size=2", "sharding.gpus=2", "output.name=fewer"]
    succeeds(lambda rank: fsdp_rank(path, fewer, resume=True), here, 2)
    assert losses(runs / "fewer") == pytest.approx(losses(runs / "one"), rel=1e-5)


OTHERS = {
    "norms of heads, accumulation": ({"name": "qwen3-0.6b"}, ("train.batch_size=1", "train.gradient_accumulation=2")),
    "tied head, layers computed again": ({}, ("train.checkpointing=full",)),
}


@pytest.mark.second_proof("the test above trains divided matrices; gradients of other models are tests/techniques'")
@forks
@pytest.mark.parametrize("case", OTHERS)
def test_groups_divide_other_models_and_train_as_one_process(recipe, tigon, here, case):
    model, sets = OTHERS[case]
    path = recipe(model={"kernels": "tigon", "config": HEADS, **model}, output={"name": "one"})
    assert tigon("train", path).code == 0
    in_four(here, path, [*TENSOR, *sets, "output.name=tensor"])
    assert losses(here / "runs" / "tensor") == pytest.approx(losses(here / "runs" / "one"), rel=1e-5)


@pytest.mark.second_proof("another test looks at DeepSpeed's configuration, and stage 3 is trained in two processes")
@forks
def test_zero_3_with_a_second_copy_of_the_weights_trains_as_one_process_and_resumes(recipe, tigon, here):
    """ZeRO++'s hpZ: two processes hold the second copy between them."""
    need("deepspeed")
    path = recipe(model={"kernels": "tigon"}, train={"save_steps": 2}, output={"name": "one"})
    assert tigon("train", path).code == 0
    sets = ["train.batch_size=1", "sharding.gpus=4", "sharding.zero=3", "sharding.zero_copy_ranks=2"]

    def act(rank: int, name: str, resume: bool) -> None:
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

        forget, shares = Stage3.invalidate_secondary_tensor, []

        def look(self: Any) -> None:  # after each step
            weights = [weight for group in self.fp16_groups for weight in group]
            with_copy = [weight for weight in weights if weight.ds_secondary_tensor is not None]
            shares.extend(weight.ds_secondary_tensor.numel() / weight.ds_tensor.numel() for weight in with_copy)
            forget(self)

        Stage3.invalidate_secondary_tensor = look  # in a copy of this process
        zero_rank(path, [*sets, f"output.name={name}"], resume=resume)
        assert shares and set(shares) == {2.0}, "a second copy is divided over two processes, the first over four"

    runs = here / "runs"
    succeeds(lambda rank: act(rank, "copies", False), here, 4)
    assert losses(runs / "copies") == pytest.approx(losses(runs / "one"), rel=1e-5)
    cut_back(runs / "copies", "cut", 4)
    succeeds(lambda rank: act(rank, "cut", True), here, 4)
    assert losses(runs / "cut") == losses(runs / "copies")
