"""Extreme logits through the path that keeps exponentials.

The interpreter runs a small vocabulary. A GPU runs real ones in a separate process with a time limit for every step.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from exponential_attack import OPTIONS, SECONDS_PER_STEP, SIZES, steps

from backends import Backend, tens_of_gib

TESTS = Path(__file__).resolve().parents[1]


# The steps at the ends of the range only, because the interpreter takes a second for each.
INTERPRETED = ("deviation 150, labels mixed", "a row of nan", "a row of 3e38")


@pytest.mark.parametrize("option", ["plain", "softcap"])
def test_extreme_rows_are_within_twice_the_unfused_ops_error(option: str, backend: Any) -> None:
    run: Backend = backend
    if not run.interpreted:
        pytest.skip("the GPU has its test below, and the reference keeps logits")
    chosen = [step for step in steps(24, 16, 120, option, "cpu") if step[0].startswith(INTERPRETED)]
    assert len(chosen) == len(INTERPRETED)
    wrong = {name: text for name, step in chosen if (text := step())}
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("vocab", [5003, 32000, 128256])
@pytest.mark.parametrize("size", SIZES)
def test_extreme_rows_on_a_gpu_are_within_twice_the_unfused_ops_error(size: str, vocab: int, option: str) -> None:
    command = [sys.executable, str(TESTS / "ops" / "exponential_attack.py"), size, str(vocab), option]
    try:
        with nullcontext() if size == "small" else tens_of_gib():
            done = subprocess.run(command, capture_output=True, text=True, timeout=10 * SECONDS_PER_STEP, check=False)
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        pytest.fail(f"no end after {late.timeout:.0f} s; the last step was {output.splitlines()[-1:]}")
    assert done.returncode == 0, f"{done.stdout[-400:]}\n{done.stderr[-2000:]}"
