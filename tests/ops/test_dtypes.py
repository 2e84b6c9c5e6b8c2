"""The dtypes of results and gradients when the inputs' differ: one table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import differentiable, make, run, with_leaves
from tests.ops.cases import cases_of
from tigon.errors import DtypeError
from tigon.ops import OPS

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# op, case, dtype by input (the others keep the case's fp32), dtype of every output
PROMOTION = [
    ("rms_norm", "llama", {"x": BF16, "weight": BF16}, BF16),
    ("rms_norm", "llama", {"x": BF16}, F32),
    ("rms_norm", "llama", {"x": F16}, F32),
    ("rms_norm", "llama", {"weight": BF16}, F32),
    ("rms_norm", "gemma", {"x": BF16}, BF16),
    ("rms_norm", "gemma", {"weight": BF16}, F32),
    ("rms_norm", "fp32-order", {"x": F16}, F16),
    ("rms_norm", "llama", {"x": F64, "weight": F64}, F64),
    ("layer_norm", "plain", {"x": BF16}, BF16),
    ("layer_norm", "plain", {"x": BF16, "weight": BF16, "bias": BF16}, BF16),
    ("layer_norm", "plain", {"x": F64, "weight": F64, "bias": F64}, F64),
    ("swiglu", "separate", {"gate": BF16}, F32),
    ("swiglu", "separate", {"up": BF16}, F32),
    ("swiglu", "separate", {"gate": BF16, "up": F16}, F32),
    ("swiglu", "separate", {"gate": BF16, "up": BF16}, BF16),
    ("swiglu", "separate", {"up": F64}, F64),
    ("swiglu", "packed", {"gate": F16}, F16),
    ("geglu", "separate", {"gate": F16}, F32),
    ("geglu", "exact", {"gate": F16, "up": BF16}, F32),
    ("geglu", "separate", {"gate": F64}, F64),
    ("rope", "llama", {"q": BF16, "k": BF16}, BF16),
    ("rope", "llama", {"q": F16, "k": F16, "cos": BF16, "sin": BF16}, F16),
    ("rope", "llama", {"cos": BF16, "sin": BF16}, F32),
    ("rope", "llama", {"cos": F64, "sin": F64}, F32),
    ("rope", "llama", {"q": F64, "k": F64}, F64),
    ("cross_entropy", "mean", {"logits": BF16}, F32),
    ("cross_entropy", "none", {"logits": F16}, F32),
    ("cross_entropy", "sum", {"logits": F64}, F64),
    ("linear_cross_entropy", "mean-keep", {"hidden": BF16}, F32),
    ("linear_cross_entropy", "mean-keep", {"hidden": F16, "weight": F16}, F32),
    ("linear_cross_entropy", "mean-keep", {"hidden": BF16, "weight": F16}, F32),
    ("linear_cross_entropy", "mean-keep", {"hidden": F64}, F64),
]


@pytest.mark.parametrize(
    ("name", "case_id", "dtypes", "expected"),
    PROMOTION,
    ids=["-".join([row[0], row[1], *(f"{n}={str(d)[6:]}" for n, d in row[2].items())]) for row in PROMOTION],
)
def test_results_and_gradients_have_the_dtypes_of_the_table(
    name: str, case_id: str, dtypes: dict[str, torch.dtype], expected: torch.dtype, backend: Any
) -> None:
    """Outputs have the dtype of the table, each gradient its input's."""
    op = OPS[name]
    case = next(c for c in cases_of(op) if c.id == case_id)
    inputs = make(op, case, F32, backend.device)
    inputs |= {n: inputs[n].to(dtype) for n, dtype in dtypes.items()}
    got = run(op.call, op, with_leaves(op, inputs))
    assert [t.dtype for t in got.outputs] == [expected] * len(got.outputs)
    assert {n: t.dtype for n, t in got.grads.items()} == {n: inputs[n].dtype for n in differentiable(op, inputs)}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("name", OPS)
def test_unsupported_dtype_is_refused(name: str, dtype: torch.dtype) -> None:
    """An integer or fp8 activation is a mistake, or needs a scale that nobody passed."""
    op = OPS[name]
    inputs = make(op, op.case, F32)
    inputs[op.grads[0]] = inputs[op.grads[0]].to(dtype)
    with pytest.raises(DtypeError, match=str(dtype)):
        op.call(**inputs)
