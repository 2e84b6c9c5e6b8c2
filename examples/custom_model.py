"""A model that is not from transformers: the loss from its hidden states and its head's weight, without logits."""

import torch
import torch.nn.functional as F
from tiny import batches
from torch import Tensor, nn

import tigon

VOCABULARY, WIDTH = 32, 48


class Bigram(nn.Module):
    """Predicts the next token from the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = tigon.nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def loss(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(ids[:, :-1])).flatten(0, 1)
        return tigon.linear_cross_entropy(hidden, self.head.weight, ids[:, 1:].flatten())

    def loss_with_logits(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(ids[:, :-1])).flatten(0, 1)
        return F.cross_entropy(self.head(hidden), ids[:, 1:].flatten())


torch.manual_seed(0)
model = Bigram()
data = [batch["input_ids"] for batch in batches(50)]

weights = list(model.parameters())
expected = torch.autograd.grad(model.loss_with_logits(data[0]), weights)
computed = torch.autograd.grad(model.loss(data[0]), weights)
for gradient, reference in zip(computed, expected, strict=True):
    torch.testing.assert_close(gradient, reference)
print("the gradients agree with F.cross_entropy")

optimizer = torch.optim.AdamW(weights, lr=1e-2)
losses = []
for ids in data:
    loss = model.loss(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.2 * losses[0]
