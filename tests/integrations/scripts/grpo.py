"""Group relative policy optimization with TRL. One line of tigon, marked below."""

import sys

from trl import GRPOConfig, GRPOTrainer
from trl_runs import examples, model, reward, tokenizer

import tigon.integrations.trl

trainer = GRPOTrainer(
    model=model(),
    reward_funcs=reward,
    args=GRPOConfig(
        output_dir=sys.argv[1],
        max_steps=2,
        num_generations=4,
        max_completion_length=8,
        use_cpu=True,
        bf16=False,
        report_to=[],
    ),
    train_dataset=examples("prompt"),
    processing_class=tokenizer(),
)
tigon.integrations.trl.fuse(trainer)  # the added line
trainer.train()
