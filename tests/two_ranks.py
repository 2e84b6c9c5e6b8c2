"""Two processes that compare the gradients of sharded weights with those of one process.

The processes are forks of this one, made once per test module. They run all of its SCENARIOS, a dict of functions. A
function takes the rank and the device mesh and returns the largest relative error of a gradient. Each rank has one row
of the batch, and the loss of both is divided by the targets of both, as the Trainer does it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forks import in_forks

RANKS = 2
LIMIT = 2e-5

Scenarios = dict[str, Callable[[int, Any], float]]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Name -> gradient, a sharded one gathered; parameters without one are left out."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


def run(scenarios: Scenarios, folder: Path) -> list[dict[str, Any]]:
    """What each rank found in each of the scenarios: the error, or a traceback. They write it into `folder`."""
    if not hasattr(os, "fork") or not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("gloo is not built in, or a process cannot be copied")
    said = folder / "stderr"
    statuses = in_forks(lambda rank: _rank(rank, scenarios, folder), RANKS, said=said)
    assert statuses == [0] * RANKS, said.read_text(encoding="utf-8")[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def _rank(rank: int, scenarios: Scenarios, folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    found: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        try:
            found[name] = scenario(rank, mesh)
        except BaseException:
            found[name] = traceback.format_exc()
        dist.barrier()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def assert_right(found: Sequence[dict[str, Any]], scenario: str) -> None:
    """Every rank finished the scenario, and no gradient is off by more than LIMIT."""
    for rank, results in enumerate(found):
        error = results[scenario]
        assert isinstance(error, float), f"rank {rank}:\n{error}"
        assert error <= LIMIT, f"rank {rank}: {error:.1e}"
