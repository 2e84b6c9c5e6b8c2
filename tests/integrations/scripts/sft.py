"""Supervised fine-tuning with TRL. One line of tigon, marked below."""

import sys

from trl import SFTConfig, SFTTrainer
from trl_runs import examples, model, tokenizer

import tigon.integrations.trl

trainer = SFTTrainer(
    model=model(),
    args=SFTConfig(output_dir=sys.argv[1], max_steps=4, use_cpu=True, bf16=False, report_to=[]),
    train_dataset=examples("sft"),
    processing_class=tokenizer(),
)
tigon.integrations.trl.fuse(trainer)  # the added line
trainer.train()
