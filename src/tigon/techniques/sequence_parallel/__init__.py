"""Processes that share the tokens of each row. ring_attention.py has attention by PyTorch's loops."""
