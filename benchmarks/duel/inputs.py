"""The weights, tokens and adapters that every row starts from.

    python -m benchmarks.duel.inputs MODEL [--tiny]          # makes the checkpoint of a model

Nothing is downloaded: the weights are random, in the shapes of Meta's models, and saved once per machine as checkpoints
of transformers. The tokenizer only serves trainers that ask for one. transformers is imported by the functions, because
Unsloth has to be imported before it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch

from tigon.models.loading.presets import PRESETS

SEED = 20261127
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = ALPHA = 16
_ROOM_BYTES = 40 << 30
_TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def config(model: str, tiny: bool) -> Any:
    """The config of a model, or of a tiny one that ties its head if that model does."""
    shape = {**PRESETS[model], **(_TINY if tiny else {})}
    return importlib.import_module("transformers").AutoConfig.for_model(
        **shape, bos_token_id=1, eos_token_id=2, pad_token_id=0, architectures=["LlamaForCausalLM"]
    )


def folder_of(model: str, tiny: bool) -> Path:
    """The folder of the checkpoint. It is in memory if /dev/shm has room, so that loading reads no disk."""
    shared = Path("/dev/shm")
    named = os.environ.get("DUEL_CHECKPOINTS")
    if named:
        root = Path(named)
    elif not tiny and shared.is_dir() and shutil.disk_usage(shared).total > _ROOM_BYTES:
        root = shared / "tigon-duel"
    else:
        root = Path(tempfile.gettempdir()) / "tigon-duel"
    return root / (f"{model}-tiny" if tiny else model)


def make_checkpoint(model: str, tiny: bool) -> None:
    """Save the model with random weights, unless it was saved before."""
    folder = folder_of(model, tiny)
    if (folder / "complete").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(SEED)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            made = importlib.import_module("transformers").LlamaForCausalLM(config(model, tiny))
    finally:
        torch.set_default_dtype(usual)
    made.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "complete").write_text("", encoding="utf-8")


def byte_tokenizer() -> Any:
    """One token per byte, and a chat template."""
    tokenizers, transformers = (importlib.import_module(name) for name in ("tokenizers", "transformers"))
    words = ["<|pad|>", "<|begin|>", "<|end|>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", bos_token="<|begin|>", eos_token="<|end|>",
        model_max_length=131072, padding_side="right",
    )  # fmt: skip
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    return tokenizer


def tokens(batch: int, seq: int, vocab: int) -> torch.Tensor:
    """The ids of every step, (batch, seq), int64, without the tokenizer's special tokens."""
    generator = torch.Generator().manual_seed(SEED + seq)
    return torch.randint(8, vocab, (batch, seq), generator=generator)


def fill_adapters(model: Any) -> int:
    """Give every adapter values that depend on its name alone, and return the number of matrices.

    PEFT begins with B = 0, where the gradients of A are 0. So B is filled too.
    """
    filled = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        key = name[name.index("layers.") :].replace(".default", "")
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))
        values *= parameter.shape[1] ** -0.5 if "lora_A" in key else 0.05
        parameter.data.copy_(values)
        filled += 1
    return filled


if __name__ == "__main__":
    make_checkpoint(sys.argv[1], "--tiny" in sys.argv)
