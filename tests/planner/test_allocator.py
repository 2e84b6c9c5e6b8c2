"""The caching allocator's rules, on sequences short enough to follow by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tigon.planner.gpus import find_gpu
from tigon.planner.simulate.allocator import (
    ALLOCATOR_SETTINGS,
    EXPANDABLE,
    CachingAllocator,
    has_expandable_segments,
    sets_expandable_segments,
)
from tigon.techniques.keys.settings import Settings

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

KIB, MIB = 1 << 10, 1 << 20


def test_small_requests_share_a_2_mib_segment() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(512 * KIB) for _ in range(4)]
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MIB, 2 * MIB)
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB
    assert allocator.allocated_bytes == 2 * MIB + 512
    assert len({block.address for block in blocks}) == 4


def test_medium_requests_come_from_a_20_mib_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(5 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(5 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_large_requests_are_rounded_to_2_mib() -> None:
    allocator = CachingAllocator()
    allocator.allocate(11 * MIB)
    assert allocator.reserved_bytes == 12 * MIB
    # what is left over is at most 1 MiB, so it stays with the block
    assert allocator.allocated_bytes == 12 * MIB


def test_best_fitting_free_block_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.free(large, small=False)
    allocator.free(small, small=False)
    assert allocator.allocate(30 * MIB).address == small.address
    assert allocator.allocate(64 * MIB).address == large.address
    assert allocator.reserved_bytes == 96 * MIB


def test_split_block_fragments_memory_until_its_pieces_merge() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(64 * MIB)
    allocator.free(block, small=False)
    piece = allocator.allocate(12 * MIB)
    allocator.allocate(64 * MIB)  # 52 MiB are left of the first segment
    assert allocator.reserved_bytes == 128 * MIB
    allocator.free(piece, small=False)
    allocator.allocate(64 * MIB)  # and merge with the piece again
    assert allocator.reserved_bytes == 128 * MIB


def test_free_neighbours_merge_in_any_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        allocator = CachingAllocator()
        pieces = [allocator.allocate(6 * MIB) for _ in range(3)]
        for index in order:
            allocator.free(pieces[index], small=False)
        allocator.allocate(19 * MIB)
        assert allocator.reserved_bytes == 20 * MIB, order
        assert allocator.allocated_bytes == 20 * MIB


def test_full_device_gives_back_free_segments() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    block = allocator.allocate(60 * MIB)
    allocator.free(block, small=False)
    allocator.allocate(80 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    assert allocator.peak_reserved_bytes == 80 * MIB


def test_stream_reuses_no_block_of_another_but_releases_it_on_a_full_device() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    others = allocator.allocate(40 * MIB, stream=1)
    allocator.free(others, small=False)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    allocator.allocate(50 * MIB)  # there is room once the other stream's block is given back
    assert allocator.reserved_bytes == 90 * MIB


def test_expandable_segments_reserve_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pieces of which the outer ones are free again: without the setting, 25 MiB need a segment of their own."""
    reserved = {}
    for setting in ("", "expandable_segments:True,garbage_collection_threshold:0.8"):
        monkeypatch.setenv(ALLOCATOR_SETTINGS, setting)
        allocator = CachingAllocator(expandable=has_expandable_segments())
        pieces = [allocator.allocate(20 * MIB) for _ in range(3)]
        allocator.free(pieces[0], small=False)
        allocator.free(pieces[2], small=False)
        allocator.allocate(25 * MIB)
        reserved[setting] = allocator.peak_reserved_bytes
    assert list(reserved.values()) == [86 * MIB, 62 * MIB]  # 60 MiB in use, and the rest of their pages


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_settings_of_the_users_own_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long_row = Settings.of({"train.checkpointing": "offload"})
    assert sets_expandable_segments(long_row, find_gpu("rtx-4090")) and not has_expandable_segments()
    for given in (EXPANDABLE, "max_split_size_mb:512"):
        monkeypatch.setenv(name, given)
        assert not sets_expandable_segments(long_row, None) and has_expandable_segments() == (given == EXPANDABLE)


@pytest.mark.parametrize(
    ("keys", "gpu", "sets"),
    [
        ({"train.checkpointing": "offload-attention"}, "h100", True),
        ({"lora.rank": 16, "lora.base_offload": True, "train.checkpointing": "full"}, "8GB", True),
        ({"train.checkpointing": "full"}, "h100", False),
        ({"train.checkpointing": "offload"}, "mi300x", False),
        ({"train.checkpointing": "offload", "sharding.gpus": 2}, "h100", False),
        ({"train.checkpointing": "offload", "sharding.fsdp": True}, "h100", False),
        ({"train.checkpointing": "offload", "sharding.zero": 3}, "h100", False),
    ],
)
def test_expandable_segments_are_for_one_nvidia_gpu_with_tensors_on_the_host(keys, gpu, sets) -> None:
    assert sets_expandable_segments(Settings.of(keys), find_gpu(gpu)) == sets


@pytest.mark.parametrize(
    "record", sorted(RESULTS.glob("nvidia-h*/planner/long-rows*.json")), ids=lambda path: path.stem
)
def test_long_rows_held_about_what_is_counted_with_expandable_segments(record: Path) -> None:
    """Those with much room keep pages that they could return."""
    for row in json.loads(record.read_text(encoding="utf-8"))["rows"]:
        if "measured" not in row:
            continue
        allocator = CachingAllocator(expandable=True)
        allocator.allocate(row["measured"]["peak_allocated_bytes"])
        reserved_bytes = row["measured"]["peak_reserved_bytes"]
        assert allocator.peak_reserved_bytes == pytest.approx(reserved_bytes, rel=0.03), row["tokens"]
