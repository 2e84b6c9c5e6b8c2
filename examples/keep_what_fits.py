"""Recompute only what the GPU's memory requires: plan a model, apply the plan, and undo it.

In a loop of your own the plan gives the micro-batch; in the Hugging Face Trainer it gives two arguments.
"""

import tempfile

import torch
from tiny import batches, checkpoint
from transformers import Trainer, TrainingArguments

import tigon

SAMPLES, STEPS, TOKENS = 16, 10, 12

model = tigon.AutoModelForCausalLM.from_pretrained(checkpoint()).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
# Leave memory out to plan for the memory that this process's GPU has free.
plan = tigon.plan(model, batch=SAMPLES, seq=TOKENS, optimizer=optimizer, memory="2GiB", precision="fp32")
print(plan)

data = next(iter(batches(1, SAMPLES)))
want = torch.autograd.grad(model(**data).loss, list(model.parameters()))
with tigon.checkpoint(model, "full:1,mlp:1"):  # your choice; tigon.checkpoint(model, plan) for the plan's
    got = torch.autograd.grad(model(**data).loss, list(model.parameters()))
assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
print("the gradients are equal bit for bit")

recomputing = tigon.checkpoint(model, plan)
losses = []
for _ in range(STEPS):
    for batch in batches(plan.accumulate, plan.batch):
        loss = model(**batch).loss / plan.accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item() * plan.accumulate)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps of a plain loop")

rows = [{name: t[0] for name, t in batch.items()} for batch in batches(STEPS * SAMPLES, 1)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=plan.batch, gradient_accumulation_steps=plan.accumulate, max_steps=STEPS,
        learning_rate=1e-2, optim="adamw_torch_fused", use_cpu=not torch.cuda.is_available(), report_to=[],
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    result = Trainer(model, arguments, train_dataset=rows).train()
print(f"mean loss {result.training_loss:.3f} in {STEPS} steps of the Trainer")
recomputing.undo()
assert result.training_loss < losses[0]
