"""Direct preference optimization with TRL. One line of tigon, marked below."""

import sys

from trl import DPOConfig, DPOTrainer
from trl_runs import examples, model, tokenizer

import tigon.integrations.trl

trainer = DPOTrainer(
    model=model(),
    args=DPOConfig(output_dir=sys.argv[1], max_steps=4, use_cpu=True, bf16=False, report_to=[]),
    train_dataset=examples("preference"),
    processing_class=tokenizer(),
)
tigon.integrations.trl.fuse(trainer)  # the added line
trainer.train()
