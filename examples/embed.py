"""An embedding model with sentence-transformers' trainer. tigon needs one line, marked below.

A text and its continuation must be near each other. The loss is Matryoshka's over a cached in-batch loss, which runs
the model twice per batch. It stays the library's own, and its gradients must agree with the unpatched model's.
"""

import tempfile

import datasets
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss, MatryoshkaLoss
from tiny import checkpoint, rows

import tigon

pairs = datasets.Dataset.from_list([{"anchor": row["prompt"], "positive": row["chosen"].strip()} for row in rows()])


def matryoshka(model: SentenceTransformer) -> MatryoshkaLoss:
    return MatryoshkaLoss(model, CachedMultipleNegativesRankingLoss(model, mini_batch_size=4), matryoshka_dims=[32, 16])


def gradients(model: SentenceTransformer) -> list[torch.Tensor]:
    """The gradients of the first 16 pairs."""
    features = [model.preprocess(pairs[:16][name]) for name in ("anchor", "positive")]
    model.train().zero_grad()
    matryoshka(model)(features, None).backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


model = SentenceTransformer(checkpoint(), device="cpu")
expected = gradients(model)
report = tigon.patch(model)  # the added line
print(report)
apart = max(float((a - b).norm() / a.norm()) for a, b in zip(expected, gradients(model), strict=True))
print(f"the largest relative difference of a gradient is {apart:.0e}")
assert apart < 1e-4

with tempfile.TemporaryDirectory() as folder:
    arguments = SentenceTransformerTrainingArguments(
        output_dir=folder, max_steps=20, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=matryoshka(model))
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps")
assert losses[-1] < losses[0]
