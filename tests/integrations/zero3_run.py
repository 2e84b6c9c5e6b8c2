"""Trains with DeepSpeed ZeRO-3 on the CPU, each named trainer without and with `fuse`; prints the logs as JSON."""

import json
import sys

from trl_runs import build, model

import tigon.integrations.trl

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
print("RESULT" + json.dumps(results))
