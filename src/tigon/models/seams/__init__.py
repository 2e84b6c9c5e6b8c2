"""The replacements of module forwards, one file per kind of module.

base.py       the class swap that installs and removes a forward     rebind.py   a function with other globals
norm.py, rope.py, mlp.py    RMSNorm and LayerNorm, rotary embedding, gated MLPs and experts
experts.py, experts_lora.py    the experts of a mixture as one op, without and with PEFT's adapters
attention_sinks.py    causal attention with sinks, and its masks
convolution.py, documents.py    the short convolution of layers with a state, and their documents
router.py     the router of a mixture: softmax, top-k and normalisation
lora.py, fp8.py     linear layers with a LoRA adapter, or with FP8 matmuls
head/         the head and the loss
"""
