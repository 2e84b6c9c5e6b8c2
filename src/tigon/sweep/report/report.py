"""Writes report.md and report.html of a sweep from its results.json.

Strings from the sweep file are escaped when they are printed. Jinja2's autoescape does this for HTML, and the finalizer
for Markdown. report.html is a single file with charts as inline SVG. Its content security policy forbids scripts and
all loading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tigon.profiler.render.figure import DARK_STYLE, for_phone, on_page
from tigon.sweep import failures, self_test
from tigon.sweep.report import charts
from tigon.sweep.report.charts import GIB, axis_words
from tigon.sweep.results import folder
from tigon.sweep.results.results import clock, in_processes
from tigon.trainer.report.report import escape_markdown, fenced
from tigon.units import in_bytes

Row = Mapping[str, Any]
NONE = "–"


def write(results: Mapping[str, Any], path: Path) -> None:
    """Write charts/*.svg, report.md and report.html into the sweep's folder."""
    from jinja2 import Environment
    from markupsafe import Markup

    drawn = charts.draw(results)
    for name, text in drawn.items():
        folder.write_text(path / "charts" / f"{name}.svg", text)
    view = _view(results)
    here = Path(__file__).parent
    page = Environment(autoescape=True).from_string((here / "report.html.j2").read_text(encoding="utf-8"))
    with for_phone():
        narrow = charts.draw(results)
    # the charts are our own markup; nothing else is exempt from escaping
    safe = {
        name: Markup(f'<div class="desk">{on_page(text)}</div><div class="phone">{on_page(narrow[name])}</div>')
        for name, text in drawn.items()
    }
    folder.write_text(path / "report.html", page.render(**view, charts=safe, dark_style=DARK_STYLE))
    plain = Environment(finalize=escape_markdown, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True)
    plain.filters["fenced"] = fenced
    text = plain.from_string((here / "report.md.j2").read_text(encoding="utf-8")).render(**view, charts=drawn)
    folder.write_text(path / "report.md", re.sub(r"\n{3,}", "\n\n", text))


def _view(results: Mapping[str, Any]) -> dict[str, Any]:
    rows, environment = results["points"], results["environment"]
    on_gpu = bool(environment and environment["memory_bytes"])
    shown = columns(results)
    return {
        "title": results["title"],
        "about": results["about"],
        "tiles": [{"name": name, "value": value} for name, value in _tiles(results)],
        "columns": [column.title for column in shown],
        "numeric": [column.numeric for column in shown],
        "rows": [[column.of(row) for column in shown] for row in rows],
        "notes": notes(results, on_gpu),
        "failures": [(row["id"], f"{row['status']}. {row['detail']}") for row in rows
                     if row["status"] in (failures.FAILED, failures.REFUSED, failures.TIMED_OUT)],
        "environment": environment_rows(environment) if environment else [],
        "command": results["command"],
    }  # fmt: skip


def _tiles(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = results["points"]
    counts = {status: sum(row["status"] == status for row in rows) for status in
              dict.fromkeys(row["status"] for row in rows)}  # fmt: skip
    tiles = [("measured" if status == failures.OK else status, f"{count:,}") for status, count in counts.items()]
    ok = [row for row in rows if row["status"] == failures.OK]
    if ok:
        fast = max(ok, key=lambda row: float(row["tokens_per_s"]))
        lean = min(ok, key=lambda row: int(row["peak_allocated_bytes"]))
        tiles += [
            (f"most tokens/s: {_in_words(fast)}", f"{fast['tokens_per_s']:,.0f}"),
            (f"lowest peak: {_in_words(lean)}", in_bytes(lean["peak_allocated_bytes"])),
        ]
    tiles.append(("measuring took", clock(sum(row.get("wall_s") or 0 for row in rows))))
    return tiles


def _in_words(row: Row) -> str:
    """The point's variant, and its value on each axis, without keys of the recipe."""
    return ", ".join([row["variant"], *(f"{axis_words(key)}: {value}" for key, value in row["axes"].items())])


# --- the table -------------------------------------------------------------------------------------------------------


class Column:
    """A column of the table. `of` maps a row to its cell; `numeric` aligns the column to the right."""

    def __init__(self, title: str, of: Any, *, numeric: bool = True) -> None:
        self.title, self.of, self.numeric = title, of, numeric


def columns(results: Mapping[str, Any]) -> list[Column]:
    """The columns of the table, without those that would be empty."""
    rows = results["points"]
    repeated = len(results["variants"]) > 1
    shown = [Column(axis_words(axis), lambda row, a=axis: str(row["axes"].get(a, NONE))) for axis in results["axes"]]
    if repeated:
        shown.append(Column("variant", lambda row: row["variant"], numeric=False))
    shown += [
        Column("peak allocated", _peak),
        Column("reserved", lambda row: _bytes(row, "peak_reserved_bytes")),
        Column("predicted", _predicted),
        Column("tokens/s", lambda row: _number(row, "tokens_per_s", "{:,.0f}")),
        Column("ms per step", _step),
        Column("predicted ms", lambda row: _number(row, "predicted_step_s", "{:,.0f}", 1e3)),
        Column("last loss", lambda row: _number(row, "last_loss", "{:.4f}")),
    ]
    if repeated:
        base = {_place(row): row for row in rows if row["variant"] == results["baseline"]}
        shown += [
            Column(f"memory against {results['baseline']}", lambda row: _against(row, base, "peak_allocated_bytes")),
            Column(f"tokens/s against {results['baseline']}", lambda row: _against(row, base, "tokens_per_s")),
        ]
    return [column for column in shown if any(column.of(row) != NONE for row in rows)]


def _place(row: Row) -> tuple[tuple[str, str], ...]:
    return tuple((key, str(value)) for key, value in row["axes"].items())


def _peak(row: Row) -> str:
    return _bytes(row, "peak_allocated_bytes") if row["status"] == failures.OK else str(row["status"])


def _bytes(row: Row, name: str) -> str:
    return in_bytes(row[name]) if row.get(name) else NONE


def _number(row: Row, name: str, form: str, scale: float = 1.0) -> str:
    return NONE if row.get(name) is None else form.format(row[name] * scale)


def _step(row: Row) -> str:
    if row.get("step_s") is None:
        return NONE
    return f"{1e3 * row['step_s']:,.0f} ({1e3 * row['step_s_low']:,.0f}–{1e3 * row['step_s_high']:,.0f})"


def _predicted(row: Row) -> str:
    predicted, measured = row.get("predicted_allocated_bytes"), row.get("peak_allocated_bytes")
    if not predicted:
        return NONE
    return in_bytes(predicted) + (f" ({predicted / measured - 1:+.1%})" if measured else "")


def _against(row: Row, base: Mapping[Any, Row], name: str) -> str:
    other = base.get(_place(row))
    if other is None or other is row or not row.get(name) or not other.get(name):
        return NONE
    return f"{row[name] / other[name] - 1:+.0%}"


# --- notes -----------------------------------------------------------------------------------------------------------

ROWS_WORDS = {
    "recipe": "The samples are those of the recipe's `data`.",
    "random": "Each sequence is random tokens of exactly the given length, and every token is learned. Memory and time "
    "do not depend on the tokens, and the loss has no meaning.",
    "alpaca": "The samples have Alpaca's layout and are made from Python's built-in documentation and standard "
    "library. Only the answers are learned.",
}


def notes(results: Mapping[str, Any], on_gpu: bool) -> list[str]:
    """Sentences that say how the points were measured."""
    timed = results["steps"] - results["warmup"]
    texts = [
        f"Each point is a training run of {results['steps']} steps in a separate process. The first "
        f"{results['warmup']} steps warm up. The time is the median of the other {timed}"
        + in_processes(results)
        + ", with the lowest and the highest. Nothing is evaluated or saved.",
        ROWS_WORDS[results["rows"]],
    ]
    if on_gpu:
        texts.append(
            "Peak allocated and reserved are the peaks of PyTorch's allocator over the whole run. The CUDA context and "
            "memory that libraries allocate themselves come on top."
        )
    else:
        texts.append(
            "Peak allocated on a CPU is the highest sum of PyTorch's allocations and releases during one more step, "
            "including the weights, gradients and optimizer states alive before it."
        )
    if limit := results["memory_limit_bytes"]:
        how = (
            "PyTorch's allocator may reserve that minus the memory planned outside it (CUDA context, NCCL, DeepSpeed)"
            if on_gpu else "the data segment of the process (heap and private mappings), Python and libraries included"
        )  # fmt: skip
        texts.append(f"Limited to {limit / GIB:.1f} GiB: {how}.")
    if any(row["unchecked"] for row in results["points"]):
        names = sorted({row["variant"] for row in results["points"] if row["unchecked"]})
        texts.append(f"Measured although `tigon train` would refuse the combination: {', '.join(names)}.")
    if wrong := left_out(results):
        texts.append(wrong)
    return texts


def left_out(results: Mapping[str, Any]) -> str:
    """A sentence on the ops that the self-test left out of the patch of these points; empty if there are none."""
    names = sorted({row["variant"] for row in results["points"] if row.get("wrong_ops")})
    if not names:
        return ""
    wrong = self_test.words(results["environment"]["wrong_ops"])
    return (
        f"Left out of the patch because the kernels' self-test gave wrong results on this machine: {'; '.join(wrong)}. "
        f"The points of {', '.join(names)} used the model's own code instead."
    )


def environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) rows for card, versions, commits and dates."""
    rows = [("device", environment["device"])]
    if environment["memory_bytes"]:
        rows.append(("memory", in_bytes(environment["memory_bytes"])))
    if environment["driver"]:
        rows.append(("driver", environment["driver"]))
    if environment["threads"]:
        rows.append(("threads", str(environment["threads"])))
    rows += [(name, version) for name, version in environment["versions"].items() if version]
    rows.append(("tigon at commit", ", ".join(environment["tigon_commits"])))
    rows.append(("measured on", ", ".join(environment["dates"])))
    return rows


def markdown_table(titles: Sequence[str], numeric: Sequence[bool], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with escaped cells."""
    lines = [titles, ["---:" if right else "---" for right in numeric]]
    cells = [[str(escape_markdown(cell)) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [*lines, *cells])
