"""Ops over hidden states and an lm_head: they compute logits a block at a time, and never hold all of them.

inputs.py           the inputs record: checked, promoted, flattened and gathered once
plan.py             how large the blocks are, and what is kept for backward
loop.py             the loop over blocks, and the chunks of linear cross entropy
exponentials.py     bf16 logits that leave their product as exponentials, and their two products
blocks.py           blocks that are computed twice: log-probabilities, and divergences of two heads
autograd.py         the last step of each backward
cross_entropy.py    cross entropy of `hidden @ weight.T + bias`
loss_arguments.py   the arguments of a cross entropy besides the head, checked and flattened once
logprobs.py         log-probabilities per token
divergence.py       divergences between two distributions per token
multi_head.py, multi_head_loop.py   cross entropy for several heads that predict several tokens ahead
divided.py, divided_cross_entropy.py   heads that are divided by vocabulary
"""
