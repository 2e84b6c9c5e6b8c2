"""Patched vision towers equal the unpatched ones: their models' tests pass text alone."""

from __future__ import annotations

import copy

import pytest
import torch
from models_helpers import too_old

import tigon
from tigon.models.table import MODELS
from tigon.models.verification.tiny import tiny_model

pytestmark = pytest.mark.skipif(too_old("5.17"), reason="older code of transformers cannot run so small a tower")

GRID = torch.tensor([[1, 4, 6], [1, 2, 4]])
"""Two images of different sizes, in patches."""


def _run(tower: torch.nn.Module, pixels: torch.Tensor) -> list[torch.Tensor]:
    """The tower's result and its gradients, in fp64."""
    pixels = pixels.clone().requires_grad_()
    result = tower(pixels, grid_thw=GRID)
    result = result if isinstance(result, torch.Tensor) else result.pooler_output
    result = torch.cat(list(result)) if isinstance(result, (list, tuple)) else result
    result.square().mean().backward()
    named = [(name, p.grad) for name, p in tower.named_parameters()]
    assert all(grad is not None for _, grad in named)
    return [x.double() for x in (result.detach(), pixels.grad, *(grad for _, grad in named))]


def _towers() -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    plain = tiny_model("qwen2_5_vl", MODELS["qwen2_5_vl"].tiny)
    patched = copy.deepcopy(plain)
    report = tigon.patch(patched)
    assert ("rope", "Qwen2_5_VLVisionAttention") in {(entry.op, entry.cls) for entry in report.replaced}
    config = plain.model.visual.config
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels = torch.randn(int(GRID.prod(-1).sum()), patch)
    return plain.model.visual, patched.model.visual, pixels


def test_patched_vision_tower_equals_the_unpatched_one_in_fp32() -> None:
    plain, patched, pixels = _towers()
    for ours, theirs in zip(_run(patched, pixels), _run(plain, pixels), strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-12


def test_patched_vision_tower_is_as_accurate_as_the_unpatched_one_in_bf16() -> None:
    plain, patched, pixels = _towers()
    truth = _run(copy.deepcopy(plain).double(), pixels.double())
    theirs, ours = (_run(tower.bfloat16(), pixels.bfloat16()) for tower in (plain, patched))
    for exact, one, other in zip(truth, ours, theirs, strict=True):
        assert (one - exact).norm() <= 2 * (other - exact).norm() + 2**-8 * exact.norm()
