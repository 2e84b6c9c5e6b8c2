"""Text of users in Markdown: escaped in a line, or whole in a fence."""

from __future__ import annotations

import re


def escape_markdown(text: str) -> str:
    """Escape the markup of Markdown and HTML, and replace line breaks by spaces."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#!~])", r"\\\1", " ".join(text.splitlines()))


def fenced(text: str) -> str:
    """Put text into a Markdown fence that is longer than any fence inside it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
