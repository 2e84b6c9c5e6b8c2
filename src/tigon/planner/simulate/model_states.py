"""Weights, gradients and optimizer states of a run, from the model without data. They do not depend on the batch."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from tigon.models.hybrid_layers import counts_of
from tigon.planner.request import Request, build
from tigon.planner.simulate.optimizer_cost import FP32, Parameter, cost_of
from tigon.planner.trace import lora_adapters, quantized_weights
from tigon.planner.trace.cache import disk_cache
from tigon.planner.trace.cache.trace_key import TraceKey
from tigon.planner.trace.dispatch_recorder import rounded
from tigon.planner.trace.trace import weight_dtype
from tigon.techniques.keys.settings import Settings
from tigon.techniques.keys.sharding import ULYSSES
from tigon.techniques.optimizers import muon

# The first number in a parameter's path: `model.layers.7.mlp...`, `transformer.h.7.attn...`.
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Weight:
    """One parameter of the model; tied parameters are one weight."""

    name: str
    shape: tuple[int, ...]
    numel: int
    itemsize: int
    """Bytes per element while the run holds it."""
    trained: bool
    projected: bool
    """Whether it is a matrix of a layer, which GaLore projects."""
    by_muon: bool = False
    """Whether it is the matrix of a linear layer inside the decoder layers, which Muon updates."""
    stored_as: str | None = None
    """The 4-bit format that holds it, a key of `quantized_weights.TENSOR_BYTES_BY_FORMAT`."""
    embedding: bool = False
    of_objective: bool = False
    """The objective adds it to the model."""

    @property
    def layer(self) -> int | None:
        """The number of the model's layer that holds it; None outside the layers.

        Weights of the objective are outside: their modules may number their own layers from 0 again.
        """
        match = None if self.of_objective else _LAYER_NUMBER.search(self.name)
        return int(match[1]) if match else None

    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Bytes of each tensor that holds it."""
        if self.stored_as is None:
            return (self.numel * self.itemsize,)
        return quantized_weights.TENSOR_BYTES_BY_FORMAT[self.stored_as](self.numel)

    @property
    def nbytes(self) -> int:
        """Bytes as the caching allocator counts them."""
        return sum(rounded(nbytes) for nbytes in self.tensor_bytes)

    @property
    def packed_bytes(self) -> int:
        """As `nbytes`, without the scales of a weight in 4 bits."""
        return rounded(self.tensor_bytes[0])

    @property
    def grad_bytes(self) -> int:
        return rounded(self.numel * self.itemsize) if self.trained else 0


@dataclass(frozen=True)
class ModelWeights:
    """The weights and buffers of a run's model at full depth. Functions below derive the optimizer's states."""

    weights: tuple[Weight, ...]
    buffer_bytes: int
    lm_head_shape: tuple[int, int]
    """(vocab, hidden): the shape of the output embeddings' weight."""
    hybrid_layers: Mapping[str, int]
    """Number of layers of each kind of `models.hybrid_layers`."""

    @property
    def weight_bytes(self) -> int:
        return self.buffer_bytes + sum(weight.nbytes for weight in self.weights)

    @property
    def packed_bytes(self) -> int:
        """As `weight_bytes`, without the scales of weights in 4 bits."""
        return self.buffer_bytes + sum(weight.packed_bytes for weight in self.weights)

    @property
    def trained(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.weights if weight.trained)

    @property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)


def model_weights(request: Request) -> ModelWeights:
    """The weights of a request's model, at its full depth.

    The result is cached. Its key is a `TraceKey` in which batch, sequence length, block mask, kernels, attention,
    checkpointing, MLP tiles and accumulation fusion have fixed values, because the weights do not depend on them.

    Raises:
        RecipeError: The optimizer is Muon, and no weight is one that it updates (GPT-2, whose layers are Conv1D).
    """
    settings = request.settings.having(
        {
            "train.checkpointing": "none",
            "train.mlp_tile_tokens": 0,
            "model.kernels": "none",
            "model.attention": "sdpa",
            "model.attention_sinks": False,
            "train.gradient_accumulation_fusion": False,
            "train.loss_memory_mib": 0,
            "sharding.sequence": 1,
            "sharding.sequence_method": ULYSSES,
        }
    )
    found = _model_weights(TraceKey(replace(request, batch=1, seq=1, masked=False, settings=settings)))
    if settings.train.optimizer == "muon":
        muon.check_count(sum(weight.by_muon for weight in found.weights), request.config.model_type)
    return found


@functools.lru_cache(maxsize=64)
def _model_weights(key: TraceKey) -> ModelWeights:
    question = key.portable_text
    if question is not None:
        try:
            return _of_json(disk_cache.read("weights", question))
        except (TypeError, ValueError, LookupError):  # none, or another program's
            pass
    weights = _built_weights(key)
    if question is not None:
        disk_cache.write("weights", question, asdict(weights))
    return weights


