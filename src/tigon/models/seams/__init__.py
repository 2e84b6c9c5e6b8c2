"""The replacements of module forwards, one file per kind of module.

base.py       the class swap that installs and removes a forward     rebind.py   a function with other globals
norm.py, rope.py, mlp.py    RMSNorm and LayerNorm, rotary embedding, gated MLPs and experts
loss.py       `lm_head` and `loss_function`: the fused loss
logits.py, head_path.py     scaling and capping of logits between the head and the loss
deferred_logits.py, traced_logits.py    the logits that the fused loss never computes, in eager mode and in a trace
token_metrics.py    `return_token_accuracy` and `return_predicted_tokens`
"""
