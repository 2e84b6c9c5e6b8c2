"""The errors in the op records are measurements; this measures them again. `pytest -s` prints what to record."""

from __future__ import annotations

import math

import pytest
import torch

from backends import tens_of_gib
from helpers import cast, make, relative_error, run, upstream_for, with_leaves
from tests.ops.cases import cases_of
from tigon.ops import OPS, Op

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def worst_error(op: Op, dtype: torch.dtype) -> tuple[float, str]:
    """The largest relative Frobenius error against the fp64 oracle over all cases, and of what it is."""
    worst = (0.0, "nothing")
    for case in cases_of(op):
        inputs = make(op, case, dtype, "cuda")
        got = run(op.call, op, with_leaves(op, inputs))
        truth = run(op.oracle, op, with_leaves(op, cast(inputs, torch.float64)), upstream_for(got.outputs)).named()
        errors = ((relative_error(value, truth[name]), f"{case.id}: {name}") for name, value in got.named().items())
        worst = max(worst, *((math.inf if math.isnan(error) else error, of) for error, of in errors))
    return worst


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_recorded_error_matches_the_measured_one(name: str) -> None:
    op = OPS[name]
    with tens_of_gib():
        measured = {dtype: worst_error(op, torch_dtype) for dtype, torch_dtype in DTYPES.items()}
    print(name, {dtype: f"{error:.1e}" for dtype, (error, _) in measured.items()})
    for dtype, (error, of) in measured.items():
        # Another card sums in another order; a factor of two is a change of algorithm.
        assert error <= 2 * op.errors[dtype], (dtype, of, error)
        assert op.errors[dtype] <= 2 * error, (dtype, of, error)


@pytest.mark.parametrize("name", OPS)
def test_op_has_recorded_errors_for_every_dtype(name: str) -> None:
    assert set(OPS[name].errors) == set(DTYPES)
