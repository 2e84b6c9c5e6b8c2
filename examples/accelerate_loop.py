"""A training loop with Accelerate: patch the model, then call `prepare`.

Accumulation and clipping are Accelerate's.
"""

import torch
from accelerate import Accelerator
from tiny import batches, checkpoint

import tigon

model = tigon.AutoModelForCausalLM.from_pretrained(checkpoint()).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(batches(60), batch_size=None)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())

print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses) // 2} steps")
assert losses[-1] < 0.5 * losses[0]
