"""The report of a sweep from its results.json: report.md, report.html and charts/."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tigon.report import page
from tigon.report.blocks import Block, ChartImage, Code, Heading, Items, Report, Tiles, facts
from tigon.report.chart import drawn_twice
from tigon.report.table import Table
from tigon.sweep import charts, failures, self_test
from tigon.sweep.charts import GIB, axis_words
from tigon.sweep.results import in_processes
from tigon.sweep.worker import orders
from tigon.units import in_bytes, in_clock

Row = Mapping[str, Any]
NONE = "–"


def write(results: Mapping[str, Any], path: Path) -> None:
    """Write charts/*.svg, report.md and report.html into the sweep's folder."""
    drawn = drawn_twice(lambda: charts.draw(results))
    blocks = list(_blocks(results, drawn))
    report = Report(kind="sweep", title=results["title"], lead=results["about"], blocks=blocks)
    page.write(report, drawn, lambda name, text: orders.write_text(path / name, text))


def _blocks(results: Mapping[str, Any], drawn: Collection[str]) -> Iterator[Block]:
    rows, environment = results["points"], results["environment"]
    yield Tiles(_tiles(results))
    if drawn:
        yield Heading("Charts")
    yield from (ChartImage(name, name) for name in drawn)
    yield from (Heading("Points"), _points(results))
    yield Heading("How it was measured")
    yield Items(notes(results, on_gpu=bool(environment and environment["memory_bytes"])))
    unmeasured = (failures.FAILED, failures.REFUSED, failures.TIMED_OUT)
    if why := [(row["id"], f"{row['status']}. {row['detail']}") for row in rows if row["status"] in unmeasured]:
        yield from (Heading("Not measured"), facts(why))
    if environment:
        yield from (Heading("Environment"), facts(environment_rows(environment)))
    yield from (Heading("Command"), Code(results["command"]))


def _tiles(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = results["points"]
    counts = Counter(row["status"] for row in rows)
    tiles = [("measured" if status == failures.OK else status, f"{count:,}") for status, count in counts.items()]
    ok = [row for row in rows if row["status"] == failures.OK]
    if ok:
        fast = max(ok, key=lambda row: float(row["tokens_per_s"]))
        lean = min(ok, key=lambda row: int(row["peak_allocated_bytes"]))
        tiles += [
            (f"most tokens/s: {_in_words(fast)}", f"{fast['tokens_per_s']:,.0f}"),
            (f"lowest peak: {_in_words(lean)}", in_bytes(lean["peak_allocated_bytes"])),
        ]
    tiles.append(("measuring took", in_clock(sum(row.get("wall_s") or 0 for row in rows))))
    return tiles


def _in_words(row: Row) -> str:
    """The point's variant, and its value on each axis, without keys of the recipe."""
    return ", ".join([row["variant"], *(f"{axis_words(key)}: {value}" for key, value in row["axes"].items())])


# --- the table -------------------------------------------------------------------------------------------------------


def _points(results: Mapping[str, Any]) -> Table:
    """One row per point, without the columns that would be empty."""
    rows = results["points"]
    all_columns = [(title, [of(row) for row in rows]) for title, of in _columns(results)]
    filled = [(title, cells) for title, cells in all_columns if any(cell != NONE for cell in cells)]
    texts = [number for number, (title, _) in enumerate(filled) if title == "variant"]
    return Table([title for title, _ in filled], list(zip(*(cells for _, cells in filled), strict=True)), texts=texts)


def _columns(results: Mapping[str, Any]) -> list[tuple[str, Callable[[Row], str]]]:
    """The columns of the table, as (title, function from a point to its cell)."""
    rows, variants = results["points"], results["variants"]
    columns: list[tuple[str, Callable[[Row], str]]] = [
        (axis_words(axis), partial(_value, axis)) for axis in results["axes"]
    ]
    if len(variants) > 1:
        columns.append(("variant", lambda row: row["variant"]))
    columns += [
        ("peak allocated", _peak),
        ("reserved", lambda row: _bytes(row, "peak_reserved_bytes")),
        ("predicted", _predicted),
        ("tokens/s", lambda row: _number(row, "tokens_per_s", "{:,.0f}")),
        ("ms per step", _step),
        ("predicted ms", lambda row: _number(row, "predicted_step_s", "{:,.0f}", 1e3)),
        ("last loss", lambda row: _number(row, "last_loss", "{:.4f}")),
    ]
    if len(variants) > 1:
        baseline = results["baseline"]
        base = {_place(row): row for row in rows if row["variant"] == baseline}
        columns += [
            (f"memory against {baseline}", lambda row: _against(row, base, "peak_allocated_bytes")),
            (f"tokens/s against {baseline}", lambda row: _against(row, base, "tokens_per_s")),
        ]
    return columns


def _value(axis: str, row: Row) -> str:
    return str(row["axes"].get(axis, NONE))


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
            if on_gpu
            else "the data segment of the process (heap and private mappings), Python and libraries included"
        )
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
