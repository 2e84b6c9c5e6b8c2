"""Quantisation-aware training: the forward pass computes with the weights that `tigon export --format` writes."""
