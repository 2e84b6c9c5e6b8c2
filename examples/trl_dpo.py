"""Direct preference optimization (DPO) with TRL. tigon needs one line, marked below.

The chosen answer counts on, and the rejected answer repeats a number. The margin between their rewards must rise.
"""

import tempfile

from tiny import checkpoint, data_set
from trl import DPOConfig, DPOTrainer

import tigon.integrations.trl

with tempfile.TemporaryDirectory() as folder:
    arguments = DPOConfig(
        output_dir=folder, max_steps=10, learning_rate=1e-3, logging_steps=1, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = DPOTrainer(model=checkpoint(), args=arguments, train_dataset=data_set("prompt", "chosen", "rejected"))
    report = tigon.integrations.trl.fuse(trainer)  # the added line
    trainer.train()

margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
print(f"fused {report.fused}, not fused {report.unfused}")
print(f"reward margin {margins[0]:.3f} -> {margins[-1]:.3f}")
assert margins[-1] > margins[0]
