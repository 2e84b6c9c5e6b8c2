"""The protocol of a training engine, and the records of the memory that one rank holds.

Memory is computed by formula from the model's parameters. DeepSpeed and PyTorch implement the engines themselves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from tigon.models.loading.presets import PRESETS
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request, ties_embeddings
from tigon.planner.simulate.collectives import GatheringPlan, GradientCopy
from tigon.planner.simulate.generation import ALL_HELD
from tigon.planner.simulate.ledger import Allocation, Ledger
from tigon.planner.simulate.model_states import ModelWeights, UpdateWork, Weight
from tigon.techniques.keys.settings import Settings
from tigon.techniques.precision import number_format
from tigon.techniques.sharding.sharding import are_drawn_in_place, fit_whole


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """How the engine treats gradients after the backward pass has computed them."""

    nbytes: int = 0
    """Bytes in addition to the gradients that the backward pass computes: reduced gradients, or their buckets."""
    allocated: Literal["at the start", "with the first", "with each"] = "at the start"
    """When `nbytes` are allocated: "at the start" once for the whole run, "with the first" reduced gradient all at
    once, or "with each" reduced gradient its share. The last two are freed after the step."""
    kept: bool = True
    """True: every gradient stays until the step. False: each is reduced and freed as soon as it is computed."""
    copies: tuple[GradientCopy, ...] = ()
    """Copies of each gradient when it is reduced."""
    whole_until_last_micro_batch: bool = False
    """Gradients accumulate whole, and are reduced after the last micro-batch."""


@dataclass(frozen=True, kw_only=True)
class GatheredSizes:
    """How many bytes of whole weights the engine gathers, and when. GatheredWeights allocates the part by layer."""

    by_layer: GatheringPlan | None = None
    """Weights that are gathered and freed layer by layer."""
    both_passes: int = 0
    """Bytes that are held through both passes."""
    forward: int = 0
    """Bytes in addition to `both_passes` in the layers' forward pass."""
    loss: int = 0
    """Bytes in addition to `both_passes` while the loss is computed."""
    loss_backward: int = 0
    """Bytes in addition to `both_passes` while the loss is differentiated."""
    entering: int = 0
    """Bytes in addition to `forward` when a layer's forward pass begins, and to `loss` when the head's begins."""
    backward: int = 0
    """Bytes in addition to `both_passes` during the layers' backward pass."""
    first_layer: int = 0
    """Bytes in addition to `both_passes` during the backward pass of the first layer, which comes last."""
    last: int = 0
    """Bytes in addition to `both_passes` after the layers' backward pass."""
    before_copy: int = 0
    """The most bytes that a gather on its own stream holds before they are copied out."""
    registered: tuple[int, ...] = ()
    """Tensors that exist at the same time, once, before the first forward pass, while the engine is set up."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that the engine moves, and the host time that it needs."""

    link: int = 0
    """Bytes to and from the host or NVMe in a step."""
    peers: int = 0
    """Bytes to and from other GPUs in a step."""
    peers_last: int = 0
    """The part of `peers` that no backward computation can hide, because it comes last."""
    copied: int = 0
    """Bytes of device memory that a micro-batch's collectives read and write to fill and empty their buckets."""
    host_calls: int = 0
    """Host time in a micro-batch and its step, as a number of operators of `Gpu.engine_s` each."""
    waited: int = 0
    """Bytes to and from other GPUs in a micro-batch, during which nothing is computed."""
    each_pass: int = 0
    """Bytes that the forward pass, and again the backward pass, copies from the host while it computes."""
    ranks: int = 2
    """GPUs of a collective."""

    @property
    def ring_share(self) -> float:
        """What a GPU of a ring passes on of each byte, as a multiple of the half that each of two GPUs passes on."""
        return 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The memory of one rank: bytes on its GPU, on its share of the host, and on NVMe."""

    weights: int
    optimizer_tensor_bytes: tuple[int, ...]
    """Optimizer states on the GPU, bytes of each tensor, allocated in the first step."""
    update: UpdateWork
    step_tensor_bytes: tuple[int, ...]
    """Temporaries of the optimizer step, bytes of each tensor."""
    gradients: Gradients = field(default_factory=Gradients)
    gathered: GatheredSizes = field(default_factory=GatheredSizes)
    traffic: Traffic = field(default_factory=Traffic)
    buckets: int = 0
    """Buffers of collectives, during the forward and backward passes."""
    buffers: int = 0
    """Buffers that the engine keeps for the whole run."""
    loaded_itemsize: int = 0
    """Bytes per element of the whole weights that the GPU holds until the engine shards them; else 0."""
    managed: int = 0
    """Optimizer state in unified memory, which moves to the host during the forward and backward passes."""
    host: int = 0
    """Host bytes in addition to `managed`."""
    nvme: int = 0

    @property
    def optimizer(self) -> int:
        """Optimizer states on the GPU."""
        return sum(self.optimizer_tensor_bytes)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """A model that is loaded into a ledger."""

    ledger: Ledger
    request: Request
    model: ModelWeights
    placement: Placement

    @property
    def widening(self) -> int:
        """How many times wider the weights are loaded than layers compute with them."""
        return max(self.placement.loaded_itemsize // self.model.weights[0].itemsize, 1)

    def fits_whole(self) -> bool:
        """Whether the whole weights fit on the GPU as they are loaded."""
        sizes = (self.widening * weight.nbytes for weight in self.model.weights)
        return fit_whole(sizes, self.ledger.allocator.limit_bytes)

    def load_whole(
        self, *, for_the_host: bool = False, without: Mapping[str, int] = MappingProxyType({})
    ) -> list[list[Allocation | None]]:
        """Allocate the whole weights and buffers; returns the tensors of each weight.

        for_the_host: the weights are initialized on the host. without: name -> how many tensors of a weight stay there,
        from the first on.
        """
        ledger, model, times = self.ledger, self.model, self.widening
        loaded = [
            [ledger.alloc(times * nbytes, "weights") for nbytes in weight.tensor_bytes[without.get(weight.name, 0) :]]
            for weight in model.weights
        ]
        ledger.alloc(model.buffer_bytes, "weights")
        if is_drawn(self.request) and ties_embeddings(self.request.config) and not for_the_host:
            # A model built on the device has a separate lm_head weight until transformers ties it (post_init), and the
            # allocator keeps that block. A model read from files is built without memory.
            ledger.alloc_briefly(math.prod(model.lm_head_shape) * times * model.weights[0].itemsize)
        return loaded


class Engine(ABC):
    """Spreads a run over GPUs."""

    joins_a_group = True
    """Whether a run on one GPU joins a process group too."""

    whole_weights = ALL_HELD
    """Whether the GPUs gather the whole weights for completions."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.gpus = settings.sharding.gpus

    def traced_settings(self) -> Settings:
        """The settings for the trace of one GPU's forward and backward passes."""
        return self.settings

    def library_bytes(self, gpu: Gpu) -> int:
        """GPU memory of the engine's own streams and kernels, outside PyTorch's allocator."""
        return 0

    @abstractmethod
    def placement(self, request: Request, model: ModelWeights) -> Placement:
        """The memory of one rank. `model` counts floats in the dtype that layers compute in."""

    def with_frozen(self, placement: Placement, frozen: Sequence[ModelWeights]) -> Placement:
        """The placement of a run that holds these models too, which are not trained. Each rank holds them whole."""
        return placement

    def load_frozen(self, loading: Loading) -> None:
        """Simulate how the weights of a model that is not trained reach the GPU."""
        loading.load_whole()

    def load(self, loading: Loading) -> None:
        """Simulate how the weights reach the GPU. By default they are loaded whole and stay."""
        loading.load_whole()

    def notes(self, request: Request, model: ModelWeights) -> tuple[str, ...]:
        """Limits of the estimate under this engine, one sentence each."""
        return ("Partitions and buckets are computed by formula; only part of their fragmentation is simulated.",)


