"""The replacements of the head and of the loss.

loss.py, lora_head.py       `lm_head` and `loss_function`: the fused loss; a head with a LoRA adapter
logits.py, head_path.py     scaling and capping of logits between the head and the loss
divided_head.py             a head divided by vocabulary (tensor parallelism)
deferred_logits.py, traced_logits.py    the logits that the fused loss never computes, in eager mode and in a trace
token_metrics.py            `return_token_accuracy` and `return_predicted_tokens`
"""
