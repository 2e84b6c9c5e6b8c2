"""PEFT, Liger, Unsloth and tigon on one card: the tables of docs/beside-unsloth.md, and parts of the front page.

    python -m benchmarks.pages.duel

The record is one of `python -m benchmarks.duel`. A row that it lacks is left out, and so is one that was refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.duel.agreement import wider
from benchmarks.duel.entries import ENTRIES, LONG, LOOP, SHORT, TASKS
from benchmarks.pages import regions
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "beside-unsloth.md"
RECORD = ROOT / "benchmarks" / "results" / "nvidia-h100" / "duel" / "steps.json"
SIZES = tuple("x".join(map(str, size)) for size in (SHORT, LONG))

Record = Mapping[str, Any]
Line = Mapping[str, Any]


def load() -> Record:
    record: Record = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def lines(record: Record, task: str, size: str) -> list[Line]:
    """The measured rows of a task and size, in the order of `ENTRIES`."""
    found = [one for one in record["measurements"] if (one["task"], one["size"]) == (task, size)]
    return sorted(found, key=lambda one: [*ENTRIES].index(one["entry"]))


def fastest(
    found: Sequence[Line], library: str, settings: Sequence[str] = (), within_gib: float | None = None
) -> Line | None:
    """The fastest row of a library: with one of these settings, and with no larger peak, where given.

    Rows in FP8 compute in fewer bits than the others, so they count only if the settings name them.
    """
    rows = [
        one
        for one in found
        if ENTRIES[one["entry"]].library == library
        and (ENTRIES[one["entry"]].setting in settings if settings else ENTRIES[one["entry"]].setting != "fp8")
        and (within_gib is None or one["peak_gib"] <= within_gib)
    ]
    return max(rows, key=lambda one: one["tokens_per_s"], default=None)


def unsloths(found: Sequence[Line]) -> Line | None:
    """Unsloth's fastest row with its own activation checkpointing, in its trainer or in a loop."""
    return fastest(found, "unsloth", ["unsloth"])


def tigon_within_unsloths_memory(found: Sequence[Line]) -> Line | None:
    theirs = unsloths(found)
    return None if theirs is None else fastest(found, "tigon", within_gib=theirs["peak_gib"])


def most_kept(found: Sequence[Line]) -> tuple[Line, Line] | None:
    """The fastest rows of Unsloth and of tigon that keep what the whole GPU holds; None if one was not measured."""
    theirs, ours = fastest(found, "unsloth", ["auto", "none"]), fastest(found, "tigon", ["auto"])
    return None if theirs is None or ours is None else (theirs, ours)


def name_of(library: str, task: str) -> str:
    peft = " + PEFT" if TASKS[task].adapters else ""
    return {"hf": f"Hugging Face{peft}", "liger": f"Liger{peft}", "unsloth": "Unsloth", "tigon": "tigon"}[library]


def figures(line: Line | None) -> str:
    """Tokens per second and the peak in GiB; a dash without a row."""
    return "–" if line is None else f"{line['tokens_per_s']:,} ({line['peak_gib']:.2f} GiB)"


def words_of(size: str) -> str:
    batch, seq = size.split("x")
    return f"{batch} x {int(seq):,} tokens"


# --- the page --------------------------------------------------------------------------------------------------------

_CALLS = {
    ("hf", "full"): "`gradient_checkpointing_enable()`",
    ("liger", "full"): "`gradient_checkpointing_enable()`",
    ("unsloth", "unsloth"): '`use_gradient_checkpointing="unsloth"`',
    ("unsloth", "auto"): '`checkpoint_skip_layers="auto"`',
    ("unsloth", "none"): "`use_gradient_checkpointing=False`",
    ("tigon", "full"): '`tigon.checkpoint(model, "full")`',
    ("tigon", "offload"): '`tigon.checkpoint(model, "offload")`',
    ("tigon", "offload-attention"): '`tigon.checkpoint(model, "offload-attention")`',
    ("tigon", "auto"): "`tigon.plan`",
    ("tigon", "fp8"): "`tigon.patch_fp8` and `tigon.plan`",
}


def table(record: Record, task: str, size: str) -> str:
    """Every row of a task and size, and why others are missing."""
    found = lines(record, task, size)
    rows = []
    for one in found:
        entry = ENTRIES[one["entry"]]
        call = _CALLS[entry.library, entry.setting]
        call += f' with `memory="{entry.memory}"`' if entry.memory else ""
        name = name_of(entry.library, task) + (", xformers" if entry.xformers else "")
        where = "a loop" if entry.where == LOOP else entry.where
        losses = f"{one['losses'][0]:.4f}, {one['losses'][-1]:.4f}"
        rows.append([name, where, call, f"{one['tokens_per_s']:,}", f"{one['peak_gib']:.2f}", losses])
    titles = ("", "in", "activation checkpointing", "tokens/s", "peak, GiB", "loss of step 1, 11")
    return "\n".join([markdown_table(titles, rows, texts=(0, 1, 2, 5)), *_notes(found), *_left_out(record, task, size)])


def _notes(found: Sequence[Line]) -> Iterator[str]:
    """Rows that train some weights in fp32 where the others train them in bf16, and plans that did not fit."""
    wide = {ENTRIES[one["entry"]].library for one in found if any(wider(one, other) for other in found)}
    for library in sorted(wide):
        name = name_of(library, found[0]["task"])
        yield from ("", f"- {name}'s rows have some trained weights in fp32; the other rows have none.")
    for one in found:
        limit = ENTRIES[one["entry"]].memory
        if limit is not None and one["peak_gib"] > float(limit.removesuffix("GiB")):
            yield from ("", f"- No plan for `{one['entry']}` fits {limit}. The row has the smallest, as the plan says.")


