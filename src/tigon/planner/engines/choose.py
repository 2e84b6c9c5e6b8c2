"""The engine of a run's settings, and the engines that divide no weights: one GPU, and DistributedDataParallel."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from tigon.planner.engines.base import (
    Engine,
    GatheredSizes,
    Gradients,
    Loading,
    Placement,
    Traffic,
    embedding_grad_bytes,
    grad_bytes,
    sharded_update,
)
from tigon.planner.engines.base_offload import layers_on_host
from tigon.planner.engines.fsdp import Fsdp
from tigon.planner.engines.zero import Zero1, Zero2, Zero3
from tigon.planner.request import Request
from tigon.planner.simulate.model_states import (
    ModelWeights,
    managed_bytes,
    state_tensor_bytes,
    step_tensor_bytes,
    update_work,
)
from tigon.techniques.keys.settings import Settings
from tigon.units import in_bytes

BROADCAST_BUCKET_BYTES = 250 << 20
"""torch/nn/parallel/distributed.py: broadcast_bucket_size."""


def engine_of(settings: Settings) -> Engine:
    """DeepSpeed for a ZeRO stage, FSDP2 if chosen, DDP for several GPUs, else no engine around the model."""
    if settings.sharding.zero:
        stages: Mapping[int, type[Engine]] = {1: Zero1, 2: Zero2, 3: Zero3}
        return stages[settings.sharding.zero](settings)
    if settings.sharding.fsdp:
        return Fsdp(settings)
    return Ddp(settings) if settings.sharding.gpus > 1 else SingleGpu(settings)


class SingleGpu(Engine):
    """The Trainer alone, on one GPU."""

    joins_a_group = False

    def placement(self, request: Request, model: ModelWeights) -> Placement:
        whole = Placement(
            weights=model.weight_bytes,
            optimizer_tensor_bytes=tuple(state_tensor_bytes(request, model.weights)),
            update=update_work(request, model.weights),
            step_tensor_bytes=tuple(step_tensor_bytes(request, model.weights)),
            managed=managed_bytes(request, model.weights),
        )
        if not self.settings.lora.base_offload:
            return whole
        moved = layers_on_host(model)
        return replace(
            whole,
            weights=whole.weights - moved.moved_bytes + sum(moved.buffers),
            host=moved.host_bytes,
            traffic=Traffic(each_pass=moved.pass_bytes),
        )

    def load(self, loading: Loading) -> None:
        if not self.settings.lora.base_offload:
            return super().load(loading)
        moved = layers_on_host(loading.model)
        for nbytes in moved.buffers:
            loading.ledger.alloc(nbytes, "weights")
        loading.load_whole(for_the_host=True, without=moved.tensors)
        return None

    def notes(self, request: Request, model: ModelWeights) -> tuple[str, ...]:
        if not self.settings.lora.base_offload:
            return ()
        moved = layers_on_host(model)
        return (
            f"The frozen weights of {len(moved.layer_bytes)} layers wait in host memory, {in_bytes(moved.host_bytes)}. "
            f"Each micro-batch copies {in_bytes(2 * moved.pass_bytes)} to the GPU, while it computes.",
        )


class Ddp(Engine):
    """Every GPU holds the whole model, and gradients are summed over GPUs."""

    def placement(self, request: Request, model: ModelWeights) -> Placement:
        grads, states = grad_bytes(model), state_tensor_bytes(request, model.weights)
        return Placement(
            weights=model.weight_bytes,
            gradients=Gradients(nbytes=grads),  # the buckets are a second copy, not views of the gradients
            gathered=GatheredSizes(registered=_broadcast_bytes(model)),
            optimizer_tensor_bytes=tuple(states),
            update=sharded_update(model, gpus=self.gpus, optimizer_bytes=sum(states)),
            step_tensor_bytes=tuple(step_tensor_bytes(request, model.weights)),
            traffic=Traffic(
                peers=2 * grads,
                peers_last=2 * embedding_grad_bytes(model),
                copied=4 * grads,
                ranks=self.gpus,
            ),
            managed=managed_bytes(request, model.weights),
        )


def _broadcast_bytes(model: ModelWeights) -> tuple[int, ...]:
    """The two largest buckets in a row in which DDP broadcasts the first process's weights before the first pass.

    A bucket is a copy of weights of one dtype. It is closed by the weight that fills it, and two are under way at a
    time. A weight that is a bucket of its own is sent without a copy (torch/csrc/distributed/c10d/comm.cpp).
    """
    tensors = [
        (weight.itemsize if weight.stored_as is None else weight.stored_as, nbytes)
        for weight in model.weights
        for nbytes in weight.tensor_bytes
    ]
    buckets, filling = list[list[int]](), dict[object, list[int]]()
    for dtype, nbytes in tensors:
        if dtype not in filling:
            filling[dtype] = []
            buckets.append(filling[dtype])
        filling[dtype].append(nbytes)
        if sum(filling[dtype]) >= BROADCAST_BUCKET_BYTES:
            del filling[dtype]
    copies = [sum(bucket) if len(bucket) > 1 else 0 for bucket in buckets]
    return max(itertools.pairwise([0, *copies]), key=sum)
