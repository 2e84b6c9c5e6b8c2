"""The diagram of docs/architecture.md: which package imports which, read from the files of src/tigon."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tigon"


def levels() -> list[list[str]]:
    """The packages from top to bottom, as CONTRIBUTING.md documents them and tests/test_architecture.py checks them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^`(\w.* -> .*)`$", text, re.MULTILINE)
    return [entry.split(" | ") for entry in line.split(" -> ")]


def imports() -> dict[str, set[str]]:
    """Package -> packages that one of its files imports, inside functions too."""
    packages = [package for level in levels() for package in level]
    found: dict[str, set[str]] = {package: set() for package in packages}
    for package in packages:
        folder = SOURCE / package
        for file in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                found[package] |= {name.split(".")[1] for name in names if name.startswith("tigon.")}
        found[package] &= set(packages) - {package}
    return found


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The edges without those that another path implies."""

    def below(package: str) -> set[str]:
        return edges[package].union(*(below(other) for other in edges[package]))

    return {package: others - set().union(*(below(one) for one in others)) for package, others in edges.items()}


def mermaid() -> str:
    """The diagram as a fenced block of Mermaid, which GitHub and the site draw."""
    edges = reduced(imports())
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"    {package} --> {other}" for package in edges for other in sorted(edges[package])]
    return "\n".join([*lines, "```"])
