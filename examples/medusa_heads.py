"""Medusa heads: train heads that predict several tokens ahead, then decode with them.

Stage 2 trains the model and the heads together. Decoding gives the text of greedy decoding in fewer forward passes.
"""

import torch
from tiny import batches, checkpoint

import tigon
from tigon.medusa import HeadsSpec, Objective, attach, medusa_generate

model = tigon.AutoModelForCausalLM.from_pretrained(checkpoint()).train()
attach(model, HeadsSpec(count=3), Objective(stage=2, coefficient=1.0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

losses = []
for batch in batches(60):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss of the model and its heads {losses[0]:.3f} -> {losses[-1]:.3f}")

model.eval()
prompt = batches(1)[0]["input_ids"][:1, :4]
greedy = model.generate(
    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
)
decoded = medusa_generate(model, prompt, max_new_tokens=12)
assert decoded.tokens == greedy[0, 4:].tolist()
print(f"the same 12 tokens as greedy decoding, in {decoded.forward_passes} forward passes instead of 12")
assert decoded.forward_passes < 12
