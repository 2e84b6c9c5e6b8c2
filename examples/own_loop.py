"""A training loop in plain PyTorch: load and patch a model in one call, then train it.

The loss never holds the logits of all tokens. `num_items_in_batch` divides the summed loss by the labels of the whole
step, so that two micro-batches give the gradient of one large batch.
"""

import torch
from tiny import batches, checkpoint

import tigon

STEPS, MICRO_BATCHES = 30, 2

model = tigon.AutoModelForCausalLM.from_pretrained(checkpoint()).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = iter(batches(STEPS * MICRO_BATCHES))

losses = []
for _ in range(STEPS):
    micro_batches = [next(data) for _ in range(MICRO_BATCHES)]
    labels_of_step = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
    step_loss = 0.0
    for batch in micro_batches:
        loss = model(**batch, num_items_in_batch=labels_of_step).loss
        loss.backward()
        step_loss += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(step_loss)

print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
assert losses[-1] < 0.5 * losses[0]
