"""Profiles as text tables for the terminal and the page: the peak's components, phases, pieces and operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tigon.profiler.render.peak_report import phase_peaks
from tigon.profiler.render.result import Profile
from tigon.profiler.timeline.memory_chart import phase_title
from tigon.profiler.timeline.timeline import CATEGORIES, PHASES, title
from tigon.report.table import Table
from tigon.units import in_bytes, in_flops, in_ms, off_by

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_PIECES, SHOWN_OPS, SHOWN_LINES = 12, 25, 8
"""Rows shown on the page, and rows of either table in the terminal."""


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
    measured = [{**each.peak.components, "all": each.peak.nbytes} for each in profiles]
    predicted = [
        None if each.predicted is None else {**each.predicted.components, "all": each.predicted.peak_bytes}
        for each in profiles
    ]
    rows = {name: title(name) for name in (*CATEGORIES, "all")}
    return replace(_compared("at the peak", rows, measured, predicted), title="What the peak is made of")


def phases(profiles: Sequence[Profile]) -> Table:
    """The peak of each phase, with each run next to its prediction."""
    measured = [phase_peaks(each.timeline) for each in profiles]
    predicted = [None if each.predicted is None else each.predicted.phases for each in profiles]
    rows = {name: name for name in PHASES}
    return replace(_compared("phase", rows, measured, predicted), title="The peak of each phase")


def _compared(
    first: str,
    rows: Mapping[str, str],
    measured: Sequence[Mapping[str, int]],
    predicted: Sequence[Mapping[str, int] | None],
) -> Table:
    """Bytes of each run beside their prediction, if there is one.

    Args:
        first: The title of the first column.
        rows: The name of each row -> its first cell.
        measured: For each run, bytes by the rows' names.
        predicted: As `measured`; None for a run without a prediction.
    """
    columns, lines = [first], {name: [words] for name, words in rows.items()}
    for number, (own, expected) in enumerate(zip(measured, predicted, strict=True)):
        columns.append(named("measured", number, len(measured)))
        if expected is not None:
            columns += [named("predicted", number, len(measured)), "off by"]
        for name, cells in lines.items():
            cells.append(in_bytes(own[name]))
            if expected is not None:
                expected_bytes = expected.get(name, 0)
                cells += [in_bytes(expected_bytes), off_by(expected_bytes, own[name])]
    return Table(tuple(columns), tuple(map(tuple, lines.values())))


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
    return Table(("at the peak", "blocks", "what", "by the call"), tuple(rows), title="Who made it", texts=(2, 3))


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
        rest_ms, share = sum(row.time_ms for row in rest), sum(row.share for row in rest)
        launches = sum(row.launches for row in rest)
        rows.append((f"{len(rest)} further operators", in_ms(rest_ms), f"{share:.1%}", f"{launches:,}", ""))
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
    return Table(columns, tuple(rows), title="Where a step's time goes", note=note)


def show(profiles: Sequence[Profile], console: Console) -> None:
    """Print the comparing tables, and for each run the largest rows of its other tables."""
    for number, profile in enumerate(profiles):
        heading = named(profile.timeline.label, number, len(profiles))
        console.print(f"\n{heading}", markup=False, style="bold", soft_wrap=True)
        console.print(peak_line(profile), markup=False, soft_wrap=True)
        calls = profile.timeline.call_table
        for piece in profile.peak.pieces[:SHOWN_LINES]:
            what = f"{title(piece.category)}, {piece.count} x {calls[piece.call]}"
            console.print(f"{in_bytes(piece.nbytes):>12}  {what}", markup=False, soft_wrap=True)
    components(profiles).show(console)
    phases(profiles).show(console)
    for number, profile in enumerate(profiles):
        op_rows = operators(profile, SHOWN_LINES)
        if op_rows is not None:
            replace(op_rows, title=named(op_rows.title, number, len(profiles))).show(console)


def named(word: str, number: int, n: int) -> str:
    """The word with its run's letter (A or B), if there are two runs."""
    return f"{'AB'[number]}: {word}" if n > 1 else word
