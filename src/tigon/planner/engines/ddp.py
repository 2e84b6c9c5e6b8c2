"""torch.nn.parallel.DistributedDataParallel: every GPU holds the whole model, and gradients are summed over GPUs."""

from __future__ import annotations

from tigon.planner.engines.base import (
    Engine,
    Gradients,
    Placement,
    Traffic,
    embedding_grad_bytes,
    grad_bytes,
    sharded_update,
)
from tigon.planner.request import Request
from tigon.planner.simulate.model_states import ModelWeights, managed_bytes, state_tensor_bytes, step_tensor_bytes


class Ddp(Engine):
    """DDP on several GPUs."""

    def placement(self, request: Request, model: ModelWeights) -> Placement:
        grads, states = grad_bytes(model), state_tensor_bytes(request, model.weights)
        return Placement(
            weights=model.weight_bytes,
            gradients=Gradients(nbytes=grads),  # the buckets are a second copy, not views of the gradients
            optimizer_tensor_bytes=tuple(states),
            update=sharded_update(model, gpus=self.settings.sharding.gpus, optimizer_bytes=sum(states)),
            step_tensor_bytes=tuple(step_tensor_bytes(request, model.weights)),
            traffic=Traffic(peers=2 * grads, peers_last=2 * embedding_grad_bytes(model), copied=4 * grads),
            managed=managed_bytes(request, model.weights),
        )
