"""The host's memory under DeepSpeed's offload, beside what was resident on an H200's host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.pages.sweep_accuracy import case_of, recipe_of
from tigon.planner.engines import deepspeed_host_memory
from tigon.planner.gpus import GIB, find_gpu
from tigon.trainer import model as models
from tigon.trainer.guards import prediction

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200" / "study"
OWN_BYTES = int(2.3 * GIB)  # of a process with PyTorch, CUDA and the kernels, whatever it trains
RUNS = [
    ("techniques", "zero-offload-cpu", 0.02),
    ("techniques", "zero-offload-nvme", 0.13),
    ("ladder", "ZeRO-3 with CPU offload instead", 0.05),
    ("batch", "tigon batch_size=8", 0.11),
    ("longest-sequence", "layers in pieces sequence_length=393216", 0.06),
]


@pytest.mark.parametrize(("sweep", "name", "tolerance"), RUNS, ids=lambda value: str(value))
def test_planned_host_memory_matches_the_measured_resident_memory(sweep, name, tolerance, tmp_path):
    results = json.loads((RESULTS / f"{sweep}.json").read_text(encoding="utf-8"))
    row = next(row for row in results["points"] if row["id"] == name)
    recipe = recipe_of(case_of(results, row), tmp_path)
    precision = "amp-bf16" if recipe.train.precision == "auto" else recipe.train.precision
    settings, config = recipe.settings(precision=precision), models.load_config(recipe.model)
    found = prediction.predict(recipe, config, settings, find_gpu("h200"), evaluated=False).option.estimate
    measured_bytes = row["peak_resident_bytes"] - OWN_BYTES
    assert found.host_bytes == pytest.approx(measured_bytes, rel=tolerance)
    if settings.sharding.offload == "nvme":  # 21 GiB of a tmpfs were used, which counts whole ones up
        assert 20 * GIB < found.nvme_bytes < 21 * GIB


def test_pinned_block_is_rounded_up_to_a_power_of_two():
    assert [deepspeed_host_memory.pinned(nbytes) for nbytes in (0, 1, 512, 513, 3 << 30)] == [0, 1, 512, 1024, 4 << 30]
