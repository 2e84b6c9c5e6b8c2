"""Mirrors `liger_kernel.ops`: the Functions, the launchers, and the losses that both of them and the modules call."""
