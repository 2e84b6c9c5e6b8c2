"""Writes the tables of names in docs/liger.md: `PYTHONPATH=src:tests python tests/compat/liger_page.py`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tigon.compat.liger.absent import ABSENT, Absent, row_of
from tigon.compat.liger.offered import OFFERED

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "liger.md"
BEGIN, END = "<!-- from tests/compat/liger_names.json -->", "<!-- end of the names -->"

NAMES: dict[str, list[str]] = {
    module: names.split()
    for module, names in json.loads((Path(__file__).parent / "liger_names.json").read_text(encoding="utf-8")).items()
}
"""Module of liger-kernel 0.8.5, without `liger_kernel.`, and its public names."""

# Longer lists of names are given as patterns.
LONGEST = 40


def _dotted() -> list[str]:
    return [
        name if module == "liger_kernel" else f"{module}.{name}" for module, names in NAMES.items() for name in names
    ]


def tables() -> str:
    """The three tables, between their markers."""
    counts = ["| package of liger_kernel | public names | offered |", "|---|---|---|"]
    packages = {module.partition(".")[0] for module in NAMES}
    for package in sorted(packages, key=lambda p: (p != "transformers", p)):
        pairs = [(module, name) for module in NAMES if module.partition(".")[0] == package for name in NAMES[module]]
        offered = sum(name in OFFERED.get(f"liger_kernel.{module}", {}) for module, name in pairs)
        counts.append(f"| `{package}` | {len(pairs)} | {offered} |")
    absent = ["| absent | names | reason |", "|---|---|---|", *(_row(row) for row in ABSENT)]
    return "\n".join([BEGIN, *_offered(), "", *counts, "", *absent, END])


def _offered() -> list[str]:
    """The offered names of each module. A package has most names of its modules too."""
    rows = ["| module of liger_kernel | offered |", "|---|---|"]
    for module, names in sorted(OFFERED.items()):
        prefix = f"{module}."
        in_modules = {name for other, more in OFFERED.items() if other.startswith(prefix) for name in more}
        apply = [name for name in names if name.startswith("apply_liger_kernel_to_")]
        listed = sorted(set(names) - set(apply) - in_modules)
        if apply and module.endswith("monkey_patch"):
            listed.insert(0, "apply_liger_kernel_to_*")
        if listed:
            rows.append(f"| `{module.removeprefix('liger_kernel.')}` | {', '.join(f'`{name}`' for name in listed)} |")
    return rows


def _row(row: Absent) -> str:
    names = [name for name in _dotted() if row_of(name) is row]
    # A package re-exports names of its modules; one mention is enough.
    short = sorted(Counter(name.rpartition(".")[2] for name in names))
    listed = short if len(short) <= LONGEST else row.names.split()
    return f"| {', '.join(f'`{name}`' for name in listed)} | {len(names)} | {row.reason} |"


def render(text: str) -> str:
    """The page's text with its tables written again."""
    before, _, rest = text.partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPOSITORY)}")
