"""Writes docs/hazards.md from the rows of `hazard_table`: `python tests/hazards/hazard_page.py`."""

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

```sh
python -m pytest tests/hazards tests/models tests/ops tests/integration tests/compat      # runs the tests of this page
```

Kernels in a model can fail without an error: a gradient is missing, the loss is not the model's, or another model
changes too. For each such hazard this page describes what happens elsewhere and what tigon does. It names the tests
that fail if tigon stops doing so.

Checked with transformers 5.17.0 and 5.24.0 and torch 2.13.0. *Elsewhere* means Liger Kernel 0.8.5 with transformers
5.17, unless another project is named. *Measured* claims were run with Triton's interpreter on a CPU. *Read in the
source* and *reported* claims were not run. Liger Kernel has found and fixed more of these hazards than any other
project. They are listed because the same mistakes are easy to make in tigon.

This page is generated from `tests/hazards/hazard_table.py`. A test compares the two and checks that every named test
exists.
"""


@functools.cache
def functions_of(file: str) -> dict[str, bool]:
    """Name of each test function of a file below tests/ -> whether it needs a GPU."""
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
    """Returns the text of docs/hazards.md."""
    parts = [_HEADER]
    for section, hazards in SECTIONS.items():
        parts.append(f"## {section}\n")
        parts += [_one(hazard) for hazard in hazards]
    parts.append("## The patcher's cases\n")
    parts.append("| case | input | hazards above |\n|---|---|---|")
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
