"""Makes profile.html, one interactive file that needs no network.

Its content security policy forbids all loading, and every script except page.js, which it allows by hash. Jinja2's
autoescape escapes names from the user (model, recipe, files) in the page. In the JSON data `<`, `>` and `&` are
escaped, so that no string can end the script element. The script inserts strings as text only.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tigon.profiler.render import tables
from tigon.profiler.render.result import Profile
from tigon.profiler.timeline.timeline import CATEGORIES, title

_HERE = Path(__file__).parent


def render(profiles: Sequence[Profile]) -> str:
    """The HTML page of one profile, or of two side by side."""
    from jinja2 import Environment
    from markupsafe import Markup

    script = (_HERE / "page.js").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True).from_string(
        (_HERE / "page.html.j2").read_text(encoding="utf-8")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    labels = [each.timeline.label for each in profiles]
    return template.render(
        title=labels[0] if len(labels) == 1 else "Two runs side by side",
        runs=[_run(number, profile, len(profiles)) for number, profile in enumerate(profiles)],
        joint=[tables.components(profiles), tables.phases(profiles)],
        categories=[(name, title(name), *CATEGORIES[name]) for name in CATEGORIES],
        script=Markup(script),  # page.js and its hash need no escaping; the data below is escaped
        script_hash=digest,
        data=Markup(
            _json(
                {
                    "categories": [[name, title(name)] for name in CATEGORIES],
                    "runs": [_data(each) for each in profiles],
                }
            )
        ),
    )


def _run(number: int, profile: Profile, n: int) -> dict[str, Any]:
    candidates = [tables.pieces(profile), tables.operators(profile)]
    timeline = profile.timeline
    notes = list(timeline.notes)
    if profile.predicted is not None:
        notes.append(f"Dashed: the peak of each phase, predicted {profile.predicted.source}.")
    elif "prediction" in profile.details:
        notes.append(f"Prediction: {profile.details['prediction']}.")
    if timeline.allocator_peak_bytes is not None:
        own, ours = timeline.allocator_peak_bytes, profile.peak.nbytes
        notes.append(
            f"The allocator counts a peak of {own:,} bytes, the timeline {ours:,}. Blocks that the allocator did not "
            "split are up to 1 MiB larger than requested."
        )
    return {
        "name": f"{'AB'[number]}: {timeline.label}" if n > 1 else timeline.label,
        "peak": tables.peak_line(profile), "tables": [table for table in candidates if table is not None],
        "facts": list(profile.details.items()), "notes": notes,
    }  # fmt: skip


def _data(profile: Profile) -> dict[str, Any]:
    """The data that the script draws."""
    timeline, names = profile.timeline, list(CATEGORIES)
    return {
        "label": timeline.label,
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


def _json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
