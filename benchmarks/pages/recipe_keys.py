"""The tables of recipe keys in docs/recipe.md:

    python -m benchmarks.pages.recipe_keys

A key's meaning is the docstring below its field.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from tigon.recipe.aliases import ALIASES, SHARED
from tigon.recipe.keys import SECTIONS, fields_of
from tigon.report.table import markdown_table
from tigon.techniques.keys.section import MAX_COUNT, Section, hints, limits_text, type_name

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipe.md"


def meanings(section: type[Section]) -> Mapping[str, str]:
    """Key -> its docstring, of a section and of those that it inherits."""
    found: dict[str, str] = {}
    for cls in (one for one in section.__mro__ if issubclass(one, Section)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, doc in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = " ".join(str(doc.value.value).split())
    return found


def reference_table() -> str:
    """The Markdown tables of docs/recipe.md, one per section."""
    parts = []
    for section, cls in SECTIONS.items():
        parts.append(f"### `{section}`\n\n{cls.__doc__}\n\n| key | type | default | meaning |\n|---|---|---|---|")
        meaning = meanings(cls)
        for f in fields_of(cls):
            limits = limits_text(f.metadata).replace(f" and at most {MAX_COUNT:,}", "")  # said once, above the tables
            words = meaning[f.name] + (f" {limits[0].upper()}{limits[1:]}." if limits else "")
            kind = type_name(hints(cls)[f.name])
            parts.append(f"| `{section}.{f.name}` | {kind} | `{_yaml_scalar(f.default)}` | {words} |")
        parts.append("")
    return "\n".join(parts)


def _yaml_scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return "[" + ", ".join(_yaml_scalar(item) for item in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def alias_table() -> str:
    """The Markdown table of other libraries' names for recipe keys."""
    rows = [
        (
            f"`{alias.name}`",
            alias.of,
            f"`{alias.key}`",
            ", ".join(f"`{str(a).lower()}`: `{b}`" for a, b in alias.values.items()),
        )
        for alias in ALIASES.values()
    ]
    rows += [(f"`{name}`", "the same name", f"`{key}`", "") for name, key in SHARED.items()]
    return markdown_table(("name", "of", "recipe key", "values"), rows)


if __name__ == "__main__":
    regions.write_between(
        reference_table().rstrip(), DOCUMENT, begin="<!-- recipe keys -->", end="<!-- end of recipe keys -->"
    )
