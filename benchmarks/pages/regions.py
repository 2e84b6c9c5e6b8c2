"""The parts of a page that a script writes, each between two comments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tigon.errors import UsageError


def put(text: str, begin: str, end: str, inside: str) -> str:
    """`text` with `inside` between the line `begin` and the next `end`. Raises UsageError without them."""
    between = re.compile(rf"({re.escape(begin)}\n)(?:.*?\n)??({re.escape(end)})", re.DOTALL)
    if not between.search(text):
        raise UsageError(f"the document has no lines {begin} ... {end}; add them where the table should go.")
    return between.sub(lambda found: f"{found[1]}{inside}\n{found[2]}", text, count=1)


def read_document(document: Path, *, begin: str, end: str) -> str:
    """The document's text. Raises UsageError if it cannot be read or lacks the markers."""
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{document} cannot be read: {error.strerror}.") from None
    put(text, begin, end, "")
    return text


def write_between(inside: str, document: Path, *, begin: str, end: str) -> None:
    """Write the text between the document's markers. Raises UsageError without the markers."""
    text = read_document(document, begin=begin, end=end)
    document.write_text(put(text, begin, end, inside), encoding="utf-8")


def written(text: str, topic: str, parts: Mapping[str, Callable[[], str]], document: Path) -> str:
    """`text` of `document` with each part between `<!-- TOPIC: NAME -->` and `<!-- /TOPIC: NAME -->` written again.

    Raises:
        SystemExit: a part has no such region, or several.
    """
    for name, part in parts.items():
        begin, end = f"<!-- {topic}: {name} -->", f"<!-- /{topic}: {name} -->"
        if (count := text.count(f"{begin}\n")) != 1 or end not in text:
            raise SystemExit(f"{document} has {count} regions `{topic}: {name}`; it must have one")
        text = put(text, begin, end, part())
    return text
