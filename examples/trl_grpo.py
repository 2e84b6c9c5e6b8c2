"""Group relative policy optimization (GRPO) with TRL. tigon needs one line, marked below.

The reward is the share of even numbers in an answer, so the model learns to answer with even numbers.
"""

import tempfile

from tiny import checkpoint, data_set
from trl import GRPOConfig, GRPOTrainer

import tigon.integrations.trl


def even_share(completions: list[str], **_: object) -> list[float]:
    words = [completion.split() for completion in completions]
    return [sum(word.isdigit() and int(word) % 2 == 0 for word in answer) / max(1, len(answer)) for answer in words]


with tempfile.TemporaryDirectory() as folder:
    arguments = GRPOConfig(
        output_dir=folder, max_steps=20, learning_rate=1e-2, logging_steps=1, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", disable_tqdm=True, num_generations=8, max_completion_length=8, seed=0,
    )  # fmt: skip
    data = data_set("prompt")
    trainer = GRPOTrainer(model=checkpoint(), reward_funcs=even_share, args=arguments, train_dataset=data)
    report = tigon.integrations.trl.fuse(trainer)  # the added line
    trainer.train()

rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
print(f"fused {report.fused}, not fused {report.unfused}")
print(f"mean reward of 5 steps {first:.2f} -> {last:.2f}")
assert last > first
