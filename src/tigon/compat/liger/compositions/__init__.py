"""Liger's ops that tigon has no kernel for: short compositions of PyTorch's and tigon's ops.

Each file has a Function's namespace, the function of `liger_kernel.transformers.functional` and the module of one
subject. Autograd differentiates the composition, so a second backward, hooks and frozen inputs work as in PyTorch.
Sums over a row are fp32 (fp64 for fp64 inputs), and results have the input's dtype. `in_place` is ignored.
"""
