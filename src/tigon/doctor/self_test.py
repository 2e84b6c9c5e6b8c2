"""Compares every op with its fp64 formula (tigon.ops.self_test) on this machine, in child processes.

A faulty kernel can end the process (an illegal instruction, an address out of bounds), and after a CUDA fault the
process cannot use the GPU any more. The checks therefore run in a child process, which prints the name of each check
before it starts. If the child dies, the started check becomes the finding, and another child runs the remaining checks.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from tigon.ops import OPS
from tigon.ops.self_test import DTYPES, PRODUCT, OpCheck, check_op

CHECKS = tuple((name, dtype) for dtype in DTYPES for name in (PRODUCT, *OPS))
TIMEOUT_S = 300.0
CHILD = "import sys; from tigon.doctor.self_test import main; main(sys.argv[1])"


def run_self_test(timeout_s: float = TIMEOUT_S, child: str = CHILD) -> list[OpCheck]:
    """Run all checks, in as many child processes as needed. `child` is the Python code that each of them runs."""
    results: list[OpCheck] = []
    remaining = list(CHECKS)
    while remaining:
        done = list(_one_child(remaining, timeout_s, child))
        results += done
        finished = {(check.op, check.dtype) for check in done}
        assert finished, "a child reports at least the check in which it died"
        remaining = [check for check in remaining if check not in finished]
    return results


def _one_child(checks: Sequence[tuple[str, str]], timeout_s: float, child: str) -> Iterator[OpCheck]:
    """The results of one child, and an error for the check that it died in, if any."""
    command = [sys.executable, "-c", child, json.dumps(checks)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            code: int | str = subprocess.run(command, stdout=out, stderr=err, timeout=timeout_s, check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"no answer for {timeout_s:.0f} s"
        out.seek(0)
        err.seek(0)
        lines = [json.loads(line) for line in out.read().splitlines() if line.startswith("{")]
        last_words = " ".join(err.read().split())[-300:]
    started = [(line["op"], line["dtype"]) for line in lines if "share" not in line]
    # If a child could not start, the others would not start either.
    fatal = [] if code == 0 else started[-1:] or list(checks)
    finished = [OpCheck(**line) for line in lines if "share" in line]
    yield from (check for check in finished if (check.op, check.dtype) not in fatal)
    cause = _cause(code) + (f": {last_words}" if last_words else "")
    yield from (OpCheck(op=op, dtype=dtype, error=cause) for op, dtype in fatal)


def _cause(code: int | str) -> str:
    if isinstance(code, str):
        return code
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with code {code}"


def main(checks: str) -> None:
    """The child's code: prints one line of JSON before each check and one after it."""
    for name, dtype in json.loads(checks):
        print(json.dumps({"op": name, "dtype": dtype}), flush=True)
        print(json.dumps(asdict(check_op(name, dtype))), flush=True)
