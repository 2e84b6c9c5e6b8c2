"""The site's navigation: a page that it lacks would fail `make site`, which is not part of `make test`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_navigation_lists_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"[\w./-]+\.md", text[text.index("\nnav:") :])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert pages <= set(listed), pages - set(listed)


def test_strict_build_says_what_it_finds() -> None:
    """`mkdocs build --strict --quiet` ends with 0 whatever is wrong: it counts the warnings that it does not print."""
    (command,) = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert "--strict" in command and "--quiet" not in command
