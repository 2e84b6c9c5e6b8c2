"""Kahneman-Tversky optimization (KTO) with TRL. tigon needs one line, marked below.

Each answer has a label: good if it counts on, bad if it repeats a number.
"""

import tempfile

from datasets import Dataset
from tiny import checkpoint, data_set
from trl import KTOConfig, KTOTrainer

import tigon.integrations.trl

pairs = data_set("prompt", "chosen", "rejected").to_list()
answers = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in pairs]
answers += [{"prompt": row["prompt"], "completion": row["rejected"], "label": False} for row in pairs]

with tempfile.TemporaryDirectory() as folder:
    arguments = KTOConfig(
        output_dir=folder, max_steps=16, learning_rate=2e-3, logging_steps=1, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = KTOTrainer(model=checkpoint(), args=arguments, train_dataset=Dataset.from_list(answers))
    report = tigon.integrations.trl.fuse(trainer)  # the added line
    trainer.train()

good, bad = (
    [entry[f"rewards/{label}"] for entry in trainer.state.log_history if f"rewards/{label}" in entry][-1]
    for label in ("chosen", "rejected")
)
print(f"fused {report.fused}, not fused {report.unfused}")
print(f"reward of good answers {good:.3f}, of bad answers {bad:.3f}")
assert good > bad
