"""The losses.

options.py                the options: types, defaults, checks
common.py                 targets, denominators, and the row-wise primitives with their PyTorch reference
cross_entropy.py          cross entropy of logits that exist
linear_cross_entropy.py   cross entropy of `hidden @ weight.T + bias`, without all logits at once
divided_cross_entropy.py, divided_chunks.py   the same for a head that is divided by vocabulary, and its chunk loop
prepared_targets.py       labels whose count is known before the loss needs it
chunk_plan.py             how many tokens a chunk has, and what is kept for backward
head_adapter.py           the LoRA adapter of a head, as a low-rank operand of linear_cross_entropy
chunk_loop.py             the loop of linear_cross_entropy over chunks of tokens
multi_head.py             linear cross entropy for several heads that predict several tokens ahead
multi_head_loop.py        the loop of multi_head over chunks of tokens
"""
