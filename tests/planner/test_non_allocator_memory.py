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

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORDS = RESULTS / "nvidia-h200"


def measured() -> dict[Settings, list[int]]:
    """The kind of a run -> what each of that kind held. With an engine, copies to the host make no kind."""
    found = defaultdict(list)
    for path in [*RECORDS.glob("study/*.json"), *RECORDS.glob("medusa/*.json")]:
        for row in json.loads(path.read_text(encoding="utf-8"))["points"]:
            if row.get("outside_bytes"):
                keys = row["keys"]
                sharding = {
                    "sharding.gpus": keys.get("sharding.gpus", 1),
                    "sharding.zero": min(1, keys.get("sharding.zero", 0)),
                    "sharding.fsdp": keys.get("sharding.fsdp", False),
                }
                copies = list(sharding.values()) == [1, 0, False] and keys.get("train.checkpointing") == "offload"
                kind = Settings.of(sharding | ({"train.checkpointing": "offload"} if copies else {}))
                found[kind].append(row["outside_bytes"])
    return found


def test_non_allocator_memory_matches_every_measured_kind_of_run():
    runs = measured()
    copies = runs.pop(Settings.of({"train.checkpointing": "offload"}))
    assert len(runs) == 6 and sum(map(len, runs.values())) > 200 and len(copies) == 5
    for settings, found in runs.items():
        assert abs(non_allocator_bytes(H200, settings) - statistics.median(found)) < 64 * MIB, settings


def test_runs_that_copy_to_the_host_hold_at_most_a_little_more_than_is_counted():
    found = measured()[Settings.of({"train.checkpointing": "offload"})]
    for path in RESULTS.glob("nvidia-*/planner/long-rows*.json"):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found += [row["measured"]["non_allocator_bytes"] for row in rows if "measured" in row]
    assert len(found) == 12
    for keys in ({"train.checkpointing": "offload-attention"}, {"lora.base_offload": True}):
        counted = non_allocator_bytes(H200, Settings.of(keys))
        assert min(found) > non_allocator_bytes(H200, Settings())
        assert statistics.median(found) <= counted and max(found) < counted + 64 * MIB, keys
