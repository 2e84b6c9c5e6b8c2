"""Bytes per GPU and per host of a division, by component.

The engines' layouts are those of planner/engines, without their buckets. Tensor and pipeline parallelism without FSDP2
keep bf16 weights, fp32 gradients and an optimizer that may be divided, as Megatron-LM does. Pipelines with FSDP2 keep
whole weights and gradients beside the shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tigon.planner.cluster.compute import Workload, kernels_of, local_tokens, under_autocast
from tigon.planner.cluster.division import Division
from tigon.planner.cluster.shape import BF16
from tigon.planner.cluster.topology import Cluster
from tigon.planner.engines.deepspeed_host_memory import pinned
from tigon.planner.gpus import GIB

FP32 = 4
STATES = ("amp-bf16", "bf16")
"""Formats of weights and states: fp32 with 16-bit products, or 16 bits throughout."""
_MOMENTS = {"amp-bf16": 8, "bf16": 4}
MASTER_ITEMSIZE = {"amp-bf16": 4, "bf16": 2}
"""Bytes of an element of the weights that the optimizer updates."""
MAX_LIVE_BYTES = 2 * 10**9
"""DeepSpeed's stage 3 keeps at most 1e9 elements of gathered weights (stage3_max_live_parameters)."""
WORKSPACE = 0.4
"""Temporaries of a layer's backward pass, per saved byte of one layer, in the trace of Llama-3.1-8B."""
FRAGMENTATION = 0.10
"""Share of memory that the caching allocator cannot reuse; the traced plans of one node have 5 to 25%."""
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

    @property
    def host(self) -> int:
        return max(self.host_loading, self.host_training)


def stage_numel(work: Workload, division: Division) -> float:
    """Parameters of one GPU's part before sharding: its layers, and in the largest stage the embeddings or the head."""
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
    offloaded = _offloaded(division) if division.offload else ()
    held = {name: 0.0 if name in offloaded else size for name, size in parts.items()}
    held["gradients"] += _whole_gradients(work, division)
    activations, gathered = _activations(work, division), _gathered(work, division)
    # The loss ends before the backward pass of the layers begins, so its logits use the memory of their temporaries.
    logits = max(_logits(work, division) - _temporaries(work, division), 0.0)
    # Gradients that the only backward pass allocates take the place of the activations that it frees.
    held["gradients"] = max(held["gradients"] - min(_growing(held["gradients"], division), activations), 0.0)
    held["weights"] += gathered
    held["optimizer"] += max(_update(work, division, cluster) - activations - logits - gathered, 0.0)
    held |= {"activations": activations, "logits": logits}
    gpu = cluster.gpu
    outside = gpu.context_bytes + gpu.group_bytes + (gpu.deepspeed_bytes if division.engine == "DeepSpeed" else 0)
    components = {name: int(size) for name, size in held.items()}
    components["outside"] = int(outside + gpu.cublas_workspace_bytes + FRAGMENTATION * sum(held.values()))
    return Memory(
        components=components, host_loading=_host_loading(work, division, cluster),
        host_training=int(cluster.gpus_per_node * _host_states(work, division, cluster, parts)),
    )  # fmt: skip


def _is_megatron(division: Division) -> bool:
    """Whether weights, gradients and states have Megatron-LM's layout: 2, 4 and 12 bytes per parameter."""
    return division.sharding in ("none", "optimizer") and division.tensor * division.pipeline > 1


def _growing(gradients: float, division: Division) -> float:
    """The bytes of gradients that appear during the backward pass, and not before it."""
    if division.accumulate > 1 or division.sharding == "gradients" or _is_megatron(division):
        return 0.0
    if division.sharding == "none":
        return gradients / 2  # DDP's buckets exist from the start
    if division.sharding == "weights" and division.engine == "DeepSpeed":
        return 0.0
    return gradients


def _update(work: Workload, division: Division, cluster: Cluster) -> float:
    """Temporaries of the step. With fp32 states, DeepSpeed first converts all gradients of this GPU's part."""
    if division.engine != "DeepSpeed" or work.states != "amp-bf16" or division.offload:
        return 0.0
    return FP32 * stage_numel(work, division) / shard_ranks(division, cluster)