def is_drawn(request: Request) -> bool:
    """Whether the weights are random and initialized on the device that the run uses."""
    return request.model in PRESETS and are_drawn_in_place(request.settings)


def drawn_whole(request: Request) -> bool:
    """Whether the GPU has the whole weights before stage 3 or FSDP2 shards them.

    Random weights without offload stay on the GPU if they fit. A checkpoint's weights are read into partitions or to
    the host (trainer/engine.py).
    """
    return is_drawn(request) and not request.settings.sharding.offloads


def computed_in_16_bits(settings: Settings) -> Settings:
    """ZeRO and FSDP2 run layers on 16-bit weights without autocast."""
    return settings.having({"train.precision": "bf16"}) if number_format(settings).autocast is not None else settings


def share(nbytes: int, gpus: int) -> int:
    """One rank's part of bytes that are divided by the GPUs, rounded up."""
    return -(-nbytes // gpus)


def gathering_too(placement: Placement, frozen: Sequence[ModelWeights]) -> Placement:
    """The placement of an engine that gathers the weights of these models once per micro-batch too."""
    peers = placement.traffic.peers + sum(model.packed_bytes for model in frozen)
    return replace(placement, traffic=replace(placement.traffic, peers=peers)) if frozen else placement


def load_divided(loading: Loading, gpus: int) -> None:
    """Load a model whole, then keep one rank's part. It is gathered layer by layer when it computes."""
    whole = loading.load_whole()
    loading.ledger.alloc(share(loading.widening * loading.model.weight_bytes, gpus), "weights")
    for tensors in whole:
        loading.ledger.free_all(tensors)


def layers_of(model: ModelWeights) -> list[list[Weight]]:
    """The weights of each layer."""
    layers: dict[int, list[Weight]] = defaultdict(list)
    for weight in model.weights:
        if weight.layer is not None:
            layers[weight.layer].append(weight)
    return list(layers.values())


def largest_layer_bytes(model: ModelWeights) -> int:
    """Bytes of the largest layer's weights, without the scales of weights in 4 bits, which no engine divides."""
    return max((sum(weight.packed_bytes for weight in layer) for layer in layers_of(model)), default=0)


def grad_bytes(model: ModelWeights) -> int:
    """Bytes of all gradients."""
    return sum(weight.grad_bytes for weight in model.trained)


def embedding_grad_bytes(model: ModelWeights) -> int:
    """Bytes of the embeddings' gradients, which the backward pass computes last."""
    return sum(weight.grad_bytes for weight in model.weights if weight.embedding)


def sharded_update(model: ModelWeights, *, gpus: int, optimizer_bytes: int, sm_s: float = 0.0) -> UpdateWork:
    """The work of a rank's step. It reads and writes its share of the weights and its states, and reads gradients."""
    weights = sum(weight.nbytes for weight in model.trained)
    return UpdateWork(2 * (weights // gpus + optimizer_bytes) + grad_bytes(model), 0, sm_s)
