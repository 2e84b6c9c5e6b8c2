"""report.md and report.html of a sweep, from its results alone.

Every string of the sweep file is escaped where it is printed: HTML by Jinja2's autoescape, Markdown by the finalizer.
report.html is one file: charts are inlined as SVG, and its content security policy forbids scripts and all loading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tigon.sweep import charts, failures, folder, self_test
from tigon.sweep.charts import GIB, axis_words
from tigon.sweep.results import clock, in_processes
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
    # the charts are our own markup; nothing else is exempt from escaping
    safe = {name: Markup(text) for name, text in drawn.items()}
    folder.write_text(path / "report.html", page.render(**view, charts=safe))
    plain = Environment(finalize=escape_markdown, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True)
    plain.filters["fenced"] = fenced
    text = plain.from_string((here / "report.md.j2").read_text(encoding="utf-8")).render(**view, charts=drawn)
    folder.write_text(path / "report.md", re.sub(r"\n{3,}", "\n\n", text))


def _view(results: Mapping[str, Any]) -> dict[str, Any]:
    rows, environment = results["points"], results["environment"]
    on_gpu = bool(environment and environment["memory_bytes"])
    said = columns(results)
    return {
        "title": results["title"],
        "about": results["about"],
        "tiles": [{"name": name, "value": value} for name, value in _tiles(results)],
        "columns": [column.title for column in said],
        "numeric": [column.numeric for column in said],
        "rows": [[column.of(row) for column in said] for row in rows],
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
    tiles = [(status, f"{count:,}") for status, count in counts.items()]
    ok = [row for row in rows if row["status"] == failures.OK]
    if ok:
        fast = max(ok, key=lambda row: float(row["tokens_per_s"]))
        lean = min(ok, key=lambda row: int(row["peak_allocated_bytes"]))
        tiles += [
            (f"most tokens/s: {fast['id']}", f"{fast['tokens_per_s']:,.0f}"),
            (f"lowest peak: {lean['id']}", in_bytes(lean["peak_allocated_bytes"])),
        ]
    tiles.append(("measuring took", clock(sum(row.get("wall_s") or 0 for row in rows))))
    return tiles


# --- the table -------------------------------------------------------------------------------------------------------


class Column:
    """A column: its title, whether it holds numbers, and a row's cell."""

    def __init__(self, title: str, of: Any, *, numeric: bool = True) -> None:
        self.title, self.of, self.numeric = title, of, numeric


def columns(results: Mapping[str, Any]) -> list[Column]:
    """What the table of these results shows; a column that would be empty is left out."""
    rows = results["points"]
    repeated = len(results["variants"]) > 1
    found = [Column(axis_words(axis), lambda row, a=axis: str(row["axes"].get(a, NONE))) for axis in results["axes"]]
    if repeated:
        found.append(Column("variant", lambda row: row["variant"], numeric=False))
    found += [
        Column("peak allocated", _peak),
        Column("reserved", lambda row: _bytes(row, "peak_reserved_bytes")),
        Column("predicted", _predicted),
        Column("tokens/s", lambda row: _number(row, "tokens_per_s", "{:,.0f}")),
        Column("ms a step", _step),
        Column("predicted ms", lambda row: _number(row, "predicted_step_s", "{:,.0f}", 1e3)),
        Column("last loss", lambda row: _number(row, "last_loss", "{:.4f}")),
    ]
    if repeated:
        base = {_place(row): row for row in rows if row["variant"] == results["baseline"]}
        found += [
            Column(f"memory against {results['baseline']}", lambda row: _against(row, base, "peak_allocated_bytes")),
            Column(f"tokens/s against {results['baseline']}", lambda row: _against(row, base, "tokens_per_s")),
        ]
    return [column for column in found if any(column.of(row) != NONE for row in rows)]


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
    told, found = row.get("predicted_allocated_bytes"), row.get("peak_allocated_bytes")
    if not told:
        return NONE
    return in_bytes(told) + (f" ({told / found - 1:+.1%})" if found else "")


def _against(row: Row, base: Mapping[Any, Row], name: str) -> str:
    other = base.get(_place(row))
    if other is None or other is row or not row.get(name) or not other.get(name):
        return NONE
    return f"{row[name] / other[name] - 1:+.0%}"


# --- words -----------------------------------------------------------------------------------------------------------

ROWS_WORDS = {
    "recipe": "Rows are the recipe's.",
    "random": "Rows are random tokens of exactly the given length, all learned: memory and time do not depend on what "
    "they say, and the loss means nothing.",
    "alpaca": "Rows have Alpaca's form, made from the text that every Python carries: only the answers are learned.",
}


def notes(results: Mapping[str, Any], on_gpu: bool) -> list[str]:
    """How it was measured."""
    timed = results["steps"] - results["warmup"]
    said = [
        f"Each point is a training run in a process of its own: {results['steps']} steps, of which the first "
        f"{results['warmup']} warm up; the time is the median of the other {timed}"
        + in_processes(results)
        + ", with the lowest and the highest. Nothing is evaluated or saved.",
        ROWS_WORDS[results["rows"]],
    ]
    if on_gpu:
        said.append(
            "Peak allocated and reserved are what PyTorch's allocator kept of the whole run; the CUDA context and what "
            "libraries allocate past it come on top."
        )
    else:
        said.append(
            "Peak allocated on a CPU: every allocation and release of PyTorch's during one more step, and the weights, "
            "gradients and optimizer states alive before it."
        )
    if limit := results["memory_limit_bytes"]:
        how = (
            "PyTorch's allocator may reserve that less what lies beside it by the plan (CUDA context, NCCL, DeepSpeed)"
            if on_gpu else "the data segment of the process (heap and private mappings), Python and libraries included"
        )  # fmt: skip
        said.append(f"Limited to {limit / GIB:.1f} GiB: {how}.")
    if any(row["unchecked"] for row in results["points"]):
        names = sorted({row["variant"] for row in results["points"] if row["unchecked"]})
        said.append(f"Measured although `tigon train` would refuse the combination: {', '.join(names)}.")
    if wrong := left_out(results):
        said.append(wrong)
    return said


def left_out(results: Mapping[str, Any]) -> str:
    """What the kernels' self-test took out of the patch of these points, or nothing."""
    names = sorted({row["variant"] for row in results["points"] if row.get("wrong_ops")})
    if not names:
        return ""
    wrong = self_test.words(results["environment"]["wrong_ops"])
    return (
        f"Left out of the patch, for wrong results in the kernels' self-test on this machine: {'; '.join(wrong)}. The "
        f"model's own code was used there in the points of {', '.join(names)}."
    )


def environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Card, versions, commits and dates, one a row."""
    found = [("device", environment["device"])]
    if environment["memory_bytes"]:
        found.append(("memory", in_bytes(environment["memory_bytes"])))
    if environment["driver"]:
        found.append(("driver", environment["driver"]))
    if environment["threads"]:
        found.append(("threads", str(environment["threads"])))
    found += [(name, version) for name, version in environment["versions"].items() if version]
    found.append(("tigon at commit", ", ".join(environment["tigon_commits"])))
    found.append(("measured on", ", ".join(environment["dates"])))
    return found


def markdown_table(titles: Sequence[str], numeric: Sequence[bool], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, every cell escaped."""
    lines = [titles, ["---:" if right else "---" for right in numeric]]
    cells = [[str(escape_markdown(cell)) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [*lines, *cells])
