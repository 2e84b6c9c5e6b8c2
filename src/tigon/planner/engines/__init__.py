"""Training engines: what each rank holds on one GPU, under DDP, under DeepSpeed ZeRO and under FSDP2.

base.py                    the protocol, and what a rank holds as data
single.py, ddp.py, zero.py, fsdp.py   one engine each
choose.py                  the engine of a run's choices
deepspeed_host_memory.py   DeepSpeed's allocations on the host and in files
non_allocator_memory.py    the CUDA context, loaded kernels, NCCL's buffers
"""
