"""Bytes per GPU and per host of a division, by component.

The engines' layouts are those of planner/engines, without their buckets. Pipelines keep bf16 weights, fp32 gradients
and a divided optimizer, as Megatron-LM does, or FSDP2's shards with whole weights and gradients beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tigon.planner.cluster.compute import Workload, local_tokens
from tigon.planner.cluster.division import Division
from tigon.planner.cluster.shape import BF16
from tigon.planner.cluster.topology import Cluster
from tigon.planner.gpus import GIB

FP32 = 4
STATES = ("amp-bf16", "bf16")
"""Formats of weights and states: fp32 with 16-bit products, or 16 bits throughout."""
_MOMENTS = {"amp-bf16": 8, "bf16": 4}
_MASTER = {"amp-bf16": 4, "bf16": 2}
MAX_LIVE_BYTES = 2 * 10**9
"""DeepSpeed's stage 3 keeps at most 1e9 elements of gathered weights (stage3_max_live_parameters)."""
WORKSPACE = 0.4
"""Temporaries of a layer's backward pass, per saved byte of one layer, in the trace of Llama-3.1-8B."""
FRAGMENTATION = 0.05
"""Assumed share of memory that the caching allocator cannot reuse."""
LOSS_BYTES = {True: 2.13, False: 12.0}
"""Bytes of logits per token and word that the loss holds in one chunk, by whether it is fused."""
LOSS_CHUNK_BYTES = int(1.5 * GIB)
"""The most that a chunk of the fused loss holds in the trace of Llama-3.1-8B, beside the fp32 sum of the head's
gradient."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one GPU and of one host."""

    components: Mapping[str, int]
    """Bytes on the GPU: weights, gradients, optimizer, activations, logits and outside. They sum to `device`."""
    host_loading: int
    """Bytes per host while a checkpoint is read."""
    host_training: int
    """Bytes per host of states that are offloaded."""

    @property
    def device(self) -> int:
        return sum(self.components.values())


