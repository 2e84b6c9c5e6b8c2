"""Print the tables of a record of kernels or of training steps, and draw its charts, on any machine.

python -m benchmarks report RECORD --plot DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness import Bench, Case
from benchmarks.kernels import table as kernel_table
from benchmarks.pages.bench import draw, load, write
from benchmarks.training import table as train_table
from tigon.bench.training.record import TrainRecord
from tigon.errors import BenchError


def measure(bench: Bench) -> None:
    try:
        run = load(bench.given.record)
    except BenchError as error:
        bench.refuse(str(error))
    section = train_table.section(run) if isinstance(run, TrainRecord) else kernel_table.section(run)
    print(section)
    if (folder := bench.given.plot) is not None:
        drawn = {folder / f"{name}.svg": svg for name, svg in draw(run).items()}
        write({folder / "table.md": section + "\n", **drawn})
        print(f"wrote {folder / 'table.md'} and {len(drawn)} charts")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", type=Path, metavar="RECORD")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write the table and the charts into this folder")


CASE = Case(measure=measure, options=options, needs_gpu=False)
