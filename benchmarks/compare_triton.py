"""Times of the ops with two releases of Triton on one card, in turns.

    pip install --target NEW triton==3.9.0
    python -m benchmarks.compare_triton --new NEW --json RECORD --commit COMMIT

A process of each release holds the same row and is asked for a turn. Kernels are compiled before, in processes of both
releases. The record has medians in ms and, for the host, us.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch

ROUNDS, REPETITIONS, COMPILING = 4, 5, 6
# op, shape, options, whether a CUDA graph of it is timed too
ROWS: tuple[tuple[str, tuple[int, ...], dict[str, Any], bool], ...] = (
    ("rms_norm", (16384, 4096), {}, True),
    ("rms_norm", (16384, 16384), {}, True),
    ("rms_norm", (1_000_000, 128), {}, True),
    ("rms_norm", (1, 4096), {}, True),
    ("add_rms_norm", (16384, 4096), {}, True),
    ("layer_norm", (16384, 4096), {}, True),
    ("layer_norm", (16384, 16384), {}, True),
    ("rope", (4, 32, 4096, 128), {"kv_heads": 8}, True),
    ("swiglu", (16384, 14336), {}, True),
    ("geglu", (16384, 14336), {}, True),
    ("swiglu", (1, 14336), {}, True),
    ("cross_entropy", (8192, 128256), {"ignored": 0.0, "inplace": True}, True),
    ("cross_entropy", (8192, 32000), {"ignored": 0.0, "inplace": True}, True),
    ("logprobs", (4096, 128256), {"ignored": 0.0}, True),
    ("linear_cross_entropy", (8192, 4096, 128256), {"ignored": 0.0}, False),
    ("linear_cross_entropy", (4096, 2048, 128256), {"ignored": 0.0}, False),
    ("linear_cross_entropy", (4096, 2048, 128256), {"ignored": 0.0, "softcap": 30.0}, False),
    ("linear_logprobs", (4096, 2048, 128256), {"ignored": 0.0}, False),
    ("linear_kl", (4096, 2048, 128256), {"kind": "jsd"}, False),
    ("lora_linear", (8192, 4096, 14336, 16), {"scaling": 2.0}, True),
    ("lora_linears", (4096, 4096, 4096, 1024, 16), {"scaling_0": 2.0}, True),
    ("fp8_linear", (8192, 4096, 14336), {}, True),
    ("experts", (8192, 8, 128, 2048), {"inner": 768}, False),
    ("experts", (4096, 2, 8, 4096), {"inner": 14336}, False),
    ("topk_softmax", (16384, 128), {"top_k": 8, "normalised": True}, True),
    ("load_balancing_loss", (16384, 128), {"top_k": 8}, True),
    (
        "multi_head_linear_cross_entropy",
        (2, 2048, 2048, 32000),
        {"hiddens": 3, "weights": 3, "shifts": (2, 3, 4), "head_weights": (1.0, 0.8, 0.64)},
        False,
    ),
)


def name_of(index: int) -> str:
    op, shape, options, _ = ROWS[index]
    return f"{op} {'x'.join(map(str, shape))}" + " softcap" * ("softcap" in options)


class Prepared:
    """A row with its tensors, ready to be timed, forward and backward."""

    def __init__(self, index: int) -> None:
        from tigon.bench import measure, timing
        from tigon.bench.impls import impls_for
        from tigon.bench.suites import Row
        from tigon.ops import OPS

        op, shape, options, graph = ROWS[index]
        self.device = torch.device("cuda", 0)
        row = Row(op=op, shape=shape, options=options, graph=graph)
        problem = measure.Problem.of(row, torch.bfloat16, self.device)
        self.bound = bound = problem.bind(next(impl for impl in impls_for(OPS[op]) if impl.name == "tigon"))
        bound.restore()
        bound.both()
        bound.restore()
        self.runs = {"eager": timing.Run(bound.both, bound.restore, idle=True)}
        if graph:
            captured = timing.Graphs(self.device).capture(bound.both)
            self.runs["graph"] = timing.Run(captured, bound.restore, idle=False)
        timing.take_turns(self.runs, 1, self.device)

    def turn(self) -> dict[str, list[float]]:
        """Milliseconds of each run, and the host's microseconds of one call."""
        from tigon.bench import timing

        with timing.no_garbage_collection():
            found = timing.take_turns(self.runs, REPETITIONS, self.device)
            times = {name: list(values) for name, values in found.items() if isinstance(values, list)}
            about_ms = statistics.median(times["eager"])
            host_us = timing.host_us(self.bound.both, self.bound.restore, about_ms, self.device)
        return {**times, "host_us": [] if host_us is None else [host_us]}


