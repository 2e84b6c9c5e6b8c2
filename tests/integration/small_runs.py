"""A small model, data of uneven lengths, and a tokenizer for it: what every trainer of this folder is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB = 89

Rows = list[dict[str, Any]]


def model(family: str = "llama", **overrides: Any) -> nn.Module:
    """A two-layer model in fp32, the same weights at every call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **{**sizes, **overrides})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def rows(count: int = 16, seed: int = 0) -> Rows:
    """input_ids of 10 to 19 tokens, labels with a prompt masked, and the same mask in TRL's words."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        length = int(torch.randint(10, 20, (1,), generator=generator))
        prompt = int(torch.randint(0, 8, (1,), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        labels = [-100] * prompt + ids[prompt:]
        result.append({"input_ids": ids, "labels": labels, "completion_mask": [int(x != -100) for x in labels]})
    return result


def padded(batch: Rows) -> dict[str, torch.Tensor]:
    """Rows to one batch, padded on the right: the collator of the plain runs."""
    length = max(len(row["input_ids"]) for row in batch)

    def pad(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (length - len(row[name])) for row in batch])

    lengths = torch.tensor([len(row["input_ids"]) for row in batch])
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": mask}


def tokenizer() -> Any:
    """One word a token; made here, so that no test needs a download."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w0"
    )


def lora(base: nn.Module, **options: Any) -> Any:
    """LoRA on the trunk, with weights that do something from the first step on."""
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(base, config)
