"""Memory and traffic of frozen layers that wait on the host (techniques/base_offload), on one GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tigon.planner.engines.deepspeed_host_memory import pinned
from tigon.planner.simulate.model_states import ModelWeights, Weight
from tigon.planner.trace.dispatch_recorder import rounded
from tigon.techniques.base_offload.streamed_layers import ALIGNMENT, BUFFERS


@dataclass(frozen=True)
class LayersOnHost:
    """The frozen weights of decoder layers, in the blocks that are copied."""

    tensors: Mapping[str, int]
    """Name of each weight that waits on the host -> how many of its tensors do, from the first on."""
    moved_bytes: int
    """Bytes of those tensors as the caching allocator counts them."""
    layer_bytes: tuple[int, ...]
    """Bytes of the block of each layer."""

    @property
    def buffers(self) -> tuple[int, ...]:
        """Bytes of each buffer on the GPU."""
        return tuple(max(self.layer_bytes[first::BUFFERS]) for first in range(min(BUFFERS, len(self.layer_bytes))))

    @property
    def pass_bytes(self) -> int:
        """Bytes that a forward or a backward pass copies: all layers but those that are still there."""
        return sum(self.layer_bytes[BUFFERS:])

    @property
    def host_bytes(self) -> int:
        return sum(map(pinned, self.layer_bytes))


def layers_on_host(model: ModelWeights) -> LayersOnHost:
    """What waits on the host. Other numbered parts of a model, such as a vision tower's layers, stay on the GPU."""
    stacks: dict[str, dict[int, list[Weight]]] = defaultdict(lambda: defaultdict(list))
    for weight in model.weights:
        if weight.layer is not None and not weight.trained and len(weight.shape) > 1:
            stacks[weight.name.partition(f".{weight.layer}.")[0]][weight.layer].append(weight)
    stack = max(stacks.values(), key=lambda layers: sum(w.nbytes for layer in layers.values() for w in layer))
    waiting = [weight for layer in stack.values() for weight in layer]
    return LayersOnHost(
        {weight.name: len(_moved(weight)) for weight in waiting},
        sum(rounded(nbytes) for weight in waiting for nbytes in _moved(weight)),
        tuple(_packed_bytes(stack[number]) for number in sorted(stack)),
    )


def _moved(weight: Weight) -> tuple[int, ...]:
    """Bytes of the tensors that move. The tables of a 4-bit weight and the scales of its scales stay."""
    return weight.tensor_bytes[:2]


def _packed_bytes(weights: list[Weight]) -> int:
    return sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for weight in weights for nbytes in _moved(weight))
