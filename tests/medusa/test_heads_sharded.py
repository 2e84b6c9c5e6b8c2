"""Heads on weights spread over two processes: the gradients of one process.

The processes are started once and run every scenario; each has one row of the batch, and the losses of both are divided
by the labels of both, as the Trainer does it.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heads_helpers import SPECS, batch, farthest, with_heads

from tigon.medusa import Objective

pytest.importorskip("transformers")

RANKS = 2
LIMIT = 2e-5


def items() -> torch.Tensor:
    return (batch()["labels"][:, 1:] != -100).sum()


def own_row(model: Any, rank: int) -> Any:
    row = {name: t[rank : rank + 1] for name, t in batch().items()}
    return model(**row, num_items_in_batch=items()).loss * RANKS  # what averages over ranks divides by their number


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


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


SCENARIOS: dict[str, Callable[[int, Any], float]] = {
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


def child(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    found: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        try:
            found[name] = scenario(rank, mesh)
        except BaseException:
            found[name] = traceback.format_exc()
        dist.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found in each scenario: the largest relative error of a gradient, or a traceback."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("gloo is not built in")
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torch.multiprocessing.spawn(child, args=(port, str(folder)), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_of_two_ranks_are_not_those_of_one(scenario: str, found: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(found):
        error = results[scenario]
        assert isinstance(error, float), f"rank {rank}:\n{error}"
        assert error <= LIMIT, f"rank {rank}: {error:.1e}"
