"""What DDP, ZeRO and FSDP2 change.

sharded.py                 what each of several GPUs holds
deepspeed_host_memory.py   what DeepSpeed allocates on the host and in files
"""
