"""Measure the ops with the repository's suites, beside other libraries.

    python -m benchmarks kernels --suite targets --json RECORD            # suites: targets, paper, odd, small
    python -m benchmarks kernels --suite odd --json RECORD --resume       # only what the record lacks
    python -m benchmarks kernels --op rope --shape 4x32x4096x128 --impl tigon --impl quack

The options are those of `tigon bench kernels`. `python -m benchmarks report RECORD --plot DIR` draws the charts.
"""

from __future__ import annotations

import argparse

from benchmarks.harness import Bench, Case, session_options
from benchmarks.kernels.peers import CATALOGUE
from benchmarks.kernels.suites import SUITES
from tigon.bench.kernels import KernelOptions, bench_kernels
from tigon.bench.rows import SMALL


def measure(bench: Bench) -> None:
    given = bench.given
    options = KernelOptions(
        suite=SMALL if bench.tiny else given.suite,
        ops=given.op,
        impls=given.impl,
        without=given.without,
        shapes=given.shape,
        dtype=given.dtype,
        repetitions=given.repetitions,
        session=bench.session(),
    )
    bench_kernels(options, CATALOGUE)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", choices=SUITES, default="targets", help="default: targets")
    for name in ("op", "impl", "without", "shape"):
        parser.add_argument(f"--{name}", action="append", default=[], help="may be repeated")
    parser.add_argument("--dtype", help="bf16 (default), fp16 or fp32")
    parser.add_argument("--repetitions", type=int, default=20, help="rounds; default: 20")
    session_options(parser)


CASE = Case(measure=measure, options=options)
