"""docs/cluster-plans.md says what the arithmetic predicts for the published runs."""

from __future__ import annotations

import statistics

import pytest

pytest.importorskip("transformers")

from benchmarks.pages import cluster_plans
from benchmarks.pages.published_clusters import RUNS, SOURCES

ROWS = cluster_plans.compared()


def test_tables_are_those_of_the_published_runs() -> None:
    text = cluster_plans.DOCUMENT.read_text(encoding="utf-8")
    assert cluster_plans.page(text) == text, "make pages writes them again"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_published_run_uses_all_its_gpus_and_samples(run) -> None:
    division = run.division
    assert division.gpus == run.cluster.gpus
    assert division.data * division.micro_batch * division.accumulate == run.work.samples


@pytest.mark.parametrize(
    ("name", "billions"),
    [("GPT 18.4B", 18.4), ("GPT 145.6B", 145.6), ("GPT 1008B", 1008.0), ("MPT 70B", 64.862), ("MPT 13B", 12.854),
     ("llama-3.1-405b", 405.85)],
)  # fmt: skip
def test_shapes_have_the_published_parameters(name, billions) -> None:
    (numel,) = {run.work.shape.numel for run in RUNS if run.work.shape.name == name}
    assert numel / 1e9 == pytest.approx(billions, rel=5e-3)


def test_every_source_names_title_place_and_address_and_has_runs() -> None:
    assert {run.source for run in RUNS} == set(SOURCES) and len(RUNS) >= 6
    assert all(source.title and source.place and source.url.startswith("https://") for source in SOURCES)


def test_predictions_stay_as_near_to_the_published_times_as_the_page_says() -> None:
    """Half of the runs are within a fifth. The page explains the others."""
    errors = [abs(row.time_error) for row in ROWS]
    assert statistics.median(errors) < 0.20
    assert max(errors) < 0.80, "ZeRO-3 over 192 nodes"


def test_error_of_a_rate_is_that_of_its_time() -> None:
    """Twice the published tokens per second is half the time."""
    rate = next(row for row in ROWS if row.run.metric == "tokens/s per GPU")
    assert rate.time_error == pytest.approx(rate.run.value / rate.predicted - 1)
    time = next(row for row in ROWS if row.run.metric == "seconds per step")
    assert time.time_error == pytest.approx(time.predicted / time.run.value - 1)
