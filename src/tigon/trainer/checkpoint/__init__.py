"""Checkpoints are complete or absent, and compared with their manifest before use (checkpoint.py). `nvme_swap.py` keeps
what DeepSpeed stores in files apart from other runs, and restores it.
"""
