"""Writes completions with a model inside the process that trains it.

generator.py  Prompts to completions: prompts once per group, decoding steps in CUDA graphs.
rows.py       What a decoding step knows of each row, in tensors at fixed addresses.
pool.py       The cache of keys and values.
sampling.py   Logits to tokens.
self_check.py Whether a model decodes by the generator as by its own forward.
"""
