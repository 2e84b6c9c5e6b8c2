"""The names that the Python of README.md takes for granted: a model, a tokenizer, pairs and arguments."""

from __future__ import annotations

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig

config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
checkpoint = tempfile.mkdtemp()
LlamaForCausalLM(config).save_pretrained(checkpoint)
model = LlamaForCausalLM.from_pretrained(checkpoint)  # TRL loads the reference model from the same folder
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
pairs = Dataset.from_list([{"prompt": "w2 w3", "chosen": "w4", "rejected": "w5"}] * 4)
args = DPOConfig(
    output_dir=tempfile.mkdtemp(), max_steps=1, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
    logging_strategy="no", save_strategy="no",
)  # fmt: skip
