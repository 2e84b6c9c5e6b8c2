"""Ops over hidden states and an lm_head: they compute logits a block at a time, and never hold all of them.

inputs.py           what a call is given: checked, promoted, flattened and gathered once
cross_entropy.py    cross entropy of `hidden @ weight.T + bias`
chunks.py           its chunks: their size, what is kept for backward, and the loop over them
exponentials.py     the two products of bf16 logits that have left their product as exponentials
logprobs.py         log-probabilities per token
divergence.py       divergences between two distributions per token
plan.py, blocks.py  blocks that are computed twice, for log-probabilities and divergences
block_loop.py       the loop over blocks that all ops share
autograd.py         the last step of each backward
multi_head.py, multi_head_loop.py   cross entropy for several heads that predict several tokens ahead
divided.py, divided_cross_entropy.py   heads that are divided by vocabulary
"""
