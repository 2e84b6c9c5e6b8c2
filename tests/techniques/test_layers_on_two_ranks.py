"""Layers that recompute different parts under FSDP2 and DDP: the gradients of one process without recomputation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tigon
import two_ranks
from helpers import farthest
from tigon.models.verification.tiny import tiny_batch, tiny_model
from tigon.techniques.checkpointing.layer_checkpointing import apply
from two_ranks import RANKS, Scenarios, gradients_of

pytest.importorskip("transformers")


def fresh() -> Any:
    model = tiny_model("llama").train()
    tigon.patch(model)
    return model


def loss_of(model: nn.Module, batch: dict[str, Tensor], row: slice) -> Tensor:
    rows = {name: tensor[row] for name, tensor in batch.items()}
    items = (batch["labels"][:, 1:] != -100).sum()
    return model(**rows, num_items_in_batch=items).loss  # type: ignore[no-any-return]


def sharded(rank: int, mesh: Any, *, states: tuple[str, str], ddp: bool) -> float:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    batch, whole = tiny_batch(torch.device("cpu")), fresh()
    loss_of(whole, batch, slice(None)).backward()
    model = fresh()
    apply(model, states)
    if ddp:
        averaged = DistributedDataParallel(model)
        (loss_of(averaged, batch, slice(rank, rank + 1)) * RANKS).backward()
    else:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
        (loss_of(model, batch, slice(rank, rank + 1)) * RANKS).backward()
    return farthest(gradients_of(model), gradients_of(whole))


SCENARIOS: Scenarios = {
    f"{'DDP' if ddp else 'FSDP2'} {' '.join(states)}": partial(sharded, states=states, ddp=ddp)
    for ddp in (False, True)
    for states in (("elementwise", "none"), ("full", "mlp"))
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks.run(SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_of_two_ranks_are_those_of_one(scenario: str, found: list[dict[str, Any]]) -> None:
    two_ranks.assert_right(found, scenario)
