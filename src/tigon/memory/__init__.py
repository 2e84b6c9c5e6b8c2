"""How much memory and time a training run will take, without a GPU.

request.py    what is asked                       estimate.py   the answer, put together from the parts below
gpus.py       GPUs as data

trace.py      one micro-batch of the real model code on fake tensors     recorder.py   what it allocates and computes
attention.py, cuda_plan.py, liger.py    what of it is otherwise on CUDA   adapters.py   LoRA and NF4 weights
tape.py       the recording, and its unrolling to full depth
statics.py    weights, gradients, states          sharded.py    what each of several GPUs holds, with
away.py       what DeepSpeed puts on the host and into files
outside.py    what a process holds beside PyTorch's allocator
ledger.py     the run over time, by component     allocator.py  what PyTorch's caching allocator makes of it
roofline.py   time                                study.py      the study's formulas, beside all this
"""
