"""A table of texts, for a page, for Markdown and for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tigon.report.escape import escape_markdown

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Table:
    """Column titles and rows of cells. A table whose titles are all empty has no header on a page."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[int] = (0,)
    """The columns of text, which are aligned to the left. The others are aligned to the right."""
    title: str = ""
    note: str = ""
    """A sentence below the table."""

    def markdown(self) -> str:
        """The table as Markdown, with escaped texts."""
        titles, *cells = [[escape_markdown(cell) for cell in row] for row in (self.columns, *self.rows)]
        return markdown_table(titles, cells, texts=self.texts)

    def show(self, console: Console) -> None:
        """Print the table under its title. Cells are texts without rich's markup."""
        from rich.table import Table as RichTable
        from rich.text import Text

        if self.title:
            console.print(f"\n{self.title}", markup=False, style="bold")
        printed = RichTable(box=None, header_style="bold", pad_edge=False)
        for number, name in enumerate(self.columns):
            printed.add_column(Text(name), justify="left" if number in self.texts else "right", overflow="fold")
        for row in self.rows:
            printed.add_row(*map(Text, row))
        console.print(printed)


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Sequence[int] | None = None) -> str:
    """A Markdown table whose cells are Markdown already. texts: as those of a `Table`; None: all columns are text."""
    alignment = ["---" if texts is None or number in texts else "---:" for number in range(len(titles))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, alignment, *rows))
