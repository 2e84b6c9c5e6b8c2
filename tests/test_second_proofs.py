"""`make test` runs every test but the second proofs, and `make test-all` and CI run those too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from second_proofs import COLLECTED, MARKER, one_of_each, proved_by

ROOT = Path(__file__).parents[1]
WHOLE_SUITE = 10_000
"""Tests at least, if the whole suite was collected."""


def recipe_of(target: str) -> str:
    """The command of a target of the Makefile, with the variable for pytest in it."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (pytest_command,) = re.findall(r"^PYTEST := (.*)$", makefile, re.MULTILINE)
    (command,) = re.findall(rf"^{target}:.*\n\t(.*)$", makefile, re.MULTILINE)
    return command.replace("$(PYTEST)", pytest_command)


def test_make_test_all_runs_what_make_test_leaves_out() -> None:
    """The two commands differ in the marker alone, so the first set and the second set make up all tests."""
    assert recipe_of("test") == f'{recipe_of("test-all")} -m "not {MARKER}"'
    assert " -m " not in recipe_of("test-all").partition("-m pytest")[2]


@pytest.mark.parametrize(
    ("file", "target"),
    [(".ci/run", "test-all"), (".github/workflows/ci.yml", "test-all"), (".github/workflows/nightly.yml", "nightly")],
)
def test_ci_runs_every_test(file: str, target: str) -> None:
    if not (ROOT / file).exists():
        pytest.skip("the sdist has no settings of services")
    found = re.findall(r"make (test\S*|nightly)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert found == [target]


def test_nightly_run_leaves_no_test_out() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^nightly:.*\n(?:\t.*\n)*?\t\$\(PYTEST\) --junitxml=\$\(NIGHTLY\)$", makefile, re.MULTILINE)


def test_suite_has_first_and_second_proofs(request: pytest.FixtureRequest) -> None:
    first, second = request.config.stash[COLLECTED]
    if first + second < WHOLE_SUITE:
        pytest.skip("counts the tests of the whole suite, and a part of it was collected")
    assert second >= 100 and first > second
    expected = {"": first + second, f"not {MARKER}": first}
    expression = request.config.getoption("markexpr")
    if expression in expected and not request.config.getoption("keyword"):
        assert len(request.session.items) == expected[expression]


def test_values_outside_the_first_proof_are_marked_with_the_reason() -> None:
    values = ["aa", "ab", "ba"]
    first = one_of_each(values, lambda value: value[0])
    assert first == ["aa", "ba"]
    marked = {parameter.id: parameter.marks for parameter in proved_by(first, values, "begins alike")}
    assert {name: [(mark.name, mark.args) for mark in marks] for name, marks in marked.items()} == {
        "aa": [], "ab": [(MARKER, ("begins alike",))], "ba": [],
    }  # fmt: skip
    with pytest.raises(AssertionError, match="nothing is left"):
        proved_by(values, values, "all")
