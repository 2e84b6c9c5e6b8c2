"""A report as Markdown."""

from __future__ import annotations

from tigon.report.blocks import (
    Block,
    ChartImage,
    Code,
    Columns,
    Continuations,
    Folded,
    Heading,
    Items,
    Paragraph,
    Report,
    Scripted,
    Tiles,
)
from tigon.report.escape import escape_markdown, fenced
from tigon.report.table import Table


def render(report: Report) -> str:
    """The report as a Markdown document. Charts are files of the folder `charts`."""
    head = [f"# {escape_markdown(report.title)}", escape_markdown(report.lead)]
    return "\n\n".join(filter(None, [*head, *map(_block, report.blocks)])) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escape_markdown(text)}"
        case Paragraph(text):
            return escape_markdown(text)
        case Items(texts):
            return "\n".join(f"- {escape_markdown(text)}" for text in texts)
        case Tiles(figures):
            return "\n".join(f"- {escape_markdown(name)}: **{escape_markdown(value)}**" for name, value in figures)
        case Code(text):
            return fenced(text)
        case Continuations(prompt, texts):
            parts = [("Prompt", prompt), *texts]
            return "\n\n".join(f"{escape_markdown(label)}:\n\n{fenced(text)}" for label, text in parts)
        case ChartImage(name, description):
            return f"![{escape_markdown(description)}](charts/{name}.svg)"
        case Scripted(_, instead):
            return escape_markdown(instead)
        case Columns(parts):
            return "\n\n".join(_block(inner) for part in parts for inner in part)
        case Folded(title, blocks):
            return "\n\n".join([f"### {escape_markdown(title)}", *map(_block, blocks)])
        case Table():
            title = f"### {escape_markdown(block.title)}" if block.title else ""
            return "\n\n".join(filter(None, [title, block.markdown(), escape_markdown(block.note)]))