def _states(work: Workload, division: Division, cluster: Cluster) -> dict[str, float]:
    """Bytes of one GPU's weights, gradients and optimizer states before offload."""
    numel, ranks = stage_numel(work, division), shard_ranks(division, cluster)
    master, moments = MASTER_ITEMSIZE[work.states], _MOMENTS[work.states]
    if _is_megatron(division):
        optimizer = (FP32 + moments) * numel / ranks
        return {"weights": BF16 * numel, "gradients": FP32 * numel, "optimizer": optimizer}
    if division.sharding == "none":
        # autocast keeps the 16-bit copies until the backward pass ends, and DDP's buckets are a second copy
        copies = BF16 if work.states == "amp-bf16" else 0
        return {"weights": (master + copies) * numel, "gradients": 2 * master * numel, "optimizer": moments * numel}
    if division.sharding == "weights" and division.engine == "PyTorch":
        # Shards of gradients take the place of the whole gradients that they were reduced from.
        shards = 0.0 if _whole_gradients(work, division) and not division.offload else master * numel / ranks
        return {"weights": master * numel / ranks, "gradients": shards, "optimizer": moments * numel / ranks}
    weights = BF16 * numel / (ranks if division.sharding == "weights" else 1)
    gradients = BF16 * numel / (1 if division.sharding == "optimizer" else ranks)
    return {"weights": weights, "gradients": gradients, "optimizer": (master + moments) * numel / ranks}


def _whole_gradients(work: Workload, division: Division) -> float:
    """Bytes of the gradients that FSDP2 keeps whole until the last micro-batch reduces them."""
    if division.sharding != "weights" or division.engine != "PyTorch" or work.reduces_each:
        return 0.0
    return BF16 * stage_numel(work, division) if division.accumulate > 1 else 0.0


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
    per_layer = kept.kept_bytes(shape) * tokens
    if division.checkpointing == "none":
        per_layer *= kernels_of(work, division).saved
    elif under_autocast(work, division):
        per_layer *= FP32 / BF16
    return per_layer * layers * in_flight(division) + _temporaries(work, division)


def _temporaries(work: Workload, division: Division) -> float:
    """Bytes that the backward pass of one layer needs: tensors that are computed again, and gradients of tensors."""
    tokens = local_tokens(work, division) / division.tensor
    one = kernels_of(work, division).saved * work.shape.saved_bytes() * tokens
    return one * (WORKSPACE + (1.0 if division.kept.others else 0.0))


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


def _host_states(work: Workload, division: Division, cluster: Cluster, parts: Mapping[str, float]) -> float:
    """One process's bytes of host memory for offloaded states. DeepSpeed pins buffers, which are powers of two."""
    if not division.offload:
        return 0.0
    if division.engine == "PyTorch":
        return sum(parts[name] for name in _offloaded(division))
    numel = int(stage_numel(work, division) / shard_ranks(division, cluster))
    master, moments = MASTER_ITEMSIZE[work.states] * numel, _MOMENTS[work.states] * numel
    if division.sharding == "gradients":
        return moments + 2 * pinned(master) + pinned(BF16 * numel)
    return moments + master + pinned(master) + 2 * pinned(BF16 * numel) + BF16 * numel


def _host_loading(work: Workload, division: Division, cluster: Cluster) -> int:
    """Bytes per host while a checkpoint is read.

    With FSDP2 and ZeRO each process reads the whole model to the host, FSDP2 in the dtype of its shards. For divisions
    that tigon does not run, each node reads its part once.
    """
    numel = work.shape.numel
    if not division.runs:
        part = stage_numel(work, division) * min(division.tensor, cluster.gpus_per_node)
        return int(BF16 * part)
    itemsize = MASTER_ITEMSIZE[work.states] if division.engine == "PyTorch" else BF16
    return cluster.gpus_per_node * numel * itemsize
