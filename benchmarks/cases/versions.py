"""Measure the ops with two versions of a package on one card, in turns: two releases of Triton, or two of tigon.

    pip install --target NEW triton==3.9.0
    python -m benchmarks versions --new NEW --json RECORD
    python -m benchmarks versions --new OTHER-CHECKOUT/src --rows small --json RECORD

NEW is a folder that the second version's processes search first. A process of each version holds the same row and is
asked for a turn. Kernels are compiled before, in processes of both versions. The record has medians in ms and, for the
host, us. `small` rows are CPU-bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Bench, Case
from tigon.bench import timing
from tigon.bench.impls import CATALOGUE
from tigon.bench.inputs import Bound, Problem
from tigon.bench.rows import SMALL, SUITES, USUAL, Row
from tigon.bench.rows import row as large
from tigon.ops import OPS

ROUNDS, REPETITIONS, COMPILING = 4, 5, 6
LARGE = (
    *SUITES[USUAL],
    large("rms_norm", 16384, 16384),
    large("rms_norm", 1_000_000, 128),
    large("rms_norm", 1, 4096),
    large("layer_norm", 16384, 16384),
    large("swiglu", 1, 14336),
    large("cross_entropy", 8192, 32000),
    large("linear_cross_entropy", 4096, 2048, 128256),
    large("linear_cross_entropy", 4096, 2048, 128256, options={"softcap": 30.0}, problem="softcap"),
    large("linear_logprobs", 4096, 2048, 128256),
    large("linear_kl", 4096, 2048, 128256),
    large("experts", 4096, 2, 8, 4096, options={"inner": 14336}),
)
ROWS = {"large": LARGE, "small": SUITES[SMALL]}


class Prepared:
    """A row with its tensors, ready to be timed, forward and backward."""

    def __init__(self, row: Row, device: torch.device) -> None:
        self.device = device
        (tigon,) = (impl for impl in CATALOGUE.impls_for(row.op) if impl.name == "tigon")
        self.bound = bound = Bound(tigon, Problem.of(row, torch.bfloat16, device))
        for _ in range(2):
            bound.restore()
            bound.both()
        bound.restore()
        self.runs = {"eager": timing.Run(bound.both, bound.restore, idle=True)}
        if row.graph and device.type == "cuda":
            self.runs["graph"] = timing.Run(timing.Graphs(device).capture(bound.both), bound.restore, idle=False)
        timing.take_turns(self.runs, 1, device)

    def turn(self) -> dict[str, list[float]]:
        """Milliseconds of each run, and the host's microseconds of one call."""
        with timing.no_garbage_collection():
            found = timing.take_turns(self.runs, REPETITIONS, self.device)
            times = {name: list(values) for name, values in found.items() if isinstance(values, list)}
            about_ms = statistics.median(times["eager"])
            host_us = timing.host_us(self.bound.both, self.bound.restore, about_ms, self.device)
        return {**times, "host_us": [] if host_us is None else [host_us]}


def serve(bench: Bench, rows: tuple[Row, ...]) -> None:
    """Answer each line of stdin, `prepare ROW` or `turn`, with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    prepared: Prepared | None = None
    for line in sys.stdin:
        word, *rest = line.split()
        answer: dict[str, Any] = {}
        try:
            if word == "prepare":
                prepared = None
                bench.free()
                prepared = Prepared(rows[int(rest[0])], bench.device)
            elif prepared is not None:
                answer = prepared.turn()
        except Exception as error:  # the other version's row goes on
            answer = {"error": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps(answer), file=answers, flush=True)


def compile_rows(bench: Bench, rows: tuple[Row, ...]) -> None:
    """Fill the version's cache."""
    for row in rows:
        try:
            Prepared(row, bench.device)
        except Exception as error:
            print(f"{row.id}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        bench.free()


def environment_of(site: str | None, cache: Path) -> dict[str, str]:
    path = [*([site] if site else []), "src", ".", os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "TRITON_CACHE_DIR": str(cache), "TIGON_CACHE": "0", "PYTHONPATH": os.pathsep.join(path)}


def asked(process: subprocess.Popen[str], line: str) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    print(line, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    return json.loads(answer) if answer else {"error": f"the process ended with {process.poll()}"}


def medians(servers: dict[str, subprocess.Popen[str]], row: Row, index: int) -> dict[str, Any]:
    """One row of the record."""
    failed = {version: asked(server, f"prepare {index}").get("error") for version, server in servers.items()}
    times: dict[str, dict[str, list[float]]] = {version: {} for version in servers}
    good = [version for version, error in failed.items() if error is None]
    for number in range(ROUNDS):
        for version in good if number % 2 == 0 else good[::-1]:
            for kind, values in asked(servers[version], "turn").items():
                if isinstance(values, list):
                    times[version].setdefault(kind, []).extend(values)
    found = {
        version: {kind: round(statistics.median(values), 5) for kind, values in kinds.items() if values}
        for version, kinds in times.items()
    }
    return {"row": row.id, **found, "failed": {k: v for k, v in failed.items() if v is not None}}


def measure(bench: Bench) -> None:
    given = bench.given
    rows = tuple(row for row in ROWS["small" if bench.tiny else given.rows] if given.op in (None, row.op))
    if given.role == "serve":
        return serve(bench, rows)
    if given.role == "compile":
        return compile_rows(bench, rows[given.part :: COMPILING])
    environments = {
        version: environment_of(site, given.caches / version) for version, site in (("old", None), ("new", given.new))
    }
    command = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
    compiling = [
        subprocess.Popen([*command, "--role", "compile", "--part", str(part)], env=environment)
        for environment in environments.values()
        for part in range(min(COMPILING, len(rows)))
    ]
    for process in compiling:
        process.wait()
    asks = [sys.executable, "-c", "import tigon, triton; print(tigon.__version__, triton.__version__)"]
    for version, environment in environments.items():
        answer = subprocess.run(asks, env=environment, capture_output=True, text=True).stdout.split()
        bench.fields[version] = dict(zip(("tigon", "triton"), answer, strict=False))
    servers = {
        version: subprocess.Popen(
            [*command, "--role", "serve"], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for version, environment in environments.items()
    }
    for index, row in enumerate(rows):
        bench.add("rows", medians(servers, row, index))
    for server in servers.values():
        server.terminate()
    return None


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--new", required=True, metavar="FOLDER", help="where the second version is")
    parser.add_argument("--rows", choices=ROWS, default="large", help="default: large")
    parser.add_argument("--op", choices=OPS, help="only the rows of this op")
    parser.add_argument("--caches", type=Path, default=Path("build/versions"), help="folder for compiled kernels")
    parser.add_argument("--role", choices=("serve", "compile"), help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)


CASE = Case(measure=measure, options=options)
