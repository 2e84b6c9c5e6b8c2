"""Plans every division of a request over a cluster, and puts the fastest that fits first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tigon.planner.cluster.compute import Workload, model_flops
from tigon.planner.cluster.division import Division, Engine, Sharding
from tigon.planner.cluster.memory import Memory, memory_of
from tigon.planner.cluster.shape import ModelShape
from tigon.planner.cluster.step import StepTime, step_time
from tigon.planner.cluster.topology import Cluster
from tigon.planner.search.space import HEADROOM

MOST_TENSOR, MOST_SEQUENCE, MOST_STAGES = 8, 8, 32
_DATA_PARALLEL: tuple[tuple[Sharding, Engine], ...] = (
    ("none", "PyTorch"), ("optimizer", "DeepSpeed"), ("gradients", "DeepSpeed"), ("weights", "DeepSpeed"),
    ("weights", "PyTorch"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlannedDivision:
    """One division with its memory and time."""

    division: Division
    memory: Memory
    time: StepTime
    tokens_per_s: float
    """All GPUs together."""
    mfu: float
    """Share of the data sheet's rate that the model's own FLOPs reach."""
    fits: bool


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The best configuration of each family of divisions: those that fit first, the fastest of them first."""

    work: Workload
    cluster: Cluster
    host_bytes: int | None
    """Memory of each host that loading and offloaded states may use; None for any amount."""
    divisions: tuple[PlannedDivision, ...]


def plan_cluster(work: Workload, cluster: Cluster, *, host_bytes: int | None = None) -> ClusterPlan:
    """Plan each division of `work` over `cluster`."""
    best: dict[str, PlannedDivision] = {}
    for division in configurations(work, cluster):
        planned = planned_division(work, division, cluster, host_bytes=host_bytes)
        known = best.get(division.family)
        if known is None or _rank(planned) < _rank(known):
            best[division.family] = planned
    return ClusterPlan(
        work=work, cluster=cluster, host_bytes=host_bytes, divisions=tuple(sorted(best.values(), key=_rank))
    )


def _rank(planned: PlannedDivision) -> tuple[bool, float, float]:
    """Those that fit by time, and of equally fast ones the one with less memory; the others by memory."""
    seconds, device = round(planned.time.seconds, 3), planned.memory.device
    return (False, seconds, device) if planned.fits else (True, device, seconds)


def planned_division(
    work: Workload, division: Division, cluster: Cluster, *, host_bytes: int | None = None
) -> PlannedDivision:
    """The memory and time of one division."""
    memory, time = memory_of(work, division, cluster), step_time(work, division, cluster)
    fits = memory.device <= (1 - HEADROOM) * cluster.gpu.memory_bytes
    if host_bytes is not None:
        fits = fits and memory.host <= host_bytes
    flops_s = model_flops(work) / time.seconds
    return PlannedDivision(
        division=division, memory=memory, time=time, tokens_per_s=work.tokens / time.seconds,
        mfu=flops_s / (cluster.gpus * cluster.gpu.sheet_flops), fits=fits,
    )  # fmt: skip


def configurations(work: Workload, cluster: Cluster) -> Iterator[Division]:
    """Every division that is tried, with each micro-batch that divides a replica's samples."""
    for division in _families(work.shape, cluster):
        replica_samples, rest = divmod(work.samples, division.data)
        if rest or not replica_samples:
            continue
        for checkpointing in ("none", "full"):
            for micro_batch in _powers(replica_samples):
                if replica_samples % micro_batch == 0:
                    yield replace(
                        division, checkpointing=checkpointing, micro_batch=micro_batch,
                        accumulate=replica_samples // micro_batch,
                    )  # fmt: skip


def _families(shape: ModelShape, cluster: Cluster) -> Iterator[Division]:
    gpus = cluster.gpus
    for sharding, engine in _DATA_PARALLEL:
        division = Division(sharding=sharding, engine=engine, data=gpus)
        yield division
        if sharding in ("gradients", "weights"):
            yield replace(division, offload=True)
        if sharding == "weights" and engine == "PyTorch" and cluster.nodes > 1:
            yield replace(division, within_node=True)
    tensors = [size for size in _sizes(MOST_TENSOR, cluster.gpus_per_node) if shape.kv_heads % size == 0]
    stages = [size for size in _powers(min(MOST_STAGES, shape.layers)) if gpus % size == 0]
    for tensor, pipeline in itertools.product(tensors, stages):
        if tensor * pipeline == 1 or gpus % (tensor * pipeline):
            continue
        sharding = "weights" if pipeline == 1 else "optimizer"
        yield Division(sharding=sharding, data=gpus // (tensor * pipeline), tensor=tensor, pipeline=pipeline)
    for sequence in _sizes(MOST_SEQUENCE, cluster.gpus_per_node):
        if sequence > 1 and shape.kv_heads % sequence == 0:  # as `sharding.sequence` requires
            yield Division(sharding="weights", data=gpus // sequence, sequence=sequence)


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(most.bit_length())]


def _sizes(most: int, gpus_per_node: int) -> Iterable[int]:
    """Powers of two that divide a node."""
    return [size for size in _powers(min(most, gpus_per_node)) if gpus_per_node % size == 0]
