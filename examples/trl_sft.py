"""Supervised fine-tuning with TRL. tigon needs one line, marked below."""

import tempfile

from tiny import checkpoint, data_set
from trl import SFTConfig, SFTTrainer

import tigon.integrations.trl

with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        output_dir=folder, max_steps=10, learning_rate=1e-2, logging_steps=1, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(model=checkpoint(), args=arguments, train_dataset=data_set("text"))
    report = tigon.integrations.trl.fuse(trainer)  # the added line
    trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"fused {report.fused}, not fused {report.unfused}")
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0]
