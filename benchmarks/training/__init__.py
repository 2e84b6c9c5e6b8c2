"""Codes for `python -m benchmarks train`, beside those of `tigon bench train`, and a record's tables and charts.

- `codes.py`: TRL's head, and tigon with CUDA graphs, fused gradient accumulation and FP8.
- `table.py`, `charts.py`: a record as Markdown and as charts.
"""
