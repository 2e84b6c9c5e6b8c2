"""Code that techniques run and that is too long for their files.

adapter_targets.py   the modules and parameters that get adapters
attention_offload.py recomputes a layer whose attention's results wait on the host
dropped_inputs.py    inputs of linear layers that are recomputed
expert_quantizer.py  reads experts in 4 bits (NF4)
four_bit_experts.py  weights of experts that are stored in 4 bits
fused_linear.py      linear layers that add their gradient in the product
galore.py            the GaLore optimizer
host_offload.py      moves the tensors that autograd saves to host memory
layer_graphs.py      decoder layers as CUDA graphs
loftq.py             initial adapters of 4-bit weights
mxfp4_experts.py     experts that stay in MXFP4
recompute.py         recomputes a function in the backward pass
ring_attention.py    attention over the shards of a row, by PyTorch's loops
"""
