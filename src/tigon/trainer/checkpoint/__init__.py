"""final_model.py writes the trained model: adapters, or whole weights in the dtypes of the checkpoint.
adapter_files.py writes adapters in PEFT's layout, keeps the weights that they refer to, and merges them on request.
atomic_save.py lets all processes write into a scratch folder, and renames it when all of them have.
checkpoint.py writes checkpoints that are complete or absent, and compares them with their manifest before use.
distributed_checkpoint.py reads and writes weights and optimizer states in PyTorch's distributed format, also in the
background, and reads the Trainer's files into a sharded model.
resume_rules.py says what a resumed run may change, and divides the samples of a step for another number of processes.
nvme_swap.py separates DeepSpeed's NVMe swap files from those of other runs, and restores them from a checkpoint.
"""
