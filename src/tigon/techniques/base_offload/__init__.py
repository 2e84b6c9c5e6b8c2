"""Frozen weights of decoder layers that wait in host memory.

base_offload.py     the technique
streamed_layers.py  copies each layer to the device before it computes
"""
