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


CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GPT2 = "gpt-2"


def make_byte_level(split: str = GPT2):
    """A byte-level tokenizer that splits text in the way of this name in GGUF files."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tigon.trained.gguf_tokenizer import SPLITS

    way = next(way for way in SPLITS if way.name == split)
    backend = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(way.pattern), "isolated")] if way.pattern else []
    steps += [pre_tokenizers.Digits(individual_digits=True)] if way.digits else []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=way.pattern is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, level]) if steps else level
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["the quick brown fox jumps over 12345 lazy dogs in the sun"] * 4, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    made.add_tokens([AddedToken("<think>", normalized=False)])
    made.chat_template = CHATML
    return made


def make_family(model_type: str, **changes):
    """A small model of a family, with more embeddings than `make_byte_level` has tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 2,
        "bos_token_id": None, "initializer_range": 0.1, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    shape |= {"head_dim": 128} if model_type == "qwen3" else {}  # the one that transformers reads of a GGUF file
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(shape | changes)))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms of one and biases of zero hide a wrong place
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model.to(torch.bfloat16)
