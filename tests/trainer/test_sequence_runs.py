"""Runs whose processes share rows: the losses of one process with the same samples, and resumed runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_technique_runs import cut_back, fsdp_rank, need, succeeds, zero_rank
from trainer_helpers import TINY_MODEL, assert_same_losses, losses, records
from transformers import MambaConfig

from forks import forks
from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe
from tigon.techniques.sequence_parallel import ring_attention
from tigon.trainer.guards import auto_sequence
from tigon.trainer.run import train

MODEL = {"kernels": "tigon", "config": {**TINY_MODEL, "num_attention_heads": 4, "num_key_value_heads": 2}}


@forks
def test_two_groups_of_two_processes_train_as_one_process(recipe, tigon, here):
    """Over more than one epoch of packed documents, with evaluations."""
    path = recipe(model=MODEL, train={"steps": None, "epochs": 1.5, "eval_steps": 8}, output={"name": "one"})
    assert tigon("train", path).code == 0
    sets = ["train.batch_size=1", "train.gradient_accumulation=2", "sharding.gpus=4", "sharding.sequence=2"]
    sets.append("output.name=shared")
    succeeds(lambda rank: train(path, sets), here, 4)
    runs = here / "runs"
    assert len(losses(runs / "one")) > 8
    assert losses(runs / "shared") == pytest.approx(losses(runs / "one"), rel=1e-5)
    for event in ("eval", "result"):
        got, want = (records(runs / name, event)[0]["eval_loss"] for name in ("shared", "one"))
        assert got == pytest.approx(want, rel=1e-5), event


def ddp_rank(path: Path, sets: list[str], resume: bool = False) -> None:
    train(path, sets, resume=resume)


LESS_SHARDED = pytest.mark.second_proof("stage 3 shards gradients and states as stage 2 does, and weights too")


@forks
@pytest.mark.parametrize(
    ("start", "sets"),
    [
        (ddp_rank, ()),
        (fsdp_rank, ()),
        pytest.param(zero_rank, ("sharding.zero=2",), marks=LESS_SHARDED),
        (zero_rank, ("sharding.zero=3",)),
        (ddp_rank, ("lora.rank=4", "lora.targets=[linear, head]")),
    ],
    ids=["DDP", "FSDP2", "ZeRO-2", "ZeRO-3", "LoRA"],
)
def test_run_with_shared_rows_trains_as_one_process_and_resumes(recipe, tigon, here, start: Any, sets):
    """Rows without packing, so that their padding is cut too, and layers that are computed again."""
    if start is zero_rank:
        need("deepspeed")
    path = recipe(
        model=MODEL, data={"packing": False}, train={"save_steps": 2, "checkpointing": "full"}, output={"name": "one"}
    )
    lora = [word for text in sets if text.startswith("lora") for word in ("--set", text)]
    assert tigon("train", path, *lora).code == 0
    runs, sets = here / "runs", [*sets, "sharding.gpus=2", "sharding.sequence=2"]
    succeeds(lambda rank: start(path, [*sets, "output.name=shared"]), here, 2)
    assert losses(runs / "shared") == pytest.approx(losses(runs / "one"), rel=1e-5)
    cut_back(runs / "shared", "cut", 4)
    shutil.copytree(runs / "cut", runs / "alone")
    succeeds(lambda rank: start(path, [*sets, "output.name=cut"], resume=True), here, 2)
    assert losses(runs / "cut") == losses(runs / "shared")
    if start is ddp_rank:  # in one process, which reads the same samples
        assert tigon("train", path, *lora, "--set", "output.name=alone", "--resume").code == 0
        assert losses(runs / "alone") == pytest.approx(losses(runs / "one"), rel=1e-5)


@forks
def test_four_processes_in_a_ring_train_as_one_process_and_resume_with_ulysses(recipe, tigon, here):
    """More processes than key heads, for which `auto` takes a ring. The resumed run has two, for which it does not."""
    try:
        ring_attention.check()
    except RecipeError as error:
        pytest.skip(str(error))
    data = {"cross_document_attention": True}
    train_keys = {"save_steps": 2, "eval_steps": 2}
    path = recipe(model=MODEL, data=data, train=train_keys, output={"name": "one"})
    assert tigon("train", path).code == 0
    ring = ["sharding.gpus=4", "sharding.sequence=4", "output.name=ring"]
    succeeds(lambda rank: train(path, ring), here, 4)
    runs = here / "runs"
    assert_same_losses(runs / "ring", runs / "one")
    assert "sequence_method: ring" in (runs / "ring" / "recipe.yaml").read_text(encoding="utf-8")
    cut_back(runs / "ring", "cut", 4)
    fewer = ["sharding.gpus=2", "sharding.sequence=2", "output.name=cut"]
    succeeds(lambda rank: train(path, fewer, resume=True), here, 2)
    assert losses(runs / "cut") == pytest.approx(losses(runs / "ring"), rel=1e-5)


def test_ring_over_packed_documents_is_refused(recipe, tigon):
    ring = ("sharding.gpus=2", "sharding.sequence=2", "sharding.sequence_method=ring")
    outcome = tigon("train", recipe(model=MODEL), *(word for text in ring for word in ("--set", text)))
    assert "ring has no mask that separates packed documents" in outcome.error_line()


def test_model_without_attention_is_refused_before_a_method_is_chosen():
    recipe = Recipe().having({"sharding.gpus": 2, "sharding.sequence": 2})
    with pytest.raises(RecipeError, match=r"sharding\.sequence divides attention heads, and mamba has none; set"):
        auto_sequence.resolved(recipe, MambaConfig())


@forks
def test_shared_rows_under_fsdp2_and_autocast_train_as_one_process(recipe, tigon, here):
    """FSDP2's mixed precision copies what the model is called with."""
    path = recipe(model=MODEL, train={"precision": "amp-bf16"}, output={"name": "one"})
    assert tigon("train", path).code == 0
    succeeds(lambda rank: fsdp_rank(path, ["sharding.gpus=2", "sharding.sequence=2", "output.name=shared"]), here, 2)
    assert losses(here / "runs" / "shared") == pytest.approx(losses(here / "runs" / "one"), rel=5e-3)


@forks
def test_fp8_of_shared_rows_is_as_close_to_fp32_as_that_of_one_process(recipe, tigon, here):
    """Each process scales its own tokens, so its losses differ from those of one process."""
    path = recipe(model=MODEL, train={"steps": 6})
    fp8 = ["train.precision=fp8", "train.fp8_bf16_layers=0"]
    for name, sets in (("exact", ["train.precision=fp32"]), ("one", fp8)):
        words = [word for text in [*sets, f"output.name={name}"] for word in ("--set", text)]
        assert tigon("train", path, *words).code == 0
    sets = [*fp8, "sharding.gpus=2", "sharding.sequence=2", "output.name=shared"]
    succeeds(lambda rank: train(path, sets), here, 2)
    exact, one, shared = (torch.tensor(losses(here / "runs" / name)) for name in ("exact", "one", "shared"))
    assert (one - exact).norm() > 1e-4 * exact.norm(), "the products were not in FP8"
    assert (shared - exact).norm() <= 2 * (one - exact).norm()
