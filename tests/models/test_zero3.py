"""DeepSpeed ZeRO-3 itself: the head's weight is empty but while DeepSpeed's hooks have gathered it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tigon.trainer.distributed import launch

STEPS = 4
_TRAIN = """
import json, sys
import deepspeed, torch
from models_helpers import batch, twins
from tigon.models import DeferredLogits, patch

model = twins(sys.argv[1])[0]
if sys.argv[2] == "patched":
    patch(model)
config = {
    "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
losses, head_rows, deferred = [], [], []
for step in range(int(sys.argv[3])):
    head_rows.append(model.get_output_embeddings().weight.numel())
    out = engine(**{name: t.cuda() for name, t in batch().items()})
    deferred.append(isinstance(out.logits, DeferredLogits))
    engine.backward(out.loss)
    engine.step()
    losses.append(out.loss.item())
print("RESULT" + json.dumps({"losses": losses, "head_rows": head_rows, "deferred": deferred}))
"""


def train(family: str, kind: str) -> dict[str, list[float]]:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *sys.path])
    lone = {**os.environ, "PYTHONPATH": path, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", _TRAIN, family, kind, str(STEPS)]
    with launch.reserved_address() as meeting:
        done = subprocess.run(command, env={**lone, **meeting}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULT")[1])


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_deepspeed_zero3_trains_to_the_same_losses_without_logits(family):
    pytest.importorskip("deepspeed")
    plain, patched = train(family, "plain"), train(family, "patched")
    assert patched["head_rows"] == [0] * STEPS, "the head was not partitioned, so this proves nothing"
    assert patched["deferred"] == [True] * STEPS
    assert patched["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert plain["losses"][-1] < plain["losses"][0]
