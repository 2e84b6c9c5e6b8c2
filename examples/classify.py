"""A classifier with the Trainer of transformers. tigon needs one line, marked below.

The label is whether a text counts on. `tigon train` with `train.objective: classify` does the same from a recipe.
"""

import tempfile

import torch
from tiny import checkpoint, rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

import tigon

tokenizer = AutoTokenizer.from_pretrained(checkpoint())
texts = [(row["prompt"] + row[name], label) for row in rows() for name, label in (("chosen", 1), ("rejected", 0))]
data = [{**tokenizer(text), "labels": label} for text, label in texts]
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(
    checkpoint(), id2label={0: "repeats", 1: "counts"}, label2id={"repeats": 0, "counts": 1}
)
batch = tokenizer([text for text, _ in texts[:8]], return_tensors="pt", padding=True)
before = model(**batch).logits
report = tigon.patch(model)  # the added line
print(report)
torch.testing.assert_close(model(**batch).logits, before, rtol=1e-4, atol=1e-5)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=60, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
labels = torch.tensor([label for _, label in texts])
given = trainer.predict(data).predictions.argmax(-1)
right = float((torch.from_numpy(given) == labels).float().mean())
print(f"accuracy {right:.0%} of {len(texts)} texts")
assert right > 0.9
