"""What tigon's generator does not go with, in the words of recipes, plans and trainers of TRL. Imports no torch."""

HOST_STATES = "states in host memory"
HOST_LAYERS = "frozen layers in host memory"
QUANTIZED_FSDP2 = "4-bit weights under FSDP2"
QUANTIZED_ZERO3 = "4-bit weights under ZeRO-3"
TENSOR_PARALLEL = "tensor parallelism"
