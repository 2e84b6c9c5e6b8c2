"""Mirrors the modules and functions of `liger_kernel.transformers`."""
