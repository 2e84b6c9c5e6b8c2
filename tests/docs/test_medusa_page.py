"""The measured part of docs/medusa.md shows the figures of the records."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> Any:
    return importlib.import_module("benchmarks.pages.medusa")


def point(variant: str, tokens: int, status: str = "ok", gib: float = 0.0, speed: float = 0.0) -> dict[str, Any]:
    return {
        "variant": variant, "axes": {"data.sequence_length": tokens}, "status": status,
        "peak_allocated_bytes": gib * 2**30, "tokens_per_s": speed, "predicted_allocated_bytes": 30.0 * 2**30,
    }  # fmt: skip


def record() -> dict[str, Any]:
    eager, fused = "stage 1, 3 heads, eager", "stage 1, 3 heads, fused"
    return {
        "name": "medusa",
        "variants": [eager, fused],
        "environment": {
            "device": "A GPU", "driver": "580.1", "versions": {"torch": "2.11", "triton": None},
            "tigon_commits": ["0123abc"], "dates": ["2026-11-21"],
        },
        "points": [
            point(eager, 1024, gib=40.5, speed=1000.4), point(eager, 2048, "out of memory"),
            point(fused, 1024, gib=30.25, speed=2000.0), point(fused, 2048, gib=31.0, speed=2100.0),
        ],
    }  # fmt: skip


def test_block_shows_the_figures_of_the_record(tool: Any) -> None:
    drawn: dict[Path, str] = {}
    said = tool.block("medusa", {"a-gpu": {"medusa": record()}}, drawn)
    assert "A GPU (driver 580.1), torch 2.11; tigon at commit 0123abc; 2026-11-21." in said
    assert "| stage 1, 3 heads | 1,024 | 40.5 | 30.2 | 30.0 | 1,000 | 2,000 |" in said
    assert "| stage 1, 3 heads | 2,048 | out of memory | 31.0 | 30.0 |  | 2,100 |" in said
    assert "- stage 1, 3 heads: eager 1,024 tokens; fused 2,048 tokens (nothing longer was tried)" in said
    assert list(drawn) == [Path("img/medusa/a-gpu/medusa.svg")]
    chart = drawn[Path("img/medusa/a-gpu/medusa.svg")]
    assert chart.startswith("<svg") and "peak memory (GiB)" in chart and "tokens/s" in chart


def test_committed_page_matches_the_committed_records(tool: Any) -> None:
    text = tool.DOCUMENT.read_text(encoding="utf-8")
    new, drawn = tool.page(text, tool.load(tool.RECORDS, "medusa"))
    assert new == text, "run python -m benchmarks.pages.medusa"
    for path, svg in drawn.items():
        assert (tool.DOCUMENT.parent / path).read_text(encoding="utf-8") == svg
