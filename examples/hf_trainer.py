"""The Trainer of transformers with a patched model.

Patch the model before the Trainer gets it. The losses stay those of the unpatched run.
"""

import tempfile

from tiny import batches, checkpoint
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import tigon

data = [{key: value[0] for key, value in batch.items()} for batch in batches(64, size=1)]


def train(patched: bool) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    if patched:
        tigon.patch(model)  # the added line
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=10, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
            seed=0, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="steps",
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


plain, patched = train(patched=False), train(patched=True)
difference = max(abs(a - b) for a, b in zip(plain, patched, strict=True))
print(f"loss {patched[0]:.3f} -> {patched[-1]:.3f}; largest difference from the unpatched run {difference:.1e}")
assert difference < 1e-3 and patched[-1] < patched[0]
