"""One GPU without an engine: it holds all weights, gradients and states."""

from __future__ import annotations

from tigon.planner.engines.base import Engine, Placement
from tigon.planner.request import Request
from tigon.planner.simulate.model_states import (
    ModelWeights,
    managed_bytes,
    state_tensor_bytes,
    step_tensor_bytes,
    update_work,
)


class SingleGpu(Engine):
    """The Trainer alone, on one GPU."""

    joins_a_group = False

    def placement(self, request: Request, model: ModelWeights) -> Placement:
        return Placement(
            weights=model.weight_bytes,
            optimizer_tensor_bytes=tuple(state_tensor_bytes(request, model.weights)),
            update=update_work(request, model.weights),
            step_tensor_bytes=tuple(step_tensor_bytes(request, model.weights)),
            managed=managed_bytes(request, model.weights),
        )

    def notes(self, request: Request, model: ModelWeights) -> tuple[str, ...]:
        return ()
