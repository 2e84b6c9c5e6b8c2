"""Log-probabilities per token, and divergences between two distributions per token.

rows.py, oracle.py   one row of logits: statistics, gradient; the unfused formula
blocks.py            the loop over blocks of logits of an lm_head
logprobs.py          the op for logits that exist already
linear_logprobs.py   the op for hidden states and an lm_head
kl_rows.py           two rows of logits: their divergence and its gradient
kl_blocks.py         the loop over blocks of logits of two lm_heads
linear_kl.py         the divergence of a student's distribution and a teacher's
kl_backward.py       its backward
divided_logprobs.py, divided_kl.py   both for heads that are divided by vocabulary
results.py           the results of linear_logprobs, as the operator and as the caller has them
"""
