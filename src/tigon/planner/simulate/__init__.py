"""The run over time.

statics.py      weights, gradients, optimizer states       ledger.py      memory by component and phase
allocator.py    PyTorch's caching allocator                roofline.py    milliseconds
non_allocator_memory.py    the CUDA context, loaded kernels, NCCL's buffers
"""
