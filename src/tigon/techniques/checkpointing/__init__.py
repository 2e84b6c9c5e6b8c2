"""Activation checkpointing.

checkpointing.py        the kinds that treat all layers alike
layer_function.py       the function that transformers' layers call
layer_checkpointing.py  what each layer recomputes, as `full:7,none:9`
recompute.py            recomputes a function in the backward pass
dropped_inputs.py       inputs of linear layers that are recomputed
host_offload.py         moves the tensors that autograd saves to host memory
attention_offload.py    recomputes a layer whose attention's results wait on the host
"""