def serve() -> None:
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
                gc.collect()
                torch.cuda.empty_cache()
                prepared = Prepared(int(rest[0]))
            elif prepared is not None:
                answer = prepared.turn()
        except Exception as error:  # the other release's row goes on
            answer = {"error": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps(answer), file=answers, flush=True)


def compile_rows(indices: list[int]) -> None:
    """Fill the release's cache."""
    for index in indices:
        try:
            Prepared(index)
        except Exception as error:
            print(f"{name_of(index)}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()


def environment_of(site: str | None, cache: Path) -> dict[str, str]:
    path = [*([site] if site else []), "src", ".", os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "TRITON_CACHE_DIR": str(cache), "TIGON_CACHE": "0", "PYTHONPATH": os.pathsep.join(path)}


def asked(process: subprocess.Popen[str], line: str) -> dict[str, Any]:
    to: IO[str] | None = process.stdin
    back: IO[str] | None = process.stdout
    assert to is not None and back is not None
    print(line, file=to, flush=True)
    answer = back.readline()
    return json.loads(answer) if answer else {"error": f"the process ended with {process.poll()}"}


def medians(servers: dict[str, subprocess.Popen[str]], index: int) -> dict[str, Any]:
    """One row of the record."""
    failed = {release: asked(server, f"prepare {index}").get("error") for release, server in servers.items()}
    times: dict[str, dict[str, list[float]]] = {release: {} for release in servers}
    good = [release for release, error in failed.items() if error is None]
    for number in range(ROUNDS):
        for release in good if number % 2 == 0 else good[::-1]:
            for kind, values in asked(servers[release], "turn").items():
                if isinstance(values, list):
                    times[release].setdefault(kind, []).extend(values)
    found = {
        release: {kind: round(statistics.median(values), 5) for kind, values in kinds.items() if values}
        for release, kinds in times.items()
    }
    return {"row": name_of(index), **found, "failed": {k: v for k, v in failed.items() if v is not None}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", required=True, help="folder with the other release, before the environment's own")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", required=True, help="of the checkout")
    parser.add_argument("--caches", type=Path, default=Path("build/compare-triton"))
    options = parser.parse_args()
    sites = {"old": None, "new": options.new}
    environments = {release: environment_of(site, options.caches / release) for release, site in sites.items()}
    command = [sys.executable, "-m", "benchmarks.compare_triton"]
    compiling = [
        subprocess.Popen([*command, "compile", *map(str, range(len(ROWS))[part::COMPILING])], env=environment)
        for environment in environments.values()
        for part in range(COMPILING)
    ]
    for process in compiling:
        process.wait()
    asks_version = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": {
            release: subprocess.run(asks_version, env=environment, capture_output=True, text=True).stdout.strip()
            for release, environment in environments.items()
        },
        "commit": options.commit,
        "date": time.strftime("%Y-%m-%d"),
        "rows": [],
    }
    servers = {
        release: subprocess.Popen(
            [*command, "serve"], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for release, environment in environments.items()
    }
    for index in range(len(ROWS)):
        record["rows"].append(medians(servers, index))
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(record["rows"][-1]), flush=True)
    for server in servers.values():
        server.terminate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    elif sys.argv[1:2] == ["compile"]:
        compile_rows([int(word) for word in sys.argv[2:]])
    else:
        main()
