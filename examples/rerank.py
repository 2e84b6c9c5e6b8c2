"""A reranker with sentence-transformers' CrossEncoder. tigon needs one line, marked below.

The score of a text with its continuation must be larger than that with another text.
"""

import tempfile

import datasets
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from tiny import checkpoint, rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import tigon

pairs = [
    {"query": row["prompt"], "answer": row[name].strip(), "label": label}
    for row in rows()
    for name, label in (("chosen", 1.0), ("rejected", 0.0))
]
with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    # A CrossEncoder of a causal language model would score by the logits of two tokens instead.
    AutoModelForSequenceClassification.from_pretrained(checkpoint(), num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint()).save_pretrained(folder)
    model = CrossEncoder(folder, device="cpu")
    texts = [(row["query"], row["answer"]) for row in pairs[:8]]
    before = model.predict(texts)
    report = tigon.patch(model)  # the added line
    print(report)
    assert abs(before - model.predict(texts)).max() < 1e-5
    arguments = CrossEncoderTrainingArguments(
        output_dir=folder, max_steps=60, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = datasets.Dataset.from_list(pairs)
    CrossEncoderTrainer(model=model, args=arguments, train_dataset=data, loss=BinaryCrossEntropyLoss(model)).train()
scores = model.predict([(row["query"], row["answer"]) for row in pairs]).reshape(-1, 2)
right = (scores[:, 0] > scores[:, 1]).mean()
print(f"the continuation has the larger score in {right:.0%} of {len(scores)} pairs")
assert right > 0.9
