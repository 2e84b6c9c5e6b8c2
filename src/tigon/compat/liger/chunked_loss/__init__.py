"""Mirrors `liger_kernel.chunked_loss`: post-training losses from hidden states and heads, without the logits.

Liger computes them batch by batch under `torch.compile`. Here `tigon.linear_logprobs` and `tigon.linear_kl` give values
per token, and `tigon.losses` the loss. `chunk_size` and `compiled` are accepted and ignored.

reference.py       log-probabilities of labels under a head, and whether a reference model takes part
preference.py      DPO, CPO, ORPO and SimPO, from pairs
unpaired.py        KTO, from sequences with a label each
policy.py          GRPO and its family
distillation.py    the Jensen-Shannon and the cosine loss of a student and a teacher
cosine_similarity.py    cosine of a student's and a teacher's logits, without the logits
modules.py         `LigerFusedLinear*Loss`
functional.py      `liger_fused_linear_*`
"""
