"""docs/hazards.md equals the table, and every test that it names exists."""

from __future__ import annotations

import pytest
from hazard_page import PAGE, functions_of, render
from hazard_table import CASES, MEASURED, READ, REPORTED, SECTIONS, Hazard

HAZARDS = [hazard for hazards in SECTIONS.values() for hazard in hazards]


def test_page_is_generated_from_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python tests/hazards/hazard_page.py"


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.name)
def test_every_test_that_a_hazard_names_exists(hazard: Hazard) -> None:
    assert hazard.tests
    missing = [test for test in hazard.tests if test.partition("::")[2] not in functions_of(test.partition("::")[0])]
    assert not missing


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.name)
def test_every_hazard_has_a_test_that_runs_without_a_gpu(hazard: Hazard) -> None:
    """Otherwise nothing tests the hazard on machines without a GPU. One hazard exists only on GPUs and is excepted."""
    needs_gpu = [
        functions_of(file).get(name, False) for file, _, name in (test.partition("::") for test in hazard.tests)
    ]
    assert all(needs_gpu) is (hazard.name == "A tensor on another GPU than the current one")


def test_every_claim_about_another_project_has_evidence() -> None:
    for hazard in HAZARDS:
        assert hazard.known in (MEASURED, READ, REPORTED)
        assert hazard.known != REPORTED or hazard.links, hazard.name
        assert all(link.startswith("https://github.com/") for link in hazard.links)


def test_hazards_have_distinct_names_and_cover_every_case() -> None:
    assert len({hazard.name for hazard in HAZARDS}) == len(HAZARDS)
    covered = {case for hazard in HAZARDS for case in hazard.cases}
    assert covered == set(CASES)
