"""Memory for weights, gradients and optimizer state on each of several GPUs, on the host and on NVMe.

Computed in closed form from the model's statics: DeepSpeed 0.19.8's ZeRO-1 to 3 with the bucket sizes of
techniques/sharding.py, PyTorch's FSDP2, and DistributedDataParallel if a request has neither.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

from tigon.models.loading.presets import PRESETS
from tigon.planner.engines import deepspeed_host_memory
from tigon.planner.request import Request
from tigon.planner.simulate.ledger import Copy, Gathering
from tigon.planner.simulate.statics import Statics, Weight, state_tensors
from tigon.techniques.choices import Choices
from tigon.techniques.optimizers import OPTIMIZERS, Parameter
from tigon.techniques.sharding import are_drawn_in_place, are_read_in_parts

FP32, FP64 = 4, 8
# deepspeed/runtime/zero/config.py: elements of gathered weights that stage 3 may hold (stage3_max_live_parameters).
MAX_LIVE_ELEMENTS = 10**9
# deepspeed/runtime/zero/stage3.py, _constant_buffered_norm2: elements that are converted to fp64 at a time.
NORM_ELEMENTS = 250_000_000

# Host time of the engine per trained weight (forward, backward and step), as a number of operators. The values were
# measured on Llama-3.2-1B, 4 x 1024 on each of two H200s: step time minus the time of the operators. The cause of the
# rest is unknown, except that FSDP2's own Python accounts for 60 (16 tiny layers on a CPU with no-op collectives).
ZERO_CALLS = 180
ZERO3_CALLS = 680  # the hooks gather and release each weight; also fits ZeRO-3 on one H200 with states on the host
FSDP_CALLS = 130

GradientsBorn = Literal["start", "first", "each"]
"""start: the engine allocates gradients once and keeps them. first: the first reduced gradient allocates all of them.
each: every reduced gradient adds its share. With `first` and `each`, they are freed after the step."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Bytes on one GPU, on its share of the host, and on NVMe."""

    weights: int
    gradients: int
    """In addition to the gradients that the backward pass makes: reduced gradients, or buckets of them."""
    born: GradientsBorn = "start"
    """When `gradients` are allocated."""
    optimizer: int
    gathered: int = 0
    """Whole weights of the layers in use, during the forward and backward passes."""
    gathering: Gathering | None = None
    """Whole weights that are gathered and freed layer by layer, instead of `gathered`."""
    gathered_again: int = 0
    """In addition to `gathered`, during the layers' backward pass."""
    gathered_beside: int = 0
    """The most that a gather on its own stream holds before it is copied out."""
    buckets: int = 0
    """Buffers of collectives, during the forward and backward passes."""
    buffers: int = 0
    """Buffers that the engine keeps for the whole run."""
    shard_itemsize: int = 0
    """Bytes per element of a weight at rest if the GPU holds a shard of each weight; else 0."""
    loaded_itemsize: int = 0
    """Bytes per element of the whole weights that the GPU holds until the engine shards them; 0 if it holds none."""
    step: int = 0
    """Temporaries of the step."""
    step_sm_s: float = 0.0
    """Seconds that one multiprocessor computes in the step, in addition to the time for its memory traffic."""
    host: int = 0
    nvme: int = 0
    copies: tuple[Copy, ...] = ()
    """Copies of each gradient on its way to the host."""
    keeps_gradients: bool = True
    """True: every gradient stays until the step. False: each is reduced and freed as soon as it is computed."""
    link: int = 0
    """Bytes to and from the host or NVMe in a step."""
    peers: int = 0
    """Bytes to and from other GPUs in a step."""
    peers_last: int = 0
    """The part of `peers` that no backward computation can hide, because it comes last."""
    copied: int = 0
    """Bytes of device memory that a micro-batch's collectives read and write to fill and empty their buckets."""
    host_calls: int = 0
    """Host time that the engine needs in a micro-batch and its step, as a number of operators."""


def is_sharded(choices: Choices) -> bool:
    return choices.zero > 0 or choices.fsdp or choices.gpus > 1


