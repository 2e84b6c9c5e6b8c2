"""Runs each row in its own process, and keeps the record. `benchmarks/duel/__init__.py` says how to call it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.duel.agreement import judged
from benchmarks.duel.entries import ENTRIES, ORDER, TASKS, TINY_SIZES, Row, row_of
from tigon.bench.record import other_machine, save

ROW_LIMIT_S = 240
LEAST_S = {"unsloth": 110, "tigon": 70, "hf": 60, "liger": 60}
"""With less time left no row of this library is started."""
OVER_LIMIT, OUT_OF_MEMORY = "ended at its limit", "out of memory"
LOG_CHARACTERS, LAST_CHARACTERS = 3000, 300
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


def measured(row: Row, limit_s: float, tiny: bool, xformers: Path | None) -> tuple[dict[str, Any], Record | None]:
    """Measure a row in its own process. Returns its line and the environment of that process.

    A row that failed has its reason under `error`, and no environment.
    """
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer_path, log_path = Path(folder) / "answer.json", Path(folder) / "log.txt"
        command = [sys.executable, "-m", "benchmarks.duel", "--one", str(row), "--json", str(answer_path)]
        with log_path.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                command + ["--tiny"] * tiny,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(row, xformers),
            )
            try:
                reason = f"exit {process.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                reason = OVER_LIMIT
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log_text = log_path.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
        answer = json.loads(answer_path.read_text(encoding="utf-8")) if answer_path.exists() else None
    row_s = {"row_s": round(time.monotonic() - start_s, 1)}
    if answer is None:
        if "OutOfMemoryError" in log_text:
            reason = OUT_OF_MEMORY
        print(log_text, flush=True)
        last = next((text for text in reversed(log_text.splitlines()) if text.strip()), "")[:LAST_CHARACTERS]
        base = {"task": row.task, "entry": row.entry, "size": row.size}
        return {**base, "error": reason, "last_line": last, **row_s}, None
    environment = answer["environment"]
    about = {key: environment[key] for key in ("tigon_commit", "date", "driver")}
    return {**answer["line"], **row_s, **about}, environment


def _environment(row: Row, xformers: Path | None) -> dict[str, str]:
    """The variables of a row's process: no network, and xformers only where the row asks for it."""
    found = dict(os.environ)
    found |= {
        **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "UNSLOTH_DISABLE_STATISTICS"), "1"),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "UNSLOTH_COMPILE_LOCATION": str(Path(tempfile.gettempdir()) / "unsloth_compiled_cache"),
    }
    if ENTRIES[row.entry].xformers and xformers is not None:
        for name, folder in (("PYTHONPATH", xformers), ("LD_LIBRARY_PATH", xformers / "lib")):
            found[name] = os.pathsep.join(filter(None, [str(folder.resolve()), found.get(name)]))
    return found


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
    start_s = time.monotonic()
    rows = [row_of(text) for text in given.rows] or list(ORDER)
    if given.tiny:
        rows = [Row(row.task, row.entry, *TINY_SIZES.get((row.batch, row.seq), (row.batch, row.seq))) for row in rows]
    rows = [row for row in rows if given.xformers or not ENTRIES[row.entry].xformers]
    record = load(given.json)
    todo = rows if given.again else missing(record, rows)
    for position, row in enumerate(todo):
        left_s = given.budget - (time.monotonic() - start_s)
        line: Record = {"error": OVER_LIMIT}
        if left_s >= LEAST_S[ENTRIES[row.entry].library]:
            make_checkpoint(TASKS[row.task].model, given.tiny)
            left_s = given.budget - (time.monotonic() - start_s)
            line, environment = measured(row, min(ROW_LIMIT_S, left_s), given.tiny, given.xformers)
        if line.get("error") == OVER_LIMIT and left_s < ROW_LIMIT_S:
            print(f"{len(todo) - position} rows left, the next is {row}; run the same command again", flush=True)
            break
        record = kept(record, row, line)
        if environment is not None:
            record["environment"] = same_environment(record["environment"], environment)
        save(record, given.json)
        print_line(line)
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
        drive(given)


if __name__ == "__main__":
    main()
