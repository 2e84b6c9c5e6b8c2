"""Measure training steps of a model in turns, beside other libraries and with more of tigon's techniques.

    python -m benchmarks train --batch 64 --variant liger:full --variant tigon-graphs:none@4 --json RECORD

The options are those of `tigon bench train`. `python -m benchmarks report RECORD --plot DIR` draws the charts.
"""

from __future__ import annotations

import argparse

from benchmarks.harness import Bench, Case, session_options
from benchmarks.training.codes import ALL, USUAL
from tigon.bench.training.command import TrainOptions, bench_train


def measure(bench: Bench) -> None:
    given = bench.given
    options = TrainOptions(
        models=given.model,
        batches=given.batch,
        seqs=given.seq,
        precisions=given.precision,
        memories=given.memory,
        variants=given.variant or USUAL,
        without=given.without,
        rounds=given.rounds,
        steps=given.steps,
        session=bench.session(),
        codes=ALL,
        command=bench.fields["command"],
    )
    bench_train(options)


def options(parser: argparse.ArgumentParser) -> None:
    for name in ("model", "precision", "memory", "variant", "without"):
        parser.add_argument(f"--{name}", action="append", default=[], help="may be repeated")
    for name in ("batch", "seq"):
        parser.add_argument(f"--{name}", type=int, action="append", default=[], help="may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn; default: 2")
    session_options(parser)


CASE = Case(measure=measure, options=options)
