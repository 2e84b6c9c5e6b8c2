"""Linear layers.

dora.py          a linear layer with an adapter whose rows have trained lengths
fp8_linear.py    three products with FP8 factors
fp8.py           the casts to FP8 and the product of two FP8 factors
lora_linear.py   a linear layer and its LoRA adapter
lora_linears.py  such layers that read the same input
mxfp4.py         the dense weight of experts that a checkpoint stores in MXFP4
nf4.py           the dense weight of a layer that is stored in NF4
"""
