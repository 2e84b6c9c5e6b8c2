"""Profiles as text tables for the terminal and the page: the peak's components, phases, pieces and operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tigon.profiler.render.peak_report import phase_peaks
from tigon.profiler.render.result import Profile
from tigon.profiler.timeline.memory_chart import phase_title
from tigon.profiler.timeline.timeline import CATEGORIES, PHASES, title
from tigon.units import in_bytes, in_flops, in_ms, off_by

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_PIECES, SHOWN_OPS, SHOWN_LINES = 12, 25, 8
"""Rows shown on the page, and rows of either table in the terminal."""


@dataclass(frozen=True)
class Table:
    """A heading, column titles and rows. The first column is text; `texts` gives the further text columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: tuple[int, ...] = (0,)
    note: str = ""


def peak_line(profile: Profile) -> str:
    """The peak's size and phase, and the allocation that reached it."""
    peak = profile.peak
    call = profile.timeline.call_table[peak.reached_by.call]
    return (
        f"peak {in_bytes(peak.nbytes)} in {phase_title(peak.phase)}, reached by {in_bytes(peak.reached_by.nbytes)} of "
        f"{title(peak.reached_by.category)}: {call}"
    )


def components(profiles: Sequence[Profile]) -> Table:
    """The components of the peak, with each run next to its prediction."""
    columns, predicted = ["at the peak"], [each.predicted for each in profiles]
    for number, expected in enumerate(predicted):
        columns += [_named("measured", number, len(profiles))]
        if expected is not None:
            columns += [_named("predicted", number, len(profiles)), "off by"]
    rows = []
    for name in (*CATEGORIES, "all"):
        cells = [title(name)]
        for profile, expected in zip(profiles, predicted, strict=True):
            measured = profile.peak.nbytes if name == "all" else profile.peak.components[name]
            cells.append(in_bytes(measured))
            if expected is not None:
                said_bytes = expected.peak_bytes if name == "all" else expected.components.get(name, 0)
                cells += [in_bytes(said_bytes), off_by(said_bytes, measured)]
        rows.append(tuple(cells))
    return Table("What the peak is made of", tuple(columns), tuple(rows))


def phases(profiles: Sequence[Profile]) -> Table:
    """The peak of each phase, with each run next to its prediction."""
    columns = ["phase"]
    for number, profile in enumerate(profiles):
        columns += [_named("measured", number, len(profiles))]
        if profile.predicted is not None:
            columns += [_named("predicted", number, len(profiles)), "off by"]
    rows, peaks = [], [phase_peaks(profile.timeline) for profile in profiles]
    for name in PHASES:
        cells = [name]
        for profile, measured in zip(profiles, peaks, strict=True):
            measured_bytes = measured[name]
            cells.append(in_bytes(measured_bytes))
            if profile.predicted is not None:
                expected = profile.predicted.phases.get(name, 0)
                cells += [in_bytes(expected), off_by(expected, measured_bytes)]
        rows.append(tuple(cells))
    return Table("The peak of each phase", tuple(columns), tuple(rows))


def pieces(profile: Profile) -> Table:
    """The calls whose memory is alive at the peak."""
    peak, calls = profile.peak, profile.timeline.call_table
    rows = [
        (in_bytes(p.nbytes), f"{p.count:,}", f"{title(p.category)}, in {p.phase}", str(calls[p.call]))
        for p in peak.pieces[:SHOWN_PIECES]
    ]
    rest = peak.pieces[SHOWN_PIECES:]
    if rest:
        nbytes, count = sum(p.nbytes for p in rest), sum(p.count for p in rest)
        rows.append((in_bytes(nbytes), f"{count:,}", "", f"{len(rest)} further calls"))
    return Table("Who made it", ("at the peak", "blocks", "what", "by the call"), tuple(rows), texts=(2, 3))


def operators(profile: Profile, shown: int = SHOWN_OPS) -> Table | None:
    """The slowest operators of the timed step; None if the run stopped before it."""
    if not profile.ops:
        return None
    on_cuda = profile.timeline.device.startswith("cuda")
    rows = [
        (row.name, in_ms(row.time_ms), f"{row.share:.1%}", f"{row.launches:,}", in_flops(row.flops_per_s))
        for row in profile.ops[:shown]
    ]
    rest = profile.ops[shown:]
    if rest:
        share, launches = sum(row.share for row in rest), sum(row.launches for row in rest)
        rows.append((f"{len(rest)} further operators", in_ms(sum(row.time_ms for row in rest)), f"{share:.1%}",
                     f"{launches:,}", ""))  # fmt: skip
    whole_ms, launches = sum(row.time_ms for row in profile.ops), sum(row.launches for row in profile.ops)
    whole_flops = sum(row.flops for row in profile.ops)
    rows.append(("all", in_ms(whole_ms), "100%", f"{launches:,}", in_flops(1000 * whole_flops / whole_ms)))
    note = (
        "Time is that of the kernels an operator launched. A kernel that no operator launched has its own row."
        if on_cuda
        else "Time is that of the operator itself, without the operators that it calls."
    )
    columns = ("operator", "time", "share", "kernels" if on_cuda else "calls", "products")
    note += " FLOP/s count the matrix products and attention of operators, not those inside Triton kernels."
    return Table("Where a step's time goes", columns, tuple(rows), note=note)


def show(profiles: Sequence[Profile], console: Console) -> None:
    """Print the comparing tables, and for each run the largest rows of its other tables."""
    for number, profile in enumerate(profiles):
        console.print(f"\n{_named(profile.timeline.label, number, len(profiles))}", markup=False, style="bold",
                      soft_wrap=True)  # fmt: skip
        console.print(peak_line(profile), markup=False, soft_wrap=True)
        calls = profile.timeline.call_table
        for piece in profile.peak.pieces[:SHOWN_LINES]:
            what = f"{title(piece.category)}, {piece.count} x {calls[piece.call]}"
            console.print(f"{in_bytes(piece.nbytes):>12}  {what}", markup=False, soft_wrap=True)
    _print(components(profiles), console)
    _print(phases(profiles), console)
    for number, profile in enumerate(profiles):
        op_rows = operators(profile, SHOWN_LINES)
        if op_rows is not None:
            _print(replace(op_rows, title=_named(op_rows.title, number, len(profiles))), console)


def _print(table: Table, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table as RichTable

    console.print(f"\n{table.title}", markup=False, style="bold")
    printed = RichTable(box=None, header_style="bold", pad_edge=False)
    for i, name in enumerate(table.columns):
        printed.add_column(escape(name), justify="left" if i in table.texts else "right", overflow="fold")
    for row in table.rows:
        printed.add_row(*(escape(cell) for cell in row))
    console.print(printed)


def _named(word: str, number: int, n: int) -> str:
    """The word with its run's letter (A or B), if there are two runs."""
    return f"{'AB'[number]}: {word}" if n > 1 else word
