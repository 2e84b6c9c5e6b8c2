"""A checkpoint of a tiny model with a tokenizer and a chat template, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WORDS = ("karan", "lotis", "mivel", "nedor", "puran", "kadol", "loren")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<bot>{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}<user>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
SPECIAL = ("<pad>", "<eos>", "<user>", "<bot>")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}


def tokenizer() -> Any:
    """One token per byte, and a chat template that marks the assistant's text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocabulary)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=["<user>", "<bot>"]
    )
    fast.chat_template = TEMPLATE
    return fast


def save(folder: Path, dtype: torch.dtype = torch.bfloat16, model_type: str = "llama", **more: Any) -> Path:
    """Save a model of `model_type` with random weights, a generation config and the tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, set_seed

    fast = tokenizer()
    shape = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": len(fast), "max_position_embeddings": 128, "eos_token_id": 1,
        "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.1,
    }  # fmt: skip
    set_seed(0)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**shape, **more}), dtype=dtype)
    built.generation_config = GenerationConfig(
        eos_token_id=1, pad_token_id=0, temperature=0.6, do_sample=True, top_p=0.9
    )
    built.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def put_experts_into_mxfp4(folder: Path) -> Path:
    """Replace the experts of a saved GPT-OSS by random bytes in the layout of `openai/gpt-oss-20b`."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 124, blocks, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def chats(path: Path, n: int = 120) -> Path:
    """Write `n` chats in which the assistant repeats a word."""
    rows = (
        [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": " ".join([word] * 3)}]
        for word in (WORDS[i % len(WORDS)] for i in range(n))
    )
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    return path
