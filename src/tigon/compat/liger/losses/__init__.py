"""Liger's losses, from logits or from hidden states with a head.

cross_entropy.py    the two cross entropies
divergences.py      JSD, KL and total variation of rows, and the JSD of two heads
distillation.py     the JSD of two heads with the loss on the labels
preference.py       DPO, CPO, SimPO and ORPO
kto.py              KTO
grpo.py             GRPO and its family
policy.py           GRPO's policy losses from log-probabilities per token
heads.py            log-probabilities of a head, for the losses above
"""
