"""The parts of a page that a script writes, each between two comments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path


def written(text: str, topic: str, parts: Mapping[str, Callable[[], str]], document: Path) -> str:
    """`text` of `document` with each part between `<!-- TOPIC: NAME -->` and `<!-- /TOPIC: NAME -->` written again.

    Raises:
        SystemExit: a part has no such region, or several.
    """
    for name, part in parts.items():
        between = re.compile(rf"(<!-- {topic}: {name} -->\n).*?(<!-- /{topic}: {name} -->)", re.DOTALL)
        table = part()
        text, count = between.subn(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{document} has {count} regions `{topic}: {name}`; it must have one")
    return text
