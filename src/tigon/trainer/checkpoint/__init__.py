"""checkpoint.py writes checkpoints that are complete or absent, and compares them with their manifest before use.
nvme_swap.py separates DeepSpeed's NVMe swap files from those of other runs, and restores them from a checkpoint.
"""
