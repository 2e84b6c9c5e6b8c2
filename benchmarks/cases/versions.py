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
from tigon.bench import measure as bench_measure
from tigon.bench import timing
from tigon.bench.impls import impls_for
from tigon.bench.suites import SMALL, Row
from tigon.ops import OPS

ROUNDS, REPETITIONS, COMPILING = 4, 5, 6
_PLAIN: dict[str, Any] = {"ignored": 0.0}
_HEADS = {"hiddens": 3, "weights": 3, "shifts": (2, 3, 4), "head_weights": (1.0, 0.8, 0.64)}
LARGE = (
    Row(op="rms_norm", shape=(16384, 4096)),
    Row(op="rms_norm", shape=(16384, 16384)),
    Row(op="rms_norm", shape=(1_000_000, 128)),
    Row(op="rms_norm", shape=(1, 4096)),
    Row(op="add_rms_norm", shape=(16384, 4096)),
    Row(op="layer_norm", shape=(16384, 4096)),
    Row(op="layer_norm", shape=(16384, 16384)),
    Row(op="rope", shape=(4, 32, 4096, 128), options={"kv_heads": 8}),
    Row(op="swiglu", shape=(16384, 14336)),
    Row(op="geglu", shape=(16384, 14336)),
    Row(op="swiglu", shape=(1, 14336)),
    Row(op="cross_entropy", shape=(8192, 128256), options={**_PLAIN, "inplace": True}),
    Row(op="cross_entropy", shape=(8192, 32000), options={**_PLAIN, "inplace": True}),
    Row(op="logprobs", shape=(4096, 128256), options=_PLAIN),
    Row(op="linear_cross_entropy", shape=(8192, 4096, 128256), options=_PLAIN, graph=False),
    Row(op="linear_cross_entropy", shape=(4096, 2048, 128256), options=_PLAIN, graph=False),
    Row(
        op="linear_cross_entropy", shape=(4096, 2048, 128256), options={**_PLAIN, "softcap": 30.0}, graph=False,
        problem="softcap",
    ),
    Row(op="linear_logprobs", shape=(4096, 2048, 128256), options=_PLAIN, graph=False),
    Row(op="linear_kl", shape=(4096, 2048, 128256), options={"kind": "jsd"}, graph=False),
    Row(op="lora_linear", shape=(8192, 4096, 14336, 16), options={"scaling": 2.0}),
    Row(op="lora_linears", shape=(4096, 4096, 4096, 1024, 16), options={"scaling_0": 2.0}),
    Row(op="fp8_linear", shape=(8192, 4096, 14336)),
    Row(op="experts", shape=(8192, 8, 128, 2048), options={"inner": 768}, graph=False),
    Row(op="experts", shape=(4096, 2, 8, 4096), options={"inner": 14336}, graph=False),
    Row(op="topk_softmax", shape=(16384, 128), options={"top_k": 8, "normalised": True}),
    Row(op="load_balancing_loss", shape=(16384, 128), options={"top_k": 8}),
    Row(op="multi_head_linear_cross_entropy", shape=(2, 2048, 2048, 32000), options=_HEADS, graph=False),
)  # fmt: skip
ROWS = {"large": LARGE, "small": SMALL}


class Prepared:
    """A row with its tensors, ready to be timed, forward and backward."""

    def __init__(self, row: Row, device: torch.device) -> None:
        self.device = device
        problem = bench_measure.Problem.of(row, torch.bfloat16, device)
        self.bound = bound = problem.bind(next(impl for impl in impls_for(OPS[row.op]) if impl.name == "tigon"))
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