def traced_choices(choices: Choices) -> Choices:
    """Choices of one GPU's forward and backward: ZeRO and FSDP2 run layers on 16-bit weights without autocast."""
    engine = choices.zero > 0 or choices.fsdp
    if engine and choices.precision in ("amp-bf16", "amp-fp16"):
        return replace(choices, precision="bf16")
    return choices


def placement(request: Request, model: Statics) -> Placement:
    """Where a sharded run keeps its memory. `model` counts floats in the dtype that layers compute in."""
    choices = request.choices
    if choices.zero:
        return _zero(request, model)
    if choices.fsdp:
        return _fsdp(request, model)
    return _ddp(request, model)


def _share(nbytes: int, gpus: int) -> int:
    return -(-nbytes // gpus)


def _unit_bytes(model: Statics) -> int:
    """Bytes of the largest unit that is gathered at once: a layer, or all weights outside the layers."""
    outside = sum(weight.nbytes for weight in model.weights if weight.layer is None)
    return max(outside, _layer_bytes(model))


def _embedding_grad_bytes(model: Statics) -> int:
    """Bytes of the embeddings' gradients, which the backward pass makes last."""
    return sum(weight.grad_bytes for weight in model.weights if weight.embedding)


def _layers(model: Statics) -> list[list[Weight]]:
    layers: dict[int, list[Weight]] = defaultdict(list)
    for weight in model.weights:
        if weight.layer is not None:
            layers[weight.layer].append(weight)
    return list(layers.values())


def _layer_bytes(model: Statics) -> int:
    """Bytes of the largest layer's weights."""
    return max((sum(weight.nbytes for weight in layer) for layer in _layers(model)), default=0)


def _ddp(request: Request, model: Statics) -> Placement:
    grads = sum(weight.grad_bytes for weight in model.trained)
    return Placement(
        weights=model.weight_bytes,
        gradients=grads,  # the buckets are a second copy, not views of the gradients
        optimizer=sum(state_tensors(request, model.weights)),
        peers=2 * grads,
        peers_last=2 * _embedding_grad_bytes(model),
        copied=4 * grads,
    )


def _zero(request: Request, model: Statics) -> Placement:
    choices, gpus = request.choices, request.choices.gpus
    numel = sum(weight.numel for weight in model.trained)
    grads = sum(weight.grad_bytes for weight in model.trained)
    mixed = choices.precision.startswith("amp")
    # The optimizer works on a flat copy of this GPU's slice at every stage: in bf16 if the whole run is bf16, else in
    # fp32 (stage_1_and_2.py: single_partition_of_fp32_groups). stage3.py has a case without a copy, but never takes it,
    # because it compares a device with a device's name.
    itemsize = 2 if choices.precision == "bf16" else FP32
    slices = _slices(model, gpus, itemsize)
    optimizer, rank = OPTIMIZERS[choices.optimizer], choices.galore_rank
    states = sum(piece.nbytes for piece in slices) + optimizer.state_bytes(slices, rank=rank)
    hidden = model.head_shape[1]
    bucket_bytes = max(hidden**2, 2**16) * (4 if choices.precision == "fp32" else 2)
    weights, nvme, link = model.weight_bytes, 0, 0
    host = optimizer.state_bytes(slices, rank=rank, place="managed")
    if choices.zero == 3:
        weights = _share(model.weight_bytes, gpus)
    calls = ZERO3_CALLS if choices.zero == 3 else ZERO_CALLS
    loaded = FP32 if mixed else itemsize
    if choices.zero == 3 and not _drawn_whole(request):
        # DeepSpeed moves weights that it did not load to the GPU in 16 bits before it partitions any of them.
        in_parts = are_read_in_parts(choices, heads=request.heads is not None) and not is_drawn(request)
        loaded = 0 if in_parts or choices.quantized else model.weights[0].itemsize
    # Stage 1 leaves gradients where the backward pass makes them. Stage 2 copies its slice into one tensor when the
    # first bucket is reduced (grads_in_partition). Stage 3 has a flat buffer from the start
    # (grad_partitions_flat_buffer).
    held, buffers = 0 if choices.zero == 1 else _share(grads, gpus), 0
    step = (_share(FP32 * numel, gpus) if mixed else 0) + optimizer.step_peak_bytes(slices, rank=rank)
    step_sm_s = sum(map(optimizer.step_sm_s, slices))
    if choices.offload != "none":
        host, nvme = deepspeed_host_memory.of_zero(choices, model, slices, optimizer.state_bytes(slices, rank=rank))
        link += 2 * _share(grads, gpus)
        held, states, step, step_sm_s = 0, 0, 0, 0.0
        if choices.zero < 3:  # temp_grad_buffer_for_gpu_offload: as long as the largest weight
            buffers = max(weight.numel * weight.itemsize for weight in model.trained)
        if choices.zero == 3:
            link += 3 * weights
            weights = 0
    return Placement(
        weights=weights, gradients=held, born="start" if choices.zero == 3 else "first", optimizer=states,
        gathering=_gathering(request, model) if choices.zero == 3 else None, buffers=buffers, loaded_itemsize=loaded,
        copies=_copies(choices, model) if choices.zero == 3 and choices.offload != "none" else (),
        buckets=2 * bucket_bytes, step=step, step_sm_s=step_sm_s,
        host=host, nvme=nvme, keeps_gradients=choices.zero == 1, link=link,
        peers=(3 if choices.zero == 3 else 2) * grads if gpus > 1 else 0,
        peers_last=_embedding_grad_bytes(model) if gpus > 1 else 0,
        copied=2 * grads + 2 * _share(grads, gpus), host_calls=calls * len(model.trained),
    )  # fmt: skip


def _gathering(request: Request, model: Statics) -> Gathering:
    outside = [weight for weight in model.weights if weight.layer is None]
    layers = _layers(model)
    largest = max(layers, key=lambda weights: sum(weight.nbytes for weight in weights), default=[])
    # The NVMe configuration sets stage3_max_reuse_distance to 0, so no weights stay gathered for later layers.
    choices = request.choices
    keeps = choices.offload != "nvme"
    live = MAX_LIVE_ELEMENTS * model.weights[0].itemsize if keeps else 0
    return Gathering(
        outside=[weight.nbytes for weight in outside], layer=[weight.nbytes for weight in largest], layers=len(layers),
        most_bytes=min(model.weight_bytes, max(live, _unit_bytes(model))),
        # The embeddings are the last weight to be prefetched. With tiled MLPs there is already room for them, as the
        # peaks show in benchmarks/results/nvidia-h200/study/largest-batch.json.
        beyond_bytes=max(weight.nbytes for weight in model.weights) if keeps and not choices.mlp_tile_tokens else 0,
        last=[weight.nbytes for weight in outside if weight.embedding],
        head_stays=choices.kernels == "liger",  # its loss reads lm_head's weight outside the lm_head module
    )  # fmt: skip


def _copies(choices: Choices, model: Statics) -> tuple[Copy, ...]:
    """Copies of a gradient in stage 3 with states off the GPU. This GPU's part goes to the host and back. It is
    converted to fp64 for its norm, a part at a time, and to fp32 for the optimizer (stage3.py: partition_grads,
    _constant_buffered_norm2, _offload_grad_partition_at_boundary)."""
    itemsize, gpus = model.weights[0].itemsize, choices.gpus
    return (
        Copy(share=1 / gpus, stays=True),
        Copy(share=FP64 / itemsize / gpus, most_bytes=FP64 * NORM_ELEMENTS),
        Copy(share=FP32 / itemsize / gpus),
    )


def _reduction(choices: Choices, factor: int) -> tuple[Copy, ...]:
    """FSDP2: the output of a reduction, and a copy in the shard's dtype if the dtypes differ. The last of them is the
    gradient, which stays unless it goes to the host (_fsdp_collectives.py: foreach_reduce)."""
    made = [Copy(share=1 / choices.gpus, stays=True)] + [Copy(share=factor / choices.gpus)] * (factor > 1)
    return tuple(made if choices.offload != "none" else made[:-1])


def is_drawn(request: Request) -> bool:
    """Whether the weights are random and initialized on the device that the run uses."""
    return request.model in PRESETS and are_drawn_in_place(request.choices)


def _drawn_whole(request: Request) -> bool:
    """Whether the GPU has the whole weights before stage 3 or FSDP2 shards them. Random weights without offload stay on
    the GPU if they fit; a checkpoint's weights are read into partitions or to the host (trainer/engine.py)."""
    return is_drawn(request) and request.choices.offload == "none"


def _slices(model: Statics, gpus: int, itemsize: int) -> list[Parameter]:
    """The optimizer's parameters under DeepSpeed: one flat slice of the weights that decay, one of the others."""
    decaying, others = (
        sum(weight.numel for weight in model.trained if (len(weight.shape) >= 2) == decays) for decays in (True, False)
    )
    return [Parameter((_share(numel, gpus),), itemsize) for numel in (decaying, others) if numel]


def _fsdp(request: Request, model: Statics) -> Placement:
    choices, gpus = request.choices, request.choices.gpus
    # Shards and gradients have the dtype that the weights were loaded in, which is fp32 for amp precisions.
    factor = 2 if choices.precision.startswith("amp") else 1
    weights = _share(factor * model.weight_bytes, gpus)
    grads = _share(factor * sum(weight.grad_bytes for weight in model.trained), gpus)
    shards = [
        Parameter((_share(rows, gpus), *columns), factor * weight.itemsize)
        for weight in model.trained
        for rows, *columns in (weight.shape or (1,),)
    ]
    optimizer = OPTIMIZERS[choices.optimizer]
    states, step = optimizer.state_bytes(shards), optimizer.step_peak_bytes(shards)
    # Accelerate makes one unit of the last norm and lm_head, which stays gathered through forward and backward. The
    # embeddings are their own unit, or part of the first one if they are tied (fsdp2_prepare_model). In addition:
    # - forward: a layer's weights, or the buffer they were gathered into until the next layer is gathered;
    # - backward: a layer, the buffer of the next one, and a reduction's input (FSDPParamGroup: wait_for_unshard,
    #   post_backward).
    # Gathered weights, reduced weights and gradients are allocated on separate streams.
    layer, outside = _layer_bytes(model), [weight for weight in model.weights if weight.layer is None]
    untied = any(weight.shape == model.head_shape and not weight.embedding for weight in outside)
    tail = sum(weight.nbytes for weight in outside if not (untied and weight.embedding))
    gathered = tail + layer if choices.reshard else model.weight_bytes
    # Weights below the first trained one are not gathered for backward, so heads on a frozen model gather once.
    passes = 2 if any(weight.layer is not None for weight in model.trained) else 1
    host, link, itemsize = 0, 0, factor * model.weights[0].itemsize
    loaded = itemsize if _drawn_whole(request) else 0
    if choices.offload != "none":
        itemsize = 0
        host, link = weights + grads + states, 3 * weights + grads
        weights = grads = states = step = 0
    return Placement(
        weights=weights, gradients=grads, born="each", optimizer=states, gathered=min(gathered, model.weight_bytes),
        gathered_again=2 * layer if choices.reshard else layer, gathered_beside=tail + layer if gpus > 1 else 0,
        shard_itemsize=itemsize, loaded_itemsize=loaded, step=step, host=host, keeps_gradients=False, link=link,
        peers=passes * model.weight_bytes + sum(weight.nbytes for weight in model.trained) if gpus > 1 else 0,
        peers_last=_embedding_grad_bytes(model) if gpus > 1 else 0,
        copies=_reduction(choices, factor),
        # Gathered weights are copied out twice, gradients into the reduction's input.
        copied=6 * model.weight_bytes if gpus > 1 else 0, host_calls=FSDP_CALLS * len(model.trained),
    )  # fmt: skip
