"""Writes completions with a model inside the process that trains it.

generator.py          Prompts to completions: prompts once per group, decoding steps in CUDA graphs.
rows.py               What a decoding step knows of each row, in tensors at fixed addresses.
prompt_queue.py       Which completions wait for a row, and where their prompts stand in the pool.
kv_pool.py            The cache of keys and values.
memory.py             What cache and logits take.
sampling.py           Logits to tokens.
generation_config.py  What the generator reads of a generation config of transformers.
self_check.py         Whether a model decodes by the generator as by its own forward.
"""
