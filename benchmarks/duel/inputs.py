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

SEED = 20261127
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = ALPHA = 16
_ROOM_BYTES = 40 << 30
_SIZES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "llama-3.2-3b": {
        "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip
_TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def config(model: str, tiny: bool) -> Any:
    """The config of a model, or of a tiny one that ties its head if that model does."""
    sizes = _SIZES[model]
    if tiny:
        sizes = {**_TINY, "tie_word_embeddings": sizes["tie_word_embeddings"]}
    return importlib.import_module("transformers").LlamaConfig(
        **sizes, max_position_embeddings=131072, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        rope_parameters={**_ROPE, "factor": 8.0 if model == "llama-3.1-8b" else 32.0},
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


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
    _tokenizer().save_pretrained(folder)
    (folder / "complete").write_text("", encoding="utf-8")


def _tokenizer() -> Any:
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
