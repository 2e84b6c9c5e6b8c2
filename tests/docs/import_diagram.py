"""The diagram of docs/architecture.md: which package imports which, read from the files of src/tigon."""

from __future__ import annotations

from tests.test_architecture import FILES, documented_order, room_of, rooms_imported


def imports() -> dict[str, set[str]]:
    """Package -> packages that one of its files imports, inside functions too."""
    packages = [package for entry in documented_order()[1:] for package in entry]
    found: dict[str, set[str]] = {package: set() for package in packages}
    for path in FILES:
        if room_of(path) in found:
            found[room_of(path)] |= rooms_imported(path) & (found.keys() - {room_of(path)})
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
