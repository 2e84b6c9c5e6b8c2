"""Makes profile.html, one interactive file that needs no network. page.js draws its charts and fills its buttons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tigon.profiler.render import tables
from tigon.profiler.render.result import Profile
from tigon.profiler.timeline.timeline import CATEGORIES, title
from tigon.report import page
from tigon.report.blocks import Block, Columns, Folded, Heading, Paragraph, Report, Scripted, facts

MOST_BESIDE = 4
"""The columns of a table up to which two tables stand side by side."""
_NO_SCRIPT = "The chart needs JavaScript; timeline.svg beside this page is the same as a drawing."


def render(profiles: Sequence[Profile]) -> str:
    """The HTML page of one profile, or of two side by side."""
    labels = [each.timeline.label for each in profiles]
    names = [tables.named(label, number, len(labels)) for number, label in enumerate(labels)]
    headings = [[Heading(name, 3)] if len(labels) > 1 else [] for name in names]
    joint = [tables.components(profiles), tables.phases(profiles)]
    blocks = [
        Scripted("controls"),
        Columns([[*own, *_chart(profile)] for own, profile in zip(headings, profiles, strict=True)]),
        *([Columns([[table] for table in joint])] if len(joint[0].columns) <= MOST_BESIDE else joint),
        Columns([[*own, *_tables(profile)] for own, profile in zip(headings, profiles, strict=True)]),
    ]
    report = Report(
        kind="profile",
        title=labels[0] if len(labels) == 1 else "Two runs side by side",
        lead="",
        blocks=blocks,
        script=(Path(__file__).parent / "page.js").read_text(encoding="utf-8"),
        data={
            "categories": [[name, title(name)] for name in CATEGORIES],
            "runs": [_data(each) for each in profiles],
        },
    )
    return page.render(report, {})


def _chart(profile: Profile) -> Iterator[Block]:
    yield Paragraph(tables.peak_line(profile), is_note=True)
    yield Scripted("memory", _NO_SCRIPT)


def _tables(profile: Profile) -> Iterator[Block]:
    """The tables of one run, notes on it, and its facts."""
    yield tables.pieces(profile)
    if (operators := tables.operators(profile)) is not None:
        yield operators
    yield from (Paragraph(note, is_note=True) for note in _notes(profile))
    yield Folded("What was run", [facts(list(profile.details.items()))])


def _notes(profile: Profile) -> Iterator[str]:
    timeline = profile.timeline
    yield from timeline.notes
    if profile.predicted is not None:
        yield f"Dashed: the peak of each phase, predicted {profile.predicted.source}."
    elif "prediction" in profile.details:
        yield f"Prediction: {profile.details['prediction']}."
    if timeline.allocator_peak_bytes is not None:
        yield (
            f"The allocator counts a peak of {timeline.allocator_peak_bytes:,} bytes, the timeline "
            f"{profile.peak.nbytes:,}. Blocks that the allocator did not split are up to 1 MiB larger than requested."
        )


def _data(profile: Profile) -> dict[str, Any]:
    """The data that the script draws."""
    timeline, names = profile.timeline, list(CATEGORIES)
    return {
        "summary": tables.peak_line(profile),
        "events": timeline.events,
        "times": timeline.times_ms,
        "places": timeline.places(),
        "sizes": timeline.sizes,
        "categories": [names.index(name) for name in timeline.categories],
        "calls": timeline.calls,
        "callTable": [[str(call), *call.frames] for call in timeline.call_table],
        "phases": [[p.name, p.step, p.layer, int(p.recomputed), p.start, p.end] for p in timeline.phases],
        "bands": [[band.name, band.step, band.start, band.end] for band in timeline.bands()],
        "predicted": None if profile.predicted is None else dict(profile.predicted.phases),
        "peak": profile.peak.event,
    }
