"""Losses and log-probabilities of logits that exist already, and what the ops of a head share with them.

inputs.py                 what a loss is given: options, labels and denominators
prepared_targets.py       labels ahead of a token, and labels that are counted before the loss needs them
logprob_inputs.py         what log-probabilities are given: options, ids and mask
results.py                the results, as the operators return them and as the caller gets them
cross_entropy_rows.py     rows of logits: cross entropy and its gradient, and their reference in PyTorch
logprob_rows.py           rows of logits: log-probabilities and their gradient
divergence_rows.py        two rows of logits: their divergence and its gradient
vocabulary.py             rows whose columns are in one process, or divided among several
cross_entropy.py          cross entropy
logprobs.py               log-probabilities
"""
