"""Predicted memory outside PyTorch's allocator, compared with every measured run."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

from tests.planner.planner_helpers import H200
from tigon.planner.engines.non_allocator_memory import non_allocator_bytes
from tigon.planner.gpus import MIB
from tigon.techniques.keys.settings import Settings

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200"


def measured() -> dict[Settings, list[int]]:
    """The kind of a run -> what each of that kind held."""
    found = defaultdict(list)
    for path in [*RECORDS.glob("study/*.json"), *RECORDS.glob("medusa/*.json")]:
        for row in json.loads(path.read_text(encoding="utf-8"))["points"]:
            if row.get("outside_bytes"):
                keys = row["keys"]
                kind = Settings.of({
                    "sharding.gpus": keys.get("sharding.gpus", 1),
                    "sharding.zero": min(1, keys.get("sharding.zero", 0)),
                    "sharding.fsdp": keys.get("sharding.fsdp", False),
                })  # fmt: skip
                found[kind].append(row["outside_bytes"])
    return found


def test_non_allocator_memory_matches_every_measured_kind_of_run():
    runs = measured()
    assert len(runs) == 6 and sum(map(len, runs.values())) > 200
    for settings, found in runs.items():
        assert abs(non_allocator_bytes(H200, settings) - statistics.median(found)) < 64 * MIB, settings
