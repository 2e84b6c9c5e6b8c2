"""The rows of `python -m benchmarks several-cards`, the processes that run them, and their lanes of cards."""
