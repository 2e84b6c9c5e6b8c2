"""Memory under DDP, ZeRO and FSDP2.

sharded.py                 memory on each of several GPUs
deepspeed_host_memory.py   DeepSpeed's allocations on the host and in files
"""