def stage_numel(work: Workload, division: Division) -> float:
    """Parameters of one GPU's part before sharding: its layers and, in the largest stage, the embeddings or the head."""
    shape, stages = work.shape, division.pipeline
    layers = -(-shape.layers // stages) * shape.layer_numel
    outside = shape.outside_numel if stages == 1 else shape.head_numel
    return (layers + outside) / division.tensor


def shard_ranks(division: Division, cluster: Cluster) -> int:
    """GPUs that share what `division.sharding` divides."""
    if division.sharding == "none":
        return 1
    ranks = division.data * division.sequence
    return min(ranks, cluster.gpus_per_node // division.tensor) if division.within_node else ranks


def memory_of(work: Workload, division: Division, cluster: Cluster) -> Memory:
    """The memory of the fullest GPU, and of a host."""
    parts = _states(work, division, cluster)
    held = {name: 0.0 if division.offload and name in _offloaded(division) else size for name, size in parts.items()}
    activations, logits = _activations(work, division), _logits(work, division)
    update = FP32 * stage_numel(work, division) / shard_ranks(division, cluster)
    if division.engine != "DeepSpeed" or work.states != "amp-bf16" or division.offload:
        update = 0.0  # only DeepSpeed's step converts all of its gradients first
    gathered = _gathered(work, division)
    passes = activations + logits + gathered
    held["weights"] += gathered
    held["optimizer"] += max(update - passes, 0.0)
    held |= {"activations": activations, "logits": logits}
    gpu = cluster.gpu
    outside = gpu.context_bytes + gpu.group_bytes + (gpu.deepspeed_bytes if division.engine == "DeepSpeed" else 0)
    components = {name: int(size) for name, size in held.items()}
    components["outside"] = int(outside + gpu.cublas_workspace_bytes + FRAGMENTATION * sum(held.values()))
    offloaded = sum(parts[name] for name in _offloaded(division)) if division.offload else 0.0
    return Memory(
        components=components, host_training=int(cluster.gpus_per_node * offloaded),
        host_loading=_host_loading(work, division, cluster),
    )  # fmt: skip


def _states(work: Workload, division: Division, cluster: Cluster) -> dict[str, float]:
    """Bytes of one GPU's weights, gradients and optimizer states before offload."""
    numel, ranks = stage_numel(work, division), shard_ranks(division, cluster)
    master, moments = _MASTER[work.states], _MOMENTS[work.states]
    if division.sharding == "none":
        # autocast keeps the 16-bit copies until the backward pass ends, and DDP's buckets are a second copy
        copies = BF16 if work.states == "amp-bf16" else 0
        return {"weights": (master + copies) * numel, "gradients": 2 * master * numel, "optimizer": moments * numel}
    if division.sharding == "weights" and division.engine == "PyTorch":
        whole = _whole_gradient_bytes(work, division) * numel
        return {
            "weights": master * numel / ranks, "gradients": master * numel / ranks + whole,
            "optimizer": moments * numel / ranks,
        }  # fmt: skip
    weights = BF16 * numel / (ranks if division.sharding == "weights" else 1)
    gradients = (FP32 if division.pipeline > 1 else BF16) * numel / (1 if division.sharding == "optimizer" else ranks)
    return {"weights": weights, "gradients": gradients, "optimizer": (master + moments) * numel / ranks}


def _whole_gradient_bytes(work: Workload, division: Division) -> int:
    """Bytes per parameter of gradients that FSDP2 keeps whole until the last micro-batch reduces them."""
    return BF16 if division.accumulate > 1 and not work.reduces_each else 0


def _gathered(work: Workload, division: Division) -> float:
    """Whole weights that sharded engines hold during the passes."""
    if division.sharding != "weights":
        return 0.0
    shape = work.shape
    numel = stage_numel(work, division)
    layer = BF16 * shape.layer_numel / division.tensor
    outside = BF16 * shape.outside_numel / division.tensor
    if division.pipeline > 1:
        return BF16 * numel  # micro-batches follow each other too closely to gather again
    if division.engine == "DeepSpeed":
        return min(BF16 * numel, max(MAX_LIVE_BYTES, outside, layer))
    tail = outside if shape.tied else outside / 2
    return min(BF16 * numel, tail + 3 * layer)  # the tail, a layer, the next one, and a reduction's input


def _activations(work: Workload, division: Division) -> float:
    shape, kept = work.shape, division.kept
    tokens = local_tokens(work, division) / division.tensor
    layers = -(-shape.layers // division.pipeline)
    one = work.kernels.saved * shape.saved_bytes() * tokens
    per_layer = kept.kept_bytes(shape) * tokens
    if division.checkpointing == "none":
        per_layer *= work.kernels.saved
    repeated = one if kept.others else 0.0
    return per_layer * layers * in_flight(division) + repeated + WORKSPACE * one


def in_flight(division: Division) -> float:
    """Micro-batches whose activations the first stage holds (1F1B; interleaving adds to it)."""
    stages = division.pipeline
    if stages == 1:
        return 1.0
    more = 1 + (stages - 1) / (stages * division.chunks) if division.chunks > 1 else 1.0
    return min(stages, division.accumulate) * more


def _logits(work: Workload, division: Division) -> float:
    if division.pipeline > 1:
        return 0.0  # the first stage holds the most activations, and has no head
    shape = work.shape
    logits = LOSS_BYTES[work.fused_loss] * local_tokens(work, division) * shape.vocab / division.tensor
    if not work.fused_loss:
        return logits
    return min(logits, LOSS_CHUNK_BYTES + FP32 * shape.head_numel / division.tensor)


def _offloaded(division: Division) -> tuple[str, ...]:
    """The components that `offload: cpu` moves to the host. Stage 2 keeps the weights on the GPU."""
    if division.sharding == "weights":
        return ("weights", "gradients", "optimizer")
    return ("gradients", "optimizer")


def _host_loading(work: Workload, division: Division, cluster: Cluster) -> int:
    """Bytes per host while a checkpoint is read.

    With FSDP2 and ZeRO each process reads the whole model to the host, FSDP2 in the dtype of its shards. For divisions
    that tigon does not run, each node reads its part once.
    """
    numel = work.shape.numel
    if not division.runs:
        part = stage_numel(work, division) * min(division.tensor, cluster.gpus_per_node)
        return int(BF16 * part)
    itemsize = _MASTER[work.states] if division.engine == "PyTorch" else BF16
    return cluster.gpus_per_node * numel * itemsize
