"""Gradient accumulation, and its fusion with the products and embeddings that compute the gradients."""