def _of_json(stored: Mapping[str, Any]) -> ModelWeights:
    weights = tuple(Weight(**{**one, "shape": tuple(one["shape"])}) for one in stored["weights"])
    vocab, hidden = stored["lm_head_shape"]
    return ModelWeights(weights, stored["buffer_bytes"], (vocab, hidden), stored["hybrid_layers"])


def _built_weights(key: TraceKey) -> ModelWeights:
    request, settings = key.request, key.request.settings
    model = build(request.model, request.config)
    if settings.lora.quantize:
        quantized_weights.quantize(model, settings)
    if settings.lora.used:
        lora_adapters.add_lora(model, settings, fused=False)
    head = model.get_output_embeddings()
    model = request.objective.attach(model)
    buffer_bytes = sum(rounded(buffer.numel() * buffer.itemsize) for buffer in model.buffers())
    weights = _weights(model, settings, request.objective.own_parameters)
    text = request.config.get_text_config()  # a classification head stands in place of lm_head
    shape = (text.num_labels, text.hidden_size) if head is None else (head.out_features, head.in_features)
    return ModelWeights(weights, buffer_bytes, shape, counts_of(model))


def _weights(model: nn.Module, settings: Settings, own_parameters: str | None) -> tuple[Weight, ...]:
    formats = quantized_weights.quantized_formats(model)
    layers = {
        id(p) for name, m in model.named_modules() if _LAYER_NUMBER.search(f"{name}.") for p in m.parameters(False)
    }
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = muon.matrix_names(model)
    weights = []
    for name, p in model.named_parameters():
        held = weight_dtype(settings, trained=p.requires_grad, name=name)
        bytes_each = held.itemsize if p.is_floating_point() else p.itemsize
        weights.append(
            Weight(
                name,
                tuple(p.shape),
                p.numel(),
                bytes_each,
                trained=p.requires_grad,
                projected=id(p) in layers and p.ndim == 2,
                by_muon=name in matrices,
                stored_as=formats.get(id(p)),
                embedding=id(p) in embeddings,
                of_objective=own_parameters is not None and name.startswith(own_parameters),
            )
        )
    return tuple(weights)


def optimizer_parameters(weights: tuple[Weight, ...]) -> list[Parameter]:
    """The trained weights as parameters of the optimizer, in the order of the Trainer's groups.

    Weights that decay come first: all but norms and biases (transformers 5.17, Trainer.create_optimizer).
    """
    return [
        Parameter(weight.shape, weight.itemsize, weight.projected, weight.by_muon, weight.embedding)
        for weight in sorted(weights, key=lambda weight: len(weight.shape) < 2)
        if weight.trained
    ]


def state_tensor_bytes(request: Request, weights: tuple[Weight, ...]) -> list[int]:
    """Bytes of each tensor of optimizer state on the GPU, in the order in which the first step allocates them."""
    optimizer = cost_of(request.settings)
    tensors = [optimizer.shared_bytes] if optimizer.shared_bytes else []
    for parameter in optimizer_parameters(weights):
        states = optimizer.state_tensors(parameter)
        tensors += [state.nbytes for state in states if state.place == "device"]
    return tensors


@dataclass(frozen=True)
class UpdateWork:
    """The cost of one optimizer step on the GPU."""

    moved_bytes: int
    """Bytes of weights, gradients and states that are read and written, managed memory included."""
    host_calls: int = 0
    """Operators that the CPU launches."""
    sm_s: float = 0.0
    """Seconds that one multiprocessor computes in addition."""


def update_work(request: Request, weights: tuple[Weight, ...]) -> UpdateWork:
    """The work of one optimizer step on all `weights`."""
    optimizer, parameters = cost_of(request.settings), optimizer_parameters(weights)
    return UpdateWork(
        optimizer.moved_bytes(parameters), optimizer.calls * len(parameters), sum(map(optimizer.sm_s, parameters))
    )


def managed_bytes(request: Request, weights: tuple[Weight, ...]) -> int:
    """Optimizer state in unified memory, which PyTorch does not count and which moves to the host."""
    return cost_of(request.settings).state_bytes(optimizer_parameters(weights), place="managed")


def step_tensor_bytes(request: Request, weights: tuple[Weight, ...]) -> list[int]:
    """Bytes of each temporary tensor at the moment when the optimizer's step holds the most of them."""
    optimizer, parameters = cost_of(request.settings), optimizer_parameters(weights)
    if optimizer.holds_all:
        return optimizer.step_tensor_bytes(parameters)
    whole = FP32 * max((parameter.numel for parameter in parameters), default=1)
    count, rest = divmod(optimizer.step_peak_bytes(parameters), whole)
    return [whole] * count + [rest] * (rest > 0)
