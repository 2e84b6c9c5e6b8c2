"""Muon on matrices that FSDP2 divides: the same updates as on whole ones, and half of the states per process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import two_ranks

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch 2.9 has the first Muon")
SHAPES = ((64, 256), (256, 64), (33, 64))


def orthogonalised(gradient: Tensor) -> Tensor:
    """Muon's first update in fp64, with its published coefficients (Keller Jordan, 2024)."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = gradient.double() if len(gradient) <= len(gradient.T) else gradient.double().T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if len(gradient) <= len(gradient.T) else x.T


def off(shape: tuple[int, int], mesh: Any) -> tuple[float, float]:
    """How far the first update of a divided and of a whole matrix are from that in fp64, relative to its norm."""
    from torch.distributed.tensor import Shard, distribute_tensor

    drawn = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape, generator=drawn)
    # with Nesterov momentum the first update is that of (1 - 0.95) G + 0.95 (1 - 0.95) G, a multiple of G
    want = orthogonalised(gradient)
    found = []
    for place in (lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]), lambda tensor: tensor):
        weight = nn.Parameter(place(torch.zeros(shape)))
        weight.grad = place(gradient.clone())
        torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
        moved = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        update = moved.detach().double() / (-0.2 * max(shape) ** 0.5)
        found.append(float((update - want).norm() / want.norm()))
    return found[0], found[1]


def excess(shape: tuple[int, int]) -> Any:
    def scenario(rank: int, mesh: Any) -> float:
        divided, whole = off(shape, mesh)
        assert 0 < whole < 0.03
        return divided / whole

    return scenario


SCENARIOS = {f"{rows}x{columns}": excess((rows, columns)) for rows, columns in SHAPES}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks.run(SCENARIOS, Path(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_update_of_a_divided_matrix_is_as_exact_as_that_of_a_whole_one(
    scenario: str, found: list[dict[str, Any]]
) -> None:
    for of_rank in found:
        assert isinstance(of_rank[scenario], float), of_rank[scenario]
        assert of_rank[scenario] < 2
