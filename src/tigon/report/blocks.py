"""A report as data: a title, a line below it, and blocks. Each block becomes HTML (page.py) and Markdown (markdown.py).

All texts may come from users. They are escaped where they are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tigon.report.table import Table


@dataclass(frozen=True)
class Heading:
    """A heading; level 2 is the highest below the title."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph. A note is smaller and grey on a page."""

    text: str
    is_note: bool = False


@dataclass(frozen=True)
class Items:
    """A list."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Tiles:
    """The main figures as boxes, (name, value) each."""

    figures: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Code:
    """Text whose lines and spaces are kept."""

    text: str


@dataclass(frozen=True)
class Continuations:
    """A prompt, and texts that continue it, as (label, text)."""

    prompt: str
    texts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ChartImage:
    """A chart by its name; see `tigon.report.chart.drawn_twice`."""

    name: str
    description: str
    """For readers who do not see it."""


@dataclass(frozen=True)
class Scripted:
    """A place that the page's script fills. It finds the place by its class."""

    css_class: str
    instead: str = ""
    """What stands there without the script."""


@dataclass(frozen=True)
class Columns:
    """Blocks side by side; on a narrow window one below the other."""

    parts: Sequence[Sequence[Block]]


@dataclass(frozen=True)
class Folded:
    """Blocks behind a title that opens them."""

    title: str
    blocks: Sequence[Block]


Block: TypeAlias = (
    Heading | Paragraph | Items | Tiles | Code | Continuations | ChartImage | Scripted | Columns | Folded | Table
)


@dataclass(frozen=True)
class Report:
    """A whole report."""

    kind: str
    """The word for the title of the browser's window, such as "sweep"."""
    title: str
    lead: str
    """A line below the title; may be empty."""
    blocks: Sequence[Block]
    script: str = ""
    """JavaScript that fills the places of `Scripted`, from `data`."""
    data: Mapping[str, object] = field(default_factory=dict)
    """Values that can be written as JSON, for the script."""


def facts(rows: Sequence[tuple[str, str]], *, numeric: bool = False) -> Table:
    """A table of names with their values. numeric: the values are numbers, and aligned to the right."""
    return Table(("", ""), rows, texts=(0,) if numeric else (0, 1))
