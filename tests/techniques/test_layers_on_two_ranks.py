"""Layers that recompute different parts, and accumulation fusion, under DDP and FSDP2: the gradients of one process
without them."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
import two_ranks
from helpers import farthest
from tigon.models.verification.tiny import tiny_batch, tiny_model
from tigon.ops.accumulation_fusion import LeafGradient, accumulation_fusion
from tigon.techniques.accumulation.fused_embedding import fuse_embeddings
from tigon.techniques.accumulation.fused_linear import fuse_linears
from tigon.techniques.checkpointing.layer_checkpointing import apply
from two_ranks import RANKS, Scenarios, gradients_of

pytest.importorskip("transformers")

MICRO_BATCHES = 2


def fresh(*, tied: bool = False) -> Any:
    model = tiny_model("llama", {"tie_word_embeddings": tied}).train()
    tigon.patch(model)
    return model


def loss_of(model: Any, number: int, row: slice) -> Tensor:
    """The loss of some rows of a micro-batch."""
    batch = {name: tensor.roll(number, dims=1) for name, tensor in tiny_batch(torch.device("cpu")).items()}
    rows = {name: tensor[row] for name, tensor in batch.items()}
    items = (batch["labels"][:, 1:] != -100).sum()
    return model(**rows, num_items_in_batch=items).loss  # type: ignore[no-any-return]


def added_in_place() -> list[bool]:
    """Whether each backward from now on adds to `.grad` itself."""
    plain, found = LeafGradient.to_add_to, []

    def watched(self: LeafGradient) -> Tensor | None:
        grad = plain(self)
        found.append(grad is not None)
        return grad

    LeafGradient.to_add_to = watched  # type: ignore[method-assign]  # the process is this test's own
    return found


def divided(model: Any, mesh: Any, kind: str) -> Any:
    """The module to call."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if kind != "FSDP2":
        return DistributedDataParallel(model, gradient_as_bucket_view=kind == "DDP, views of buckets")
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def recomputed(rank: int, mesh: Any, *, kind: str, states: tuple[str, str]) -> float:
    whole, model = fresh(), fresh()
    loss_of(whole, 0, slice(None)).backward()
    apply(model, states)
    called = divided(model, mesh, kind)  # DDP has to outlive the backward pass
    (loss_of(called, 0, slice(rank, rank + 1)) * RANKS).backward()
    return farthest(gradients_of(model), gradients_of(whole))


def accumulated(rank: int, mesh: Any, *, kind: str, tied: bool) -> float:
    whole = fresh(tied=tied)
    for number in range(MICRO_BATCHES):
        loss_of(whole, number, slice(None)).backward()
    model = fresh(tied=tied)
    n_fused = len(fuse_linears(model)) + len(fuse_embeddings(model)) + 1  # and the head
    called = divided(model, mesh, kind)
    found = added_in_place()
    for number in range(MICRO_BATCHES):
        last = number == MICRO_BATCHES - 1
        if kind == "FSDP2":
            model.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last or kind == "FSDP2" else called.no_sync(), accumulation_fusion():
            (loss_of(called, number, slice(rank, rank + 1)) * RANKS).backward()
    assert found == [False] * n_fused + [True] * n_fused, found
    return farthest(gradients_of(model), gradients_of(whole))


SCENARIOS: Scenarios = {
    f"{kind}{' tied' if tied else ''}": partial(accumulated, kind=kind, tied=tied)
    for kind in ("DDP", "DDP, views of buckets", "FSDP2")
    for tied in (False, True)
} | {
    f"{kind} {' '.join(states)}": partial(recomputed, kind=kind, states=states)
    for kind in ("DDP", "FSDP2")
    for states in (("elementwise", "none"), ("full", "mlp"))
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks.run(SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_of_two_ranks_are_those_of_one(scenario: str, found: list[dict[str, Any]]) -> None:
    two_ranks.assert_right(found, scenario)
