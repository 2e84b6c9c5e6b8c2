"""One micro-batch of the real model code on fake tensors.

trace.py                builds the model without data and runs the micro-batch
dispatch_recorder.py    follows every storage from its allocation to its release
known_values.py         computes integers, for models that read the values of their inputs
tape.py                 the recording, and its unrolling from a few layers to the model's depth
attention_offload.py    traces `train.checkpointing: offload-attention`
layer_pattern.py        which layers repeat
shared_rows.py          attention of processes that share rows
cache/                  the traces and operators of this process, and of earlier ones
attention.py, cuda_autocast.py, cuda_scratch.py    what CUDA does that fake CPU tensors do not show
lora_adapters.py        LoRA with PEFT's modules
quantized_weights.py    frozen 4-bit weights
liger.py                Liger Kernel's allocations
"""
