"""What a run holds whatever its batch: weights, gradients and optimizer states, from the model without data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from tigon.planner.request import Request, build
from tigon.planner.trace import adapters
from tigon.planner.trace.dispatch_recorder import rounded
from tigon.techniques.optimizers import FP32, OPTIMIZERS, Parameter

# The first number in a parameter's path: `model.layers.7.mlp...`, `transformer.h.7.attn...`.
_LAYER = re.compile(r"\.(\d+)\.")
_HEADS = "draft_heads."


@dataclass(frozen=True)
class Weight:
    """One parameter of the model; tied ones are one."""

    name: str
    shape: tuple[int, ...]
    numel: int
    itemsize: int
    """Bytes of an element while the run holds it."""
    trained: bool
    projected: bool
    """A matrix of a layer, which GaLore projects."""
    nf4: bool = False
    embedding: bool = False

    @property
    def layer(self) -> int | None:
        """None outside of the model's own layers, as in draft heads, which count theirs from 0 again."""
        found = None if self.name.startswith(_HEADS) else _LAYER.search(self.name)
        return int(found[1]) if found else None

    @property
    def tensors(self) -> tuple[int, ...]:
        """Bytes of each tensor that holds it."""
        return adapters.nf4_bytes(self.numel) if self.nf4 else (self.numel * self.itemsize,)

    @property
    def nbytes(self) -> int:
        """As the caching allocator counts it."""
        return sum(rounded(nbytes) for nbytes in self.tensors)

    @property
    def grad_bytes(self) -> int:
        return rounded(self.numel * self.itemsize) if self.trained else 0


@dataclass(frozen=True)
class Statics:
    """The model and its optimizer at rest."""

    weights: tuple[Weight, ...]
    buffer_bytes: int
    head_shape: tuple[int, int]
    """(vocab, hidden)"""

    @property
    def weight_bytes(self) -> int:
        return self.buffer_bytes + sum(weight.nbytes for weight in self.weights)

    @property
    def trained(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.weights if weight.trained)

    @property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)


def statics(request: Request, itemsize: int) -> Statics:
    """The model of `request` with floats of `itemsize` bytes, at its full depth."""
    choices = request.choices
    model: Any = build(request.model, request.config)
    if choices.quantized:
        adapters.quantize(model)
    if choices.lora_rank is not None:
        adapters.attach(model, choices)
    if request.heads is not None:
        request.heads(model)
    head = model.get_output_embeddings()
    quantized = {id(m.weight) for m in model.modules() if isinstance(m, adapters.Nf4Linear)}
    layers = {id(p) for name, m in model.named_modules() if _LAYER.search(f"{name}.") for p in m.parameters(False)}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    # PEFT keeps adapters in fp32 unless the whole run is in 16 bits.
    adapter_itemsize = 2 if choices.precision == "bf16" else 4
    weights = []
    for name, p in model.named_parameters():
        bytes_each = adapter_itemsize if "lora_" in name else itemsize if p.is_floating_point() else p.itemsize
        projected = id(p) in layers and p.ndim == 2
        weights.append(
            Weight(
                name, tuple(p.shape), p.numel(), bytes_each, p.requires_grad, projected, nf4=id(p) in quantized,
                embedding=id(p) in embeddings,
            )
        )  # fmt: skip
    buffer_bytes = sum(rounded(buffer.numel() * buffer.itemsize) for buffer in model.buffers())
    return Statics(tuple(weights), buffer_bytes, (head.out_features, head.in_features))


def optimizer_parameters(weights: tuple[Weight, ...]) -> list[Parameter]:
    """The trained weights as the optimizer table wants them, in the order of the Trainer's groups: those that decay,
    which are all but norms and biases (transformers 5.17, Trainer.create_optimizer), then the others."""
    return [
        Parameter(weight.shape, weight.itemsize, weight.projected, weight.embedding)
        for weight in sorted(weights, key=lambda weight: len(weight.shape) < 2)
        if weight.trained
    ]


def state_tensors(request: Request, weights: tuple[Weight, ...]) -> list[int]:
    """Bytes of each tensor of optimizer state on the GPU, in the order in which the first step makes them."""
    optimizer = OPTIMIZERS[request.choices.optimizer]
    tensors = [optimizer.shared_bytes] if optimizer.shared_bytes else []
    for parameter in optimizer_parameters(weights):
        found = optimizer.state_tensors(parameter, rank=request.choices.galore_rank)
        tensors += [tensor.nbytes for tensor in found if tensor.place == "device"]
    return tensors


def update_work(request: Request, weights: tuple[Weight, ...]) -> tuple[int, int, float]:
    """One optimizer step: (bytes that weights, gradients and states on the GPU, managed memory among it, are read and
    written with, operators that the host launches, seconds of one multiprocessor besides)."""
    optimizer, rank = OPTIMIZERS[request.choices.optimizer], request.choices.galore_rank
    parameters = optimizer_parameters(weights)
    if optimizer.step_moves is None:
        states = sum(state_tensors(request, weights)) + managed_bytes(request, weights)
        moved = sum(3 * parameter.nbytes for parameter in parameters) + 2 * states
    else:
        moved = sum(optimizer.step_moves(parameter, rank) for parameter in parameters)
    return moved, optimizer.step_calls * len(parameters), sum(map(optimizer.step_sm_s, parameters))


def managed_bytes(request: Request, weights: tuple[Weight, ...]) -> int:
    """Optimizer state in unified memory, which PyTorch does not count and which moves to the host."""
    optimizer = OPTIMIZERS[request.choices.optimizer]
    parameters = optimizer_parameters(weights)
    return optimizer.state_bytes(parameters, rank=request.choices.galore_rank, place="managed")


def step_tensors(request: Request, weights: tuple[Weight, ...]) -> list[int]:
    """The most that the optimizer's step adds to weights, gradients and states: bytes of each tensor."""
    optimizer, rank = OPTIMIZERS[request.choices.optimizer], request.choices.galore_rank
    parameters = optimizer_parameters(weights)
    if optimizer.step_holds_all:
        return [optimizer.step_bytes(parameter, rank) for parameter in parameters]
    whole = FP32 * max((parameter.numel for parameter in parameters), default=1)
    count, rest = divmod(optimizer.step_peak_bytes(parameters, rank=rank), whole)
    return [whole] * count + [rest] * (rest > 0)
