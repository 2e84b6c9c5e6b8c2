"""Two processes that compare the gradients of sharded weights with those of one process.

The processes are started once for a test module and run all of its SCENARIOS, name -> function of the rank and the
device mesh: each gives the largest relative error of a gradient. Each rank has one row of the batch, and the loss of
both is divided by the targets of both, as the Trainer does it.
"""

from __future__ import annotations

import importlib
import socket
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS = 2
LIMIT = 2e-5

Scenarios = dict[str, Callable[[int, Any], float]]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Name -> gradient, a sharded one gathered; parameters without one are left out."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


def run(module: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank found in each of the module's SCENARIOS: the error, or a traceback. They meet in `folder`.

    The processes import the module themselves, because functions made in it (lambdas) cannot be sent to them.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("gloo is not built in")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torch.multiprocessing.spawn(_child, args=(module, port, str(folder)), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def _child(rank: int, module: str, port: int, folder: str) -> None:
    scenarios: Scenarios = importlib.import_module(module).SCENARIOS
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    found: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        try:
            found[name] = scenario(rank, mesh)
        except BaseException:
            found[name] = traceback.format_exc()
        dist.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def assert_right(found: Sequence[dict[str, Any]], scenario: str) -> None:
    """Every rank finished the scenario, and no gradient is off by more than LIMIT."""
    for rank, results in enumerate(found):
        error = results[scenario]
        assert isinstance(error, float), f"rank {rank}:\n{error}"
        assert error <= LIMIT, f"rank {rank}: {error:.1e}"
