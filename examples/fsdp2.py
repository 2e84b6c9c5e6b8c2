"""FSDP2 on two processes: patch the model, then shard each layer and the whole model.

Start it with PyTorch's launcher:

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

It runs on GPUs with NCCL, or on CPUs with gloo. The first loss must be the loss of one process on the whole batch.
"""

import os

import torch
import torch.distributed as dist
from tiny import batches, checkpoint
from torch.distributed.fsdp import fully_shard

import tigon

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
path = checkpoint()  # before the processes meet, because save_pretrained then writes on the first one alone
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

model = tigon.AutoModelForCausalLM.from_pretrained(path).train().to(device)
data = batches(20)
with torch.no_grad():
    whole = model(input_ids=data[0]["input_ids"].to(device), labels=data[0]["labels"].to(device)).loss.item()

for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

losses = []
for batch in data:
    mine = {name: ids.chunk(ranks)[rank].to(device) for name, ids in batch.items()}  # this rank's rows
    loss = model(**mine).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / ranks)

if rank == 0:
    local = sum(p.to_local().numel() for p in model.parameters())
    print(f"{ranks} processes; this one holds {local} of {sum(p.numel() for p in model.parameters())} weights")
    print(f"loss {losses[0]:.4f} (one process: {whole:.4f}) -> {losses[-1]:.4f}")
    assert abs(losses[0] - whole) < 1e-3 and losses[-1] < losses[0]
dist.destroy_process_group()
