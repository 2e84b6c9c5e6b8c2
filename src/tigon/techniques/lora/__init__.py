"""Adapters, and frozen weights in 4 or 8 bits.

lora.py              the techniques LoRA and QLoRA
adapter_targets.py   the modules and parameters that get adapters
loftq.py             initial adapters of 4-bit weights
expert_quantizer.py  reads experts in 4 bits (NF4)
four_bit_weights.py  4-bit weights of experts, and 4-bit weights that FSDP2 can divide
mxfp4_experts.py     experts that stay in MXFP4
"""
