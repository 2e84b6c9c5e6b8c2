"""Makes what `recipes/vision.yaml` trains: a tiny vision-language model, drawn images, and rows that ask about them.

    python examples/vision/make_model.py            # writes runs/vision/model and runs/vision/shapes.jsonl
    tigon train recipes/vision.yaml

The model has the shape of SmolVLM (transformers' idefics3) with random weights, and its own processor. A checkpoint of
the hub takes its place with `--set model.name=HuggingFaceTB/SmolVLM-256M-Instruct`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    Idefics3Config,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    set_seed,
)

COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
SHAPES = ("circle", "square", "triangle", "bar")
SIZE = 32
"""Pixels of an image's sides."""
SPECIAL = (
    "<pad>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""SmolVLM's."""


def processor(*, tile: int = SIZE, tokens: int = 4, divides: bool = False) -> Any:
    """SmolVLM's processor, with one token per byte of text.

    Args:
        tile: Pixels of the sides of an image, or of its tiles.
        tokens: Tokens of each of them.
        divides: Whether larger images are divided into up to 4 x 4 tiles.
    """
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocabulary)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end_of_utterance>",
        additional_special_tokens=list(SPECIAL[2:]),
    )  # fmt: skip
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 4 * tile if divides else tile}, max_image_size={"longest_edge": tile},
        do_image_splitting=divides,
    )  # fmt: skip
    return Idefics3Processor(images, tokenizer, image_seq_len=tokens, chat_template=CHAT_TEMPLATE)


def save_model(folder: Path, *, hidden_size: int = 64) -> None:
    """Write a model with random weights and its processor."""
    made = processor()
    n_ids = len(made.tokenizer)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": 2}
    config = Idefics3Config(
        text_config={
            "model_type": "llama", **sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": n_ids,
            "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
        },
        vision_config={**sizes, "num_attention_heads": 4, "image_size": SIZE, "patch_size": 8},
        scale_factor=2, image_token_id=made.image_token_id, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    set_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    made.save_pretrained(folder)


def drawn(colour: str, shape: str, place: random.Random, size: int = SIZE) -> Image.Image:
    """A shape on black, somewhere in an image of `size` x `size` pixels."""
    image = Image.new("RGB", (SIZE, SIZE))
    draw = ImageDraw.Draw(image)
    left, top, side = place.randint(0, 8), place.randint(0, 8), place.randint(16, 22)
    right, bottom = left + side, top + side
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=colour)
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=colour)
    elif shape == "triangle":
        draw.polygon(((left, bottom), (right, bottom), ((left + right) // 2, top)), fill=colour)
    else:
        draw.rectangle((left, top + side // 3, right, top + side // 2), fill=colour)
    return image if size == SIZE else image.resize((size, size))


def save_rows(path: Path, n_rows: int = 480, *, size: int = SIZE) -> None:
    """Write rows as chats, and their images as PNG files beside them."""
    place, lines = random.Random(0), []
    images = path.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    for number in range(n_rows):
        colour, shape = place.choice(COLOURS), place.choice(SHAPES)
        name = f"{number:04}.png"
        drawn(colour, shape, place, size).save(images / name)
        question = {"type": "text", "text": "What is it?"}
        messages = [
            {"role": "user", "content": [{"type": "image", "path": f"images/{name}"}, question]},
            {"role": "assistant", "content": [{"type": "text", "text": f"A {colour} {shape}."}]},
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/vision")
    save_model(folder / "model")
    save_rows(folder / "shapes.jsonl")
    print(f"{folder / 'model'} and {folder / 'shapes.jsonl'}")


if __name__ == "__main__":
    main()
