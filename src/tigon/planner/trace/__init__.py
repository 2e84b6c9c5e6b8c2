"""One micro-batch of the real model code on fake tensors.

trace.py                builds the model without data and runs the micro-batch
dispatch_recorder.py    follows every storage from its allocation to its release
tape.py                 the recording, and its unrolling from two layers to the model's depth
attention.py, cuda_autocast.py, cuda_scratch.py    what CUDA does that fake CPU tensors do not show
adapters.py, liger.py   LoRA and 4-bit weights; Liger Kernel's allocations
"""
