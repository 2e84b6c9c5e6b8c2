"""Until the ops land: their contract, composed of logits."""

from tigon import ops

if not hasattr(ops, "linear_logprobs"):
    import stand_in

    ops.linear_logprobs, ops.logprobs, ops.linear_kl = stand_in.linear_logprobs, stand_in.logprobs, stand_in.linear_kl
