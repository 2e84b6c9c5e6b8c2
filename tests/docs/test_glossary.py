"""docs/glossary.md against the source: its files exist, its identifiers stand in them, and its terms are unique."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("| ")]
TERMS = [row for row in ROWS if row[0] != "term"]


def test_every_row_has_a_term_a_meaning_and_a_file() -> None:
    assert all(len(row) == 3 and all(row) for row in ROWS)


def test_every_term_appears_once() -> None:
    terms = Counter(re.sub(r" \(`.*", "", row[0]).lower() for row in TERMS)
    assert [term for term, n in terms.items() if n > 1] == []


@pytest.mark.parametrize(("term", "meaning", "file"), TERMS, ids=[row[0] for row in TERMS])
def test_identifiers_occur_in_the_named_file(term: str, meaning: str, file: str) -> None:
    path = ROOT / "src" / "tigon" / file
    assert path.is_file(), f"{term}: no file {file}"
    source = path.read_text(encoding="utf-8")
    identifiers = re.findall(r"`(\w+)`", term)
    assert identifiers, f"{term}: no identifier"
    assert [name for name in identifiers if not re.search(rf"\b{name}\b", source)] == []
    assert [name for name in re.findall(r"`([^`]+)`", meaning) if name not in source] == []


def test_classes_and_functions_are_defined_in_the_named_file() -> None:
    """A file that only imports the name is the wrong place to send a reader to."""
    sources = {
        path.relative_to(ROOT / "src" / "tigon").as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "src" / "tigon").rglob("*.py"))
    }
    defined = {name for text in sources.values() for name in re.findall(r"^(?:class|def) (\w+)", text, re.MULTILINE)}
    wrong = [
        (name, file)
        for term, _, file in TERMS
        for name in re.findall(r"`(\w+)`", term)
        if name in defined
        and not re.search(rf"^\s*(?:(?:class|def) {name}\b|{name}\s*[:=])", sources[file], re.MULTILINE)
    ]
    assert not wrong
