"""How much memory and time a training run will take, without a GPU.

request.py    the question          estimate.py      the answer: trace, then simulate
gpus.py       GPUs as data          closed_form.py   the three formulas of the Liger study (docs/study.md), to compare

trace/       one micro-batch of the real model code on fake tensors: what it allocates and computes
simulate/    the run over time: memory by component, the caching allocator, milliseconds
engines/     what each of several GPUs holds, and what DeepSpeed puts on the host
search/      which recipes fit, fastest first
render/      the answer as text, JSON, charts or a recipe
"""
