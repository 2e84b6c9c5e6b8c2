"""tigon's losses against those of liger-kernel, if it is installed: losses, all results, and gradients in fp32."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import forks

pytestmark = [
    forks.forks,
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed"),
]

# A copy of this process runs it, because tests that install tigon's names need a process without liger_kernel.
COMPARISON = """
import itertools, sys
sys.path.insert(0, {folder!r})
import torch
import liger_kernel.chunked_loss as theirs
import tigon.compat.liger as ours
from tigon.compat.liger.losses.preference import DPO_LOSS_TYPES
from dense_losses import H, T, V, draw, inputs, results

compared = 0

def compare(name, call, data, **options):
    global compared
    options = dict(options, compiled=False, chunk_size=2)
    found, wanted = (
        results(lambda d: call(getattr(package, name)(**options), d), data, torch.float32) for package in (ours, theirs)
    )
    assert len(found) == len(wanted)
    for value, other in zip(found, wanted):
        torch.testing.assert_close(value, other, rtol=3e-4, atol=3e-4, msg=lambda text: f"{{name}}: {{text}}")
    compared += 1

data, ref = inputs(6, bias=True), inputs(6, bias=True, seed=40).to(torch.float32)
for kind in DPO_LOSS_TYPES:
    compare(
        "LigerFusedLinearDPOLoss", lambda m, d: m(d.weight, d.hidden, d.labels, d.bias, *ref[:3]), data, loss_type=kind,
        compute_nll_loss=True, label_smoothing=0.1 if kind in ("robust", "exo_pair") else 0.0,
    )
for name in ("CPO", "SimPO", "ORPO"):
    compare(f"LigerFusedLinear{{name}}Loss", lambda m, d: m(d.weight, d.hidden, d.labels, d.bias), data)
labels = torch.tensor([True, False, False, True, True, False])
compare(
    "LigerFusedLinearKTOLoss",
    lambda m, d: m(d.hidden, d.weight, d.labels, d.bias, labels, *ref[:3], torch.tensor([0.3])),
    data, use_ref_model=True,
)
mask = (torch.arange(T) < torch.tensor([[6], [3], [5], [1], [4], [6]])).float()
old, reference, advantages = (draw(*s, seed=n).float() for n, s in ((3, (6, T)), (4, (6, T)), (5, (6,))))
ids = data.labels.clamp(min=0)
for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"):
    compare(
        "LigerFusedLinearGRPOLoss",
        lambda m, d: m(d.hidden, d.weight, ids, mask, advantages, d.bias, reference * 0.3 - 3, old * 0.3 - 3), data,
        loss_type=kind, max_completion_length=8,
    )
teacher = [draw(6 * T, 7, seed=1).float(), draw(V, 7, seed=2).float()]
compare(
    "LigerFusedLinearJSDLoss",
    lambda m, d: m(d.hidden.flatten(0, 1), d.weight, *teacher, d.labels.flatten(), d.bias, None), data,
)
print(compared)
"""


def test_losses_results_and_gradients_are_those_of_liger() -> None:
    done = forks.python(code=COMPARISON.format(folder=str(Path(__file__).parent)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["22"]
