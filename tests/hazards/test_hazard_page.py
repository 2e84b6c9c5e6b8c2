"""docs/hazards.md says what the table says, and every test it names exists."""

from __future__ import annotations

import pytest
from hazard_page import PAGE, functions_of, render
from hazard_table import CASES, MEASURED, READ, REPORTED, SECTIONS, Hazard

HAZARDS = [hazard for hazards in SECTIONS.values() for hazard in hazards]


def test_page_is_out_of_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python tests/hazards/hazard_page.py"


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.name)
def test_hazard_names_a_test_that_does_not_exist(hazard: Hazard) -> None:
    assert hazard.tests
    missing = [test for test in hazard.tests if test.partition("::")[2] not in functions_of(test.partition("::")[0])]
    assert not missing


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.name)
def test_hazard_is_shown_on_a_gpu_alone(hazard: Hazard) -> None:
    """On other machines the suite would say nothing about it. What only a GPU can get wrong is excepted by name."""
    needs_gpu = [
        functions_of(file).get(name, False) for file, _, name in (test.partition("::") for test in hazard.tests)
    ]
    assert all(needs_gpu) is (hazard.name == "A tensor on another GPU than the current one")


def test_claim_about_another_project_has_no_evidence() -> None:
    for hazard in HAZARDS:
        assert hazard.known in (MEASURED, READ, REPORTED)
        assert hazard.known != REPORTED or hazard.links, hazard.name
        assert all(link.startswith("https://github.com/") for link in hazard.links)


def test_two_hazards_have_one_name_or_a_case_has_none() -> None:
    assert len({hazard.name for hazard in HAZARDS}) == len(HAZARDS)
    covered = {case for hazard in HAZARDS for case in hazard.cases}
    assert covered == set(CASES)
