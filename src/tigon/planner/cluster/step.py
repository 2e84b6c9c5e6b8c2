"""The time of a step: a layer takes as long as its computation or its collectives, whichever is longer.

Collectives of weights and gradients run beside the layers; those of activations wait for the computation and are
waited for. The first gather and the last reduction have nothing beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tigon.planner.cluster.compute import LayerTime, Workload, layer_time
from tigon.planner.cluster.division import Division
from tigon.planner.cluster.memory import MASTER_ITEMSIZE, shard_ranks, stage_numel
from tigon.planner.cluster.shape import BF16
from tigon.planner.cluster.topology import Cluster
from tigon.planner.cluster.traffic import Transfer, activation_transfers, data_transfers, gradient_reductions
from tigon.planner.simulate.roofline import COPY_SHARE
from tigon.planner.step_time import HOST_BYTES_S
from tigon.techniques.sharding import LARGEST_LAYER

ENGINE_CALLS = {"DDP": 0, "FSDP2": 130, "ZeRO": 180, "ZeRO-3": 680, "ZeRO-3 by layers": 180}
"""Host time per weight and step of each engine, as a number of operators (planner/engines)."""
_WEIGHTS_PER_LAYER = 9
UPDATE_BYTES = {"amp-bf16": 42, "bf16": 20}
"""Bytes that clipping and AdamW move per parameter. Clipping reads the gradient twice and writes it once. AdamW reads
it, and reads and writes weight and moments. With fp32 weights it also writes a 16-bit copy."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step."""

    parts: Mapping[str, float]
    """compute, host, activations, weights and gradients (what no computation hides), bubble, update. They sum to
    `seconds`."""
    transfers: tuple[Transfer, ...]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def step_time(work: Workload, division: Division, cluster: Cluster) -> StepTime:
    """The time of a step on the slowest pipeline stage, and what its collectives move."""
    layer = layer_time(work, division, cluster.gpu)
    data, activations = data_transfers(work, division, cluster), activation_transfers(work, division, cluster)
    micro_s = _stage_s(work, division, layer)
    waiting_s = max(_host_s(work, division, cluster, layer) - micro_s, 0.0)
    each_s = sum(one.seconds(cluster) for one in activations) / division.accumulate
    bubbles = (division.pipeline - 1) / division.chunks
    parts = {
        "compute": division.accumulate * micro_s,
        "host": division.accumulate * waiting_s,
        "activations": division.accumulate * each_s,
        "weights and gradients": _exposed_s(work, division, cluster, layer, data),
        "bubble": bubbles * (micro_s + waiting_s + each_s),
        "update": _update_s(work, division, cluster),
    }
    return StepTime(parts=parts, transfers=(*data, *activations))


def _stage_s(work: Workload, division: Division, layer: LayerTime) -> float:
    """Seconds that a micro-batch computes on the slowest stage. The last stage has the head."""
    both_s = layer.forward_s + layer.backward_s
    layers, stages = work.shape.layers, division.pipeline
    most, least = -(-layers // stages), layers // stages
    # Layers that do not divide evenly leave the stage of the head with fewer.
    last = least if layers % stages else most
    return max(most * both_s, last * both_s + layer.head_s)


def _host_s(work: Workload, division: Division, cluster: Cluster, layer: LayerTime) -> float:
    """CPU time of one micro-batch, with the engine's own time of a step spread over its micro-batches."""
    layers = -(-work.shape.layers // division.pipeline)
    if division.sharding == "none":
        calls = ENGINE_CALLS["DDP"]
    elif division.engine == "PyTorch":
        calls = ENGINE_CALLS["FSDP2"] if division.sharding == "weights" else 0
    else:
        small = work.shape.layer_matrix_numel <= LARGEST_LAYER
        by_layers = division.whole_layers and small and not division.offload
        by_weights = "ZeRO-3 by layers" if by_layers else "ZeRO-3"
        calls = ENGINE_CALLS[by_weights if division.sharding == "weights" else "ZeRO"]
    return layers * (layer.host_s + calls * _WEIGHTS_PER_LAYER * cluster.gpu.host_s)


def _exposed_s(
    work: Workload, division: Division, cluster: Cluster, layer: LayerTime, data: list[Transfer]
) -> float:  # fmt: skip
    """Seconds of weights' and gradients' collectives that no computation hides."""
    each = {transfer.what: transfer for transfer in data}
    one_s = {name: transfer.seconds(cluster) / transfer.count for name, transfer in each.items()}
    reductions = gradient_reductions(work, division)
    units = round(each["gradients"].count / reductions)
    layers = units - 1
    gradients_s = one_s["gradients"] + one_s.get("gradients between nodes", 0.0)
    weights_s = one_s.get("weights", 0.0)
    if division.sharding == "weights" and division.pipeline == 1:
        forward_s = layers * max(weights_s - layer.forward_s, 0.0) + weights_s
        plain_s = layers * max(weights_s - layer.backward_s, 0.0)
        reducing_s = layers * max(weights_s + gradients_s - layer.backward_s, 0.0) + gradients_s
        others = division.accumulate - reductions
        return division.accumulate * forward_s + others * plain_s + reductions * reducing_s
    hidden_s = 0.0 if division.pipeline > 1 else layers * layer.backward_s
    reducing_s = max(units * gradients_s - hidden_s, gradients_s)
    # ZeRO-1 and 2 gather the updated weights after the step; a pipeline's stages gather theirs before it.
    return reductions * reducing_s + units * weights_s


def _update_s(work: Workload, division: Division, cluster: Cluster) -> float:
    """Clipping and AdamW, on the GPU or on the host."""
    gpu, ranks = cluster.gpu, shard_ranks(division, cluster)
    numel = stage_numel(work, division) / ranks
    if not division.offload:
        return numel * UPDATE_BYTES[work.states] / (gpu.copy_bytes_s * COPY_SHARE)
    # Gradients go out and weights come in. With weights on the host, every pass reads them too. FSDP2 copies its shards
    # in their own format, DeepSpeed 16-bit ones.
    copies = 2 + (2 * division.accumulate if division.sharding == "weights" else 0)
    itemsize = MASTER_ITEMSIZE[work.states] if division.engine == "PyTorch" else BF16
    return copies * itemsize * numel / gpu.link_bytes_s + 28 * numel / HOST_BYTES_S
