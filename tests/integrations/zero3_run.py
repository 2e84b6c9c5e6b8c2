"""Trains with DeepSpeed ZeRO-3 on the CPU, each named trainer without and with `fuse`; prints the logs as JSON.

Prints also the layers of both models of a patched and fused DPOTrainer.
"""

import json
import sys

from trl_runs import build, model

import tigon.integrations.trl
from tigon.integrations.trl.layers import layer_kinds, second_models
from tigon.models.patch import unwrap

CONFIG = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_clipping": "auto",
}  # fmt: skip

model(), model(seed=1, hidden_size=48)  # saved before ZeRO-3 partitions every model that is made
results = {}
for kind in sys.argv[1:]:
    for fused in (False, True):
        trainer = build(kind, deepspeed=CONFIG)
        report = tigon.integrations.trl.fuse(trainer) if fused else None
        trainer.train()
        assert trainer.model.get_output_embeddings().weight.numel() == 0, "the head is not partitioned"
        logs = [{k: v for k, v in entry.items() if isinstance(v, float | int)} for entry in trainer.state.log_history]
        results[f"{kind} {'fused' if fused else 'plain'}"] = {
            "logs": logs, "fused": report.fused if report else [], "unfused": report.unfused if report else {},
        }  # fmt: skip
if "DPO" in sys.argv:
    trainer = build("DPO", deepspeed=CONFIG)
    tigon.patch(unwrap(trainer.model))
    said = tigon.integrations.trl.fuse(trainer).unfused
    models = {"policy": unwrap(trainer.model), "reference": second_models(trainer)["ref_model"]}
    results["layers"] = {**{name: sorted(layer_kinds(model)) for name, model in models.items()}, "unfused": said}
print("RESULT" + json.dumps(results))
