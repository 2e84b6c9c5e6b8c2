"""A small model and a tokenizer with a chat template."""

from __future__ import annotations

import torch

CONTEXT = 96  # positions of the model
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE):
    """One token per printable ASCII character."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<end>", "<user>", "<assistant>", "<system>"]
    vocab = {token: i for i, token in enumerate([*special, *map(chr, range(32, 127))])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", additional_special_tokens=special[2:]
    )
    made.chat_template = template
    return made


def make_model(dtype: torch.dtype = torch.bfloat16):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)
