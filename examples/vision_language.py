"""A vision-language model in your own loop: patch it, and train it on images with its own processor."""

import random
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

import tigon

sys.path.insert(0, str(Path(__file__).parent / "vision"))
from make_model import COLOURS, drawn, save_model

STEPS, BATCH = 40, 8
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour is it?"}]}]

with tempfile.TemporaryDirectory() as folder:
    save_model(Path(folder))  # your model's folder or hub id instead
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
prompt = processor.apply_chat_template(QUESTION, add_generation_prompt=True)
draw = random.Random(0)


def batch():
    colours = [draw.choice(COLOURS) for _ in range(BATCH)]
    inputs = processor(
        text=[f"{prompt} {colour}<end_of_utterance>" for colour in colours],
        images=[[drawn(colour, "circle", draw)] for colour in colours], padding=True, return_tensors="pt",
    )  # fmt: skip
    # All rows begin with the same prompt, which is not learned. Padding follows the answers.
    first = len(processor(text=[prompt], images=[[drawn("red", "circle", draw)]])["input_ids"][0])
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :first] = -100
    return {**inputs, "labels": labels}


inputs = batch()
model.train()
expected = model(**inputs).loss.item()
print(tigon.patch(model))
assert abs(model(**inputs).loss.item() - expected) < 1e-5, "the patched model computes the same loss"

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _ in range(STEPS):
    loss = model(**batch()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.5 * losses[0]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {STEPS} steps")
