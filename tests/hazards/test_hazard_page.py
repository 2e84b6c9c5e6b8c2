"""Each hazard of docs/hazards.md has evidence, and tests that exist and run without a GPU."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "hazards.md").read_text(encoding="utf-8")
HAZARDS_TEXT, _, CASES_TEXT = PAGE.partition("## The patcher's cases")
NAMES = re.findall(r"^### (.*)", HAZARDS_TEXT, re.MULTILINE)
TEXTS = dict(zip(NAMES, re.split(r"^### .*", HAZARDS_TEXT, flags=re.MULTILINE)[1:], strict=True))
ONLY_ON_GPUS = "A tensor on another GPU than the current one"


@functools.cache
def functions_of(file: str) -> dict[str, bool]:
    """Name of each test function of a file -> whether it needs a GPU."""
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.dump(node)]
    whole_file = any("mark.gpu" in ast.unparse(mark) for mark in marks)
    return {
        node.name: whole_file or any(ast.unparse(d) == "pytest.mark.gpu" for d in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_test_that_a_hazard_names_exists_and_one_runs_without_a_gpu(name: str) -> None:
    tests = re.findall(r"^- `(tests/.*)::(test_\w+)`( \(needs a GPU\))?$", TEXTS[name], re.MULTILINE)
    assert len(tests) == TEXTS[name].count("\n- ") > 0
    assert [(test, functions_of(file).get(test)) for file, test, _ in tests] == [(t, bool(gpu)) for _, t, gpu in tests]
    assert all(gpu for *_, gpu in tests) is (name == ONLY_ON_GPUS)


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_about_another_project_has_evidence(name: str) -> None:
    known = re.search(
        r"^\*Elsewhere\* \((measured|read in the\ssource|reported)((?:;\s\[[^]]*\]\([^)]*\))*)\):", TEXTS[name], re.M
    )
    assert known and "*Here*: " in TEXTS[name]
    links = re.findall(r"\]\(([^)]*)\)", known[2])
    assert known[1] != "reported" or links
    assert all(link.startswith("https://github.com/") for link in links)


def test_every_case_names_hazards_of_the_page() -> None:
    cases = re.findall(r"^\| (P\d\d) \| [^|]* \| (.*) \|$", CASES_TEXT, re.MULTILINE)
    assert len(set(NAMES)) == len(NAMES)
    assert [case for case, _ in cases] == [f"P{number:02}" for number in range(1, 12)]
    assert {hazard for _, hazards in cases for hazard in hazards.split("; ")} <= set(NAMES)
