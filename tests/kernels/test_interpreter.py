"""The faster interpreter of the tests computes what Triton's own does, bit by bit."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends import HAS_GPU, HAS_TRITON, kernels_on_the_cpu
from second_proofs import proved_by
from tests.ops.cases import cases_of
from tigon.ops import OPS, Op

pytestmark = pytest.mark.skipif(
    HAS_GPU or not HAS_TRITON or not importlib.metadata.version("triton").startswith("3.6."),
    reason="kernels are not interpreted, or by another version than the one that is made faster",
)
TESTS = Path(__file__).parents[1]
NAMES = [name for name, op in OPS.items() if op.has_kernel]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST = 4 * torch.finfo(torch.bfloat16).tiny
"""Results below this are compared as zeros: Triton 3.6 converts numbers below bf16's normal ones to others."""


def digests(op: Op) -> dict[str, str]:
    """Case and dtype -> a digest of the op's outputs and gradients, all of them interpreted."""
    found = {}
    for dtype in DTYPES:
        for case in cases_of(op):
            if case.small and "vocab_parallel" not in case.options:
                torch.manual_seed(0)
                found[f"{case.id} {dtype}"] = digest(op, op.make(case, dtype, torch.device("cpu")))
    return found


def digest(op: Op, inputs: dict[str, object]) -> str:
    leaves = {name: t.detach().requires_grad_(name in op.grads) if isinstance(t, Tensor) else t
              for name, t in inputs.items()}  # fmt: skip
    with kernels_on_the_cpu():
        result = op.call(**leaves)
        results = [t for t in ([result] if isinstance(result, Tensor) else result) if isinstance(t, Tensor)]
        outputs = [t for t in results if t.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    gradients = [t.grad for t in leaves.values() if isinstance(t, Tensor) and t.grad is not None]
    whole = hashlib.sha256()
    for t in (*results, *gradients):
        values = t.detach().reshape(-1).contiguous()
        if values.dtype == torch.bfloat16:
            values = values.masked_fill(values.abs() < SMALLEST, 0.0)
        whole.update(values.view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


OWN = """
import json, sys, types
import torch
sys.modules["interpreter"] = types.SimpleNamespace(make_faster=lambda interpreter: None)
sys.path[:0] = [{tests!r}, {tests!r} + "/kernels"]
from test_interpreter import OPS, digests
torch.set_num_threads(1)
print(json.dumps(digests(OPS[{name!r}])))
"""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", proved_by(["swiglu"], NAMES, "each operator of a type is replaced in one way"))
def test_op_has_the_bits_of_tritons_own_interpreter(name: str) -> None:
    command = [sys.executable, "-c", OWN.format(tests=str(TESTS), name=name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    want, got = json.loads(done.stdout), digests(OPS[name])
    assert len(want) >= 3 and {case for case in want if want[case] != got[case]} == set() and want.keys() == got.keys()
