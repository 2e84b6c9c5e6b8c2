"""Runs each row in its own process, and keeps the record. `benchmarks/duel/__init__.py` says how to call it."""

from __future__ import annotations

import argparse
import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.duel.agreement import judged
from benchmarks.duel.entries import ENTRIES, ORDER, TASKS, TINY_SIZES, Row, row_of
from benchmarks.duel.processes import answers
from tigon.bench.record import other_machine, save

Record = dict[str, Any]


def load(path: Path) -> Record:
    """The record at `path`, or an empty one."""
    if path.exists():
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        return record
    return {"environment": None, "measurements": [], "refused": [], "failed": []}


def kept(record: Record, row: Row, line: Mapping[str, Any]) -> Record:
    """The record with a new line in place of an older one of this row, and every row judged again.

    line: a measurement, or what was wrong under `error`.
    """

    def other(one: Mapping[str, Any]) -> bool:
        return (one["task"], one["entry"], one["size"]) != (row.task, row.entry, row.size)

    earlier = [one for one in (*record["measurements"], *record["refused"]) if other(one)]
    failed = [one for one in record["failed"] if other(one)]
    if "error" in line:
        failed.append(dict(line))
    else:
        earlier.append(dict(line))
    agreed, refused = judged(earlier)
    return {**record, "measurements": agreed, "refused": refused, "failed": failed}


def missing(record: Record, rows: Sequence[Row]) -> list[Row]:
    """The rows that the record has no line of."""
    lines = (*record["measurements"], *record["refused"], *record["failed"])
    known = {(one["task"], one["entry"], one["size"]) for one in lines}
    return [row for row in rows if (row.task, row.entry, row.size) not in known]


def print_line(line: Mapping[str, Any]) -> None:
    name = f"{line['task']}:{line['entry']}:{line['size']}"
    if "error" in line:
        print(f"{name:36} FAILED {line['error']} ({line['row_s']:.0f} s)", flush=True)
        return
    refused = "; REFUSED: " + "; ".join(line["refused"]) if "refused" in line else ""
    print(
        f"{name:36} {line['tokens_per_s']:>7,} tokens/s {line['peak_gib']:>7.2f} GiB, loss {line['losses'][0]:.4f} -> "
        f"{line['losses'][-1]:.4f} ({line['row_s']:.0f} s){refused}",
        flush=True,
    )


def drive(given: argparse.Namespace) -> None:
    """Measure what the record lacks, until the time is over."""
    rows = [row_of(text) for text in given.rows] or list(ORDER)
    if given.tiny:
        rows = [Row(row.task, row.entry, *TINY_SIZES.get((row.batch, row.seq), (row.batch, row.seq))) for row in rows]
    rows = [row for row in rows if given.xformers or not ENTRIES[row.entry].xformers]
    record = load(given.json)
    todo = rows if given.again else missing(record, rows)
    start_s = time.monotonic()
    for model in dict.fromkeys(TASKS[row.task].model for row in todo):
        make_checkpoint(model, given.tiny)
    left, budget_s = [*todo], given.budget - (time.monotonic() - start_s)
    for row, line, environment in answers(todo, budget_s, given.tiny, given.xformers, given.beside):
        left.remove(row)
        if environment is not None:
            line["rows_beside"] = given.beside - 1
            record["environment"] = same_environment(record["environment"], environment)
        record = kept(record, row, line)
        save(record, given.json)
        print_line(line)
    if left:
        print(f"{len(left)} rows left, the next is {left[0]}; run the same command again", flush=True)
    for line in record["refused"]:
        print_line(line)


@functools.cache
def make_checkpoint(model: str, tiny: bool) -> None:
    """Make the checkpoint in another process, so that this one takes no memory of the GPU."""
    subprocess.run([sys.executable, "-m", "benchmarks.duel.inputs", model, *["--tiny"] * tiny], check=True)


def same_environment(before: Record | None, now: Record) -> Record:
    """The newer environment.

    Raises:
        SystemExit: the record was measured on another card or with other versions.
    """
    if before is not None and (other := other_machine(before, now)):
        raise SystemExit("the record has {} {}, and here is {}; give another --json".format(*other))
    return now


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.duel", description=__doc__)
    known = f"tasks {', '.join(TASKS)}; entries {', '.join(ENTRIES)}"
    parser.add_argument("rows", nargs="*", metavar="TASK:ENTRY:BATCHxTOKENS", help=f"default: all; {known}")
    parser.add_argument("--json", type=Path, required=True, metavar="RECORD", help="read and written after each row")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="start no row after this time")
    together = "prepare N rows at once; each takes its timed steps alone, while the others are stopped"
    parser.add_argument("--beside", type=int, default=1, metavar="N", help=together)
    parser.add_argument("--again", action="store_true", help="measure rows that the record has, too")
    without = "without it the rows with xformers are left out"
    parser.add_argument("--xformers", type=Path, metavar="FOLDER", help=f"xformers, its libraries in lib/; {without}")
    parser.add_argument("--tiny", action="store_true", help="a small model, also without a GPU")
    parser.add_argument("--one", metavar="ROW", help="only this row, in this process; --json gets its line")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = options().parse_args(arguments)
    if given.one:
        from benchmarks.duel.libraries import run

        answer = run(row_of(given.one), given.tiny)
        given.json.write_text(json.dumps(answer), encoding="utf-8")
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `answers` ends its rows, which may be stopped
        drive(given)


if __name__ == "__main__":
    main()
