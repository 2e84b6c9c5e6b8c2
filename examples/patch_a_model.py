"""Patch a model, compare its loss and gradients with the unpatched model's, and undo the patch."""

import copy

import torch
from tiny import batches, checkpoint
from transformers import AutoModelForCausalLM

import tigon

plain = AutoModelForCausalLM.from_pretrained(checkpoint()).train()
model = copy.deepcopy(plain)
batch = batches(1)[0]

report = tigon.patch(model)  # this instance only
print(report)

losses = [m(**batch).loss for m in (plain, model)]
for loss in losses:
    loss.backward()
gradients = [m.get_input_embeddings().weight.grad for m in (plain, model)]
torch.testing.assert_close(losses[1], losses[0])
torch.testing.assert_close(gradients[1], gradients[0])
print(f"loss unpatched {losses[0]:.6f}, patched {losses[1]:.6f}; the gradients agree")

report.undo()
assert all(type(a) is type(b) for a, b in zip(plain.modules(), model.modules(), strict=True))
print("undone: every module has its own class again")
