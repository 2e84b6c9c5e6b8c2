"""Prints the rows of a run: which formats they have, and some of them as tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tigon.data.chat.chat_template import Rendering, has_template, is_chat
from tigon.data.document_table import Documents
from tigon.data.documents import TEXT
from tigon.data.tokenizer import IGNORE_INDEX, Encoded

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

MAX_TOKENS = 1024
MAX_COLUMNS = 8
"""Most columns that are named as not read."""
BORDER = "\u2502"
"""Stands between two tokens."""
LEARNED, READ_ONLY = "bold green", "dim"
BRACKETS = ("\u00ab", "\u00bb")
"""Marks learned tokens where the output is without colour."""


def rows_line(documents: Documents, tokenizer: PreTrainedTokenizerBase, rendering: Rendering) -> tuple[str, ...]:
    """One line that names the formats of the rows and how they become text; nothing if all documents are text."""
    counts: Counter[tuple[str, bool]] = Counter()
    unread: Counter[str] = Counter()
    for example, number in documents.shapes():
        counts[example.format, is_chat(example, tokenizer, rendering)] += number
        unread.update(dict.fromkeys(example.unread, number))
    if all(name == TEXT for name, _ in counts):
        return ()
    templated = rendering.template != "plain" and has_template(tokenizer)
    parts = []
    for (name, chat), number in counts.items():
        if chat:
            how = " (chat template)" if templated else " (plain headers)"
        elif name == "alpaca":
            how = " (plain headers)"
        else:
            how = " (joined as they are)" if name == "prompt-completion" else ""
        parts.append(f"{number:,} {name}{how}")
    learned = "all tokens are" if rendering.learn == "all" else "answers are"
    columns = "; columns that are not read: " + _named(unread) if unread else ""
    return (f"rows     {', '.join(parts)}; {learned} learned{columns}",)


def _named(columns: Counter[str]) -> str:
    names = [f"{name} ({number:,} {'row' if number == 1 else 'rows'})" for name, number in columns.most_common()]
    return ", ".join(names[:MAX_COLUMNS]) + (f" and {len(names) - MAX_COLUMNS} more" if names[MAX_COLUMNS:] else "")


def print_row(console: Console, row: Encoded, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print one row as tokens: learned ones in colour, or in brackets where the output is without colour."""
    from rich.text import Text

    n_learned = sum(label != IGNORE_INDEX for label in row.labels)
    colour = console.color_system is not None
    legend = "learned tokens in green" if colour else f"learned tokens in {BRACKETS[0]}{BRACKETS[1]}"
    console.print(
        f"show     {row.origin}: {len(row.tokens):,} tokens, {n_learned:,} learned; {legend}",
        markup=False,
        soft_wrap=True,
    )
    text = Text()
    was_learned = False
    for number, (piece, learned) in enumerate(pieces(row, tokenizer)):
        if not colour and learned != was_learned:
            text.append(BRACKETS[0] if learned else BRACKETS[1])
        elif number:
            text.append(BORDER, READ_ONLY)
        was_learned = learned
        text.append(piece, LEARNED if learned else READ_ONLY)
    if was_learned and not colour:
        text.append(BRACKETS[1])
    if len(row.tokens) > MAX_TOKENS:
        text.append(f" ... {len(row.tokens) - MAX_TOKENS:,} more tokens")
    console.print(text, soft_wrap=True)


def pieces(row: Encoded, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """(text, learned) of the row's tokens. Tokens that are parts of one character come together."""
    waiting: list[int] = []
    for token, label in list(zip(row.tokens, row.labels, strict=True))[:MAX_TOKENS]:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if "\ufffd" in text and len(waiting) < 4:  # a character of UTF-8 has at most four bytes
            continue
        if str(tokenizer.convert_ids_to_tokens(waiting[0])).startswith("\u2581") and not text.startswith(" "):
            text = f" {text}"  # decoding drops a text's first space
        yield text, label != IGNORE_INDEX
        waiting = []
    if waiting:
        yield tokenizer.decode(waiting), row.labels[-1] != IGNORE_INDEX