def _left_out(record: Record, task: str, size: str) -> Iterator[str]:
    missing = [
        (one["entry"], reason)
        for kind in ("refused", "failed")
        for one in record[kind]
        if (one["task"], one["size"]) == (task, size)
        for reason in ["; ".join(one["refused"]) if kind == "refused" else one["error"]]
    ]
    if missing:
        yield ""
        yield from (f"- `{entry}` is left out: {reason}." for entry, reason in missing)


def summary(record: Record) -> str:
    """Per task and size: Unsloth's fastest row with its checkpointing, and tigon's fastest within its memory."""
    small_titles = ("", "Unsloth, its checkpointing", "tigon within Unsloth's memory", "")
    rows = []
    for task in TASKS:
        for size in SIZES:
            found = lines(record, task, size)
            small = unsloths(found), tigon_within_unsloths_memory(found)
            large = most_kept(found) or (None, None)
            if None in small:
                continue
            cells = [figures(small[0]), figures(small[1]), _ratio(*small), *map(figures, large), _ratio(*large)]
            rows.append([f"{TASKS[task].words}, {words_of(size)}", *cells])
    titles = (*small_titles, "Unsloth, most kept", "tigon, most kept", "")
    return markdown_table(titles, rows, texts=(0,))


def _ratio(theirs: Line | None, ours: Line | None) -> str:
    return "–" if theirs is None or ours is None else f"{ours['tokens_per_s'] / theirs['tokens_per_s']:.2f} x"


def where(record: Record) -> str:
    """The card, the versions and the commits."""
    versions = record["environment"]["versions"]
    named = ("torch", "triton", "transformers", "peft", "trl", "bitsandbytes", "liger-kernel", "unsloth")
    commits = sorted({str(one["tigon_commit"])[:7] for one in record["measurements"]})
    dates = sorted({one["date"] for one in record["measurements"]})
    rows = sum(len(record[kind]) for kind in ("measurements", "refused", "failed"))
    unsloths_loop = " Unsloth ran in a loop, without xformers; its trainer and `auto` are not measured yet."
    if "unsloth" in {one["entry"] for one in record["measurements"]}:
        unsloths_loop = ""
    minutes = sum(one["row_s"] for kind in ("measurements", "refused", "failed") for one in record[kind]) / 60
    return (
        f"*On one {record['environment']['device']}: {', '.join(f'{name} {versions[name]}' for name in named)}; tigon "
        f"{', '.join(commits)}; {', '.join(dates)}. The {rows} rows took {minutes:.0f} minutes.{unsloths_loop}*"
    )


def parts(record: Record) -> Mapping[str, Callable[[], str]]:
    """The parts of the page by the names of their markers."""
    found: dict[str, Callable[[], str]] = {"summary": lambda: summary(record), "where": lambda: where(record)}
    for task in TASKS:
        for size in SIZES:
            found[f"{task} {size}"] = lambda task=task, size=size: table(record, task, size)  # type: ignore[misc]
    return found


def written(text: str, record: Record) -> str:
    """`text` of the page with its parts written again."""
    return regions.written(text, "duel", parts(record), DOCUMENT)


# --- the front page --------------------------------------------------------------------------------------------------

Bar = tuple[str, str, Line]
"""Label, class, row."""


def bars(record: Record) -> list[Bar]:
    """QLoRA at the short size: what the front page's picture shows."""
    found = lines(record, "qlora", SIZES[0])
    by_entry = {one["entry"]: one for one in found}
    kept = most_kept(found)
    chosen: list[tuple[str, str, Line | None]] = [
        (name_of("hf", "qlora"), "other", by_entry.get("hf")),
        (name_of("liger", "qlora"), "liger", by_entry.get("liger")),
        ("Unsloth", "unsloth", unsloths(found)),
        ("tigon, Unsloth's memory", "tigon", tigon_within_unsloths_memory(found)),
        ("tigon, 24 GiB", "tigon", by_entry.get("tigon-auto24")),
    ]
    if kept is not None:
        chosen += [("Unsloth, most kept *", "unsloth", kept[0]), ("tigon, most kept *", "tigon", kept[1])]
    return [(label, shade, line) for label, shade, line in chosen if line is not None]


def front_rows(record: Record) -> Iterator[list[str]]:
    """Cells of README's table: the experiment, Hugging Face, Liger, Unsloth and tigon."""
    for task in TASKS:
        for size in SIZES:
            found = lines(record, task, size)
            if tigon_within_unsloths_memory(found) is None:
                continue
            cells = [
                fastest(found, "hf"),
                fastest(found, "liger"),
                unsloths(found),
                tigon_within_unsloths_memory(found),
            ]
            yield [f"{TASKS[task].words}, {words_of(size)}, H100", *map(figures, cells)]
    found = lines(record, "qlora", SIZES[0])
    kept = most_kept(found)
    if kept is not None:
        name = f"{TASKS['qlora'].words}, {words_of(SIZES[0])}, most activations kept, H100"
        yield [name, "", "", *map(figures, kept)]


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8"), load()), encoding="utf-8")
