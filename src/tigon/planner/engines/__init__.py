"""Training engines: the memory that each rank holds on one GPU, under DDP, under DeepSpeed ZeRO and under FSDP2.

base.py                    the protocol, and the records of a rank's memory
choose.py                  the engine of a run's settings; one GPU, DDP
zero.py, fsdp.py           one engine each
model_parallel.py          one process's part of rows and matrices that processes share
deepspeed_host_memory.py   DeepSpeed's allocations in host memory and in files
non_allocator_memory.py    the CUDA context, loaded kernels, NCCL's buffers
"""
