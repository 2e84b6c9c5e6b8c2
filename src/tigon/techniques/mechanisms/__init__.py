"""Code that techniques run and that is too long for their files.

galore.py         the GaLore optimizer
host_offload.py   moves the tensors that autograd saves to host memory
ring_attention.py attention over the shards of a row, by PyTorch's loops
recompute.py      recomputes a function in the backward pass
"""
