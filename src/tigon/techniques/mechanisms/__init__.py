"""Code that techniques run and that is too long for their files.

galore.py         the GaLore optimizer
host_offload.py   moves the tensors that autograd saves to host memory
loftq.py          initial adapters of 4-bit weights
recompute.py      recomputes a function in the backward pass
ring_attention.py attention over the shards of a row, by PyTorch's loops
"""
