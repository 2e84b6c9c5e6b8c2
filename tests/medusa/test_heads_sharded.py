"""Heads on weights spread over two processes: the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads_helpers import SPECS, batch, with_heads

import two_ranks
from helpers import farthest
from tigon.medusa import Objective
from two_ranks import RANKS, Scenarios, gradients_of

pytest.importorskip("transformers")


def items() -> torch.Tensor:
    return (batch()["labels"][:, 1:] != -100).sum()


def own_row(model: Any, rank: int) -> Any:
    row = {name: t[rank : rank + 1] for name, t in batch().items()}
    return model(**row, num_items_in_batch=items()).loss * RANKS  # what averages over ranks divides by their number


def whole(kind: str, stage: int) -> dict[str, torch.Tensor]:
    model = with_heads(SPECS[kind], Objective(stage=stage))
    model(**batch(), num_items_in_batch=items()).loss.backward()
    return gradients_of(model)


def fsdp2(rank: int, mesh: Any, kind: str, stage: int, units: bool) -> float:
    """units: lm_head and the heads' modules are gathered apart from the rest, each only inside its own forward."""
    from torch.distributed.fsdp import fully_shard

    model = with_heads(SPECS[kind], Objective(stage=stage))
    apart = [*model.draft_heads.visited(), model.lm_head] if units else []
    for module in (*model.model.layers, *apart, model):
        fully_shard(module, mesh=mesh)
    own_row(model, rank).backward()
    return farthest(gradients_of(model), whole(kind, stage))


def data_parallel(rank: int, mesh: Any, kind: str, stage: int) -> float:
    model = with_heads(SPECS[kind], Objective(stage=stage))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)  # it sums in the backward, so it has to live until then
    own_row(wrapped, rank).backward()
    return farthest(gradients_of(model), whole(kind, stage))


SCENARIOS: Scenarios = {
    **{
        f"fsdp2, {kind}, stage {stage}, {'units' if units else 'root'}": (
            lambda rank, mesh, kind=kind, stage=stage, units=units: fsdp2(rank, mesh, kind, stage, units)
        )
        for kind, stage, units in (
            ("separate", 1, False), ("separate", 2, False), ("separate", 2, True), ("shared", 1, True),
            ("shared", 2, True), ("mtp", 2, False),
        )
    },
    **{
        f"distributed data parallel, stage {stage}": (
            lambda rank, mesh, stage=stage: data_parallel(rank, mesh, "separate", stage)
        )
        for stage in (1, 2)
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks.run(SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_of_two_ranks_match_those_of_one(scenario: str, found: list[dict[str, Any]]) -> None:
    two_ranks.assert_right(found, scenario)
