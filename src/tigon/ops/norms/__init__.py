"""The norms.

rms_norm.py, layer_norm.py   the ops
norm.py                      their two primitives, with the composite path in PyTorch
"""
