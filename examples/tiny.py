"""A small model, tokenizer and data that stand in for yours. They are made here, so the examples need no network.

A text counts upwards, for example "3 4 5 6". The model has 2 layers and one token for each of 29 numbers.
"""

import atexit
import functools
import random
import shutil
import tempfile
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
NUMBERS = 29


@functools.cache
def checkpoint() -> str:
    """The folder of the model and its tokenizer. Put the path or hub id of your model in its place."""
    folder = tempfile.mkdtemp(prefix="tiny-model-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    words = [PAD, BOS, EOS, *map(str, range(NUMBERS))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=PAD, padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def numbers(first: int, count: int) -> str:
    return " ".join(str((first + i) % NUMBERS) for i in range(count))


def rows(count: int = 64) -> list[dict[str, str]]:
    """Texts, and preferences: the chosen answer counts on, the rejected one repeats a number."""
    draw = random.Random(0)
    starts = [draw.randrange(NUMBERS) for _ in range(count)]
    return [
        {
            "text": numbers(start, 12),
            "prompt": numbers(start, 4),
            "chosen": " " + numbers(start + 4, 6),
            "rejected": " " + " ".join([str(start)] * 6),
        }
        for start in starts
    ]


def data_set(*columns: str, count: int = 64) -> Any:
    """These columns of `rows`, for TRL."""
    import datasets  # only the TRL examples need it

    return datasets.Dataset.from_list(rows(count)).select_columns([*columns])


def batches(count: int, size: int = 8) -> list[dict[str, torch.Tensor]]:
    """Batches for a loop of your own: token ids, and the same ids as labels."""
    ids = torch.tensor([[3 + int(word) for word in row["text"].split()] for row in rows(count * size)])
    return [{"input_ids": batch, "labels": batch} for batch in ids.split(size)]
