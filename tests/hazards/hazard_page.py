"""docs/hazards.md from the rows of `hazard_table`: `python tests/hazards/hazard_page.py` writes it."""

from __future__ import annotations

import ast
import functools
import textwrap
from pathlib import Path

from hazard_table import CASES, SECTIONS, Hazard

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "hazards.md"

_HEADER = """\
# Hazards

Putting kernels into a model can go wrong without an error: a gradient that is missing, a loss that is not the model's,
another model that changes too. This page lists such ways, what happens elsewhere, what tigon does instead, and the
tests that fail if it stops doing so. It is made from `tests/hazards/hazard_table.py`; a test compares the two and looks
for every test named here.

*Elsewhere* is Liger Kernel 0.8.5 with transformers 5.17, unless another project is named. *Measured* was run, with
Triton's interpreter on a CPU; *read in the source* and *reported* were not. The point is not the other project, which
found and fixed more of these than any: each row is a mistake that is easy to make again here.

Run the tests of this page with `python -m pytest tests/hazards tests/models tests/ops tests/integration`.
"""


@functools.cache
def functions_of(file: str) -> dict[str, bool]:
    """The test functions of a file below tests/, and whether each needs a GPU."""
    path = REPOSITORY / "tests" / file
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.dump(node)]
    whole_file = any("mark.gpu" in ast.unparse(mark) for mark in marks)
    return {
        node.name: whole_file or any(ast.unparse(d) == "pytest.mark.gpu" for d in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def render() -> str:
    """The page."""
    parts = [_HEADER]
    for section, hazards in SECTIONS.items():
        parts.append(f"## {section}\n")
        parts += [_one(hazard) for hazard in hazards]
    parts.append("## The patcher's cases\n")
    parts.append("| case | input | where above |\n|---|---|---|")
    by_case = {case: [h.name for hs in SECTIONS.values() for h in hs if case in h.cases] for case in CASES}
    parts += [f"| {case} | {text} | {'; '.join(by_case[case])} |" for case, text in CASES.items()]
    return "\n".join(parts) + "\n"


def _one(hazard: Hazard) -> str:
    links = "".join(f"; [{link.split('/')[-3]}#{link.split('/')[-1]}]({link})" for link in hazard.links)
    tests = []
    for test in hazard.tests:
        file, _, function = test.partition("::")
        gpu = " (needs a GPU)" if functions_of(file).get(function) else ""
        tests.append(f"- `tests/{file}::{function}`{gpu}")
    paragraphs = (f"*Elsewhere* ({hazard.known}{links}): {hazard.elsewhere}", f"*Here*: {hazard.here}")
    wrapped = (textwrap.fill(p, 120, break_long_words=False, break_on_hyphens=False) for p in paragraphs)
    return "\n\n".join((f"### {hazard.name}", *wrapped, "\n".join(tests) + "\n"))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPOSITORY)}")
