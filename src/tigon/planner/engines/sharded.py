"""What each of several GPUs holds of weights, gradients and states, and what waits on the host or on NVMe.

Closed form over the model's statics: DeepSpeed 0.19.8's ZeRO-1 to 3 with the bucket sizes of techniques/sharding.py,
PyTorch's FSDP2, and its DistributedDataParallel where neither is asked for.
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
# deepspeed/runtime/zero/stage3.py, _constant_buffered_norm2: elements that are read in fp64 at a time.
NORM_ELEMENTS = 250_000_000

# Host time of the engine for each trained weight, forward, backward and step together, in operators. Measured, not
# explained: the steps of Llama-3.2-1B, 4 x 1024 on each of two H200s, beyond what their operators take. Of FSDP2's, 60
# are its own Python: 16 tiny layers on a CPU with collectives that do nothing.
ZERO_CALLS = 180
ZERO3_CALLS = 680  # its hooks fetch and release each weight; also ZeRO-3 on one H200 with states on the host
FSDP_CALLS = 130

GradientsBorn = Literal["start", "first", "each"]
"""With the engine, to stay for good; with the first gradient that is reduced; or a share with each that is: until the
step."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Bytes on one GPU, on its share of the host, and on NVMe."""

    weights: int
    gradients: int
    """Besides what the backward itself makes: reduced gradients, or buckets of them."""
    born: GradientsBorn = "start"
    """When `gradients` are allocated."""
    optimizer: int
    gathered: int = 0
    """Whole weights of the layers in use, while the forward and backward run."""
    gathering: Gathering | None = None
    """Whole weights that come and go with the layers, instead of `gathered`."""
    gathered_again: int = 0
    """Besides `gathered`, while the layers' backward runs."""
    gathered_beside: int = 0
    """The most that a gathering on its own stream takes before it is copied out."""
    buckets: int = 0
    """Buffers of collectives, while the forward and backward run."""
    buffers: int = 0
    """Buffers that the engine keeps for the whole run."""
    shard_itemsize: int = 0
    """Bytes of an element of a weight at rest, where the GPU holds a shard of each; else 0."""
    loaded_itemsize: int = 0
    """Bytes of an element of the whole weights that the GPU holds until the engine takes them over; 0: it does not."""
    step: int = 0
    """Temporaries of the step."""
    step_sm_s: float = 0.0
    """Seconds that one multiprocessor computes in the step beyond what its bytes take."""
    host: int = 0
    nvme: int = 0
    copies: tuple[Copy, ...] = ()
    """What each gradient is copied to on its way to the host."""
    keeps_gradients: bool = True
    """Whether every gradient stays until the step; else each is reduced and freed as it comes."""
    link: int = 0
    """Bytes to and from the host or NVMe in a step."""
    peers: int = 0
    """Bytes to and from other GPUs in a step."""
    peers_last: int = 0
    """Of them, those that come when no backward is left to hide them."""
    copied: int = 0
    """Bytes of device memory that a micro-batch's collectives read and write besides: into their buckets and out."""
    host_calls: int = 0
    """Host time that the engine takes in a micro-batch and its step, in operators."""


def is_sharded(choices: Choices) -> bool:
    return choices.zero > 0 or choices.fsdp or choices.gpus > 1


def traced_choices(choices: Choices) -> Choices:
    """What one GPU's forward and backward run: ZeRO and FSDP2 hand layers 16-bit weights, with no autocast around."""
    engine = choices.zero > 0 or choices.fsdp
    if engine and choices.precision in ("amp-bf16", "amp-fp16"):
        return replace(choices, precision="bf16")
    return choices


def placement(request: Request, model: Statics) -> Placement:
    """Where everything is, for `choices` that shard. `model` counts floats of the dtype that layers compute in."""
    choices = request.choices
    if choices.zero:
        return _zero(request, model)
    if choices.fsdp:
        return _fsdp(request, model)
    return _ddp(request, model)


def _share(nbytes: int, gpus: int) -> int:
    return -(-nbytes // gpus)


def _unit_bytes(model: Statics) -> int:
    """Weights of the largest unit that is gathered at once: a layer, or what lies outside all layers."""
    outside = sum(weight.nbytes for weight in model.weights if weight.layer is None)
    return max(outside, _layer_bytes(model))


def _embedding_grad_bytes(model: Statics) -> int:
    """Gradients of the embeddings: the last that the backward makes."""
    return sum(weight.grad_bytes for weight in model.weights if weight.embedding)


def _layers(model: Statics) -> list[list[Weight]]:
    layers: dict[int, list[Weight]] = defaultdict(list)
    for weight in model.weights:
        if weight.layer is not None:
            layers[weight.layer].append(weight)
    return list(layers.values())


def _layer_bytes(model: Statics) -> int:
    """Weights of the largest layer."""
    return max((sum(weight.nbytes for weight in layer) for layer in _layers(model)), default=0)


def _ddp(request: Request, model: Statics) -> Placement:
    grads = sum(weight.grad_bytes for weight in model.trained)
    return Placement(
        weights=model.weight_bytes,
        gradients=grads,  # the buckets: a second copy, not views of the gradients
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
    # The optimizer works on a flat copy of this GPU's slice, whatever the stage and the dtype: in bf16 in a run of bf16
    # alone, in fp32 otherwise (stage_1_and_2.py: single_partition_of_fp32_groups; stage3.py compares a device with its
    # name, so that its case without a copy is never taken).
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
        # DeepSpeed moves what it did not load itself to the GPU, in 16 bits, before it partitions any of it.
        in_parts = are_read_in_parts(choices, heads=request.heads is not None) and not is_drawn(request)
        loaded = 0 if in_parts or choices.quantized else model.weights[0].itemsize
    # Stage 1 leaves gradients where the backward makes them, stage 2 copies its slice into one tensor when the first
    # bucket is reduced (grads_in_partition), stage 3 has a flat buffer from the start (grad_partitions_flat_buffer).
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
    # stage3_max_reuse_distance, which the NVMe's configuration sets; without it nothing is kept to be fetched ahead of.
    choices = request.choices
    keeps = choices.offload != "nvme"
    live = MAX_LIVE_ELEMENTS * model.weights[0].itemsize if keeps else 0
    return Gathering(
        outside=[weight.nbytes for weight in outside], layer=[weight.nbytes for weight in largest], layers=len(layers),
        most_bytes=min(model.weight_bytes, max(live, _unit_bytes(model))),
        # The last weight to be fetched ahead is the embeddings'. Where MLPs are tiled, room for it is there by then: so
        # say the peaks of benchmarks/results/nvidia-h200/study/largest-batch.json.
        beyond_bytes=max(weight.nbytes for weight in model.weights) if keeps and not choices.mlp_tile_tokens else 0,
        last=[weight.nbytes for weight in outside if weight.embedding],
        head_stays=choices.kernels == "liger",  # its loss reads the head's weight outside of the head's module
    )  # fmt: skip


def _copies(choices: Choices, model: Statics) -> tuple[Copy, ...]:
    """Stage 3 with states away from the GPU: this GPU's part of a gradient goes to the host and back, is read in fp64
    for its norm, a part at a time, and in fp32 for the optimizer (stage3.py: partition_grads,
    _constant_buffered_norm2, _offload_grad_partition_at_boundary)."""
    itemsize, gpus = model.weights[0].itemsize, choices.gpus
    return (
        Copy(share=1 / gpus, stays=True),
        Copy(share=FP64 / itemsize / gpus, most_bytes=FP64 * NORM_ELEMENTS),
        Copy(share=FP32 / itemsize / gpus),
    )


def _reduction(choices: Choices, factor: int) -> tuple[Copy, ...]:
    """FSDP2: a reduction's output, and the same in the shard's dtype, if that is another; the last of them is the
    gradient, and stays unless it goes to the host (_fsdp_collectives.py: foreach_reduce)."""
    made = [Copy(share=1 / choices.gpus, stays=True)] + [Copy(share=factor / choices.gpus)] * (factor > 1)
    return tuple(made if choices.offload != "none" else made[:-1])


def is_drawn(request: Request) -> bool:
    """Whether the weights are random ones, drawn where the run wants them."""
    return request.model in PRESETS and are_drawn_in_place(request.choices)


def _drawn_whole(request: Request) -> bool:
    """Whether the GPU has the whole weights before stage 3 or FSDP2 divides them: random ones that do not go to the
    host wait there if there is room, a checkpoint's are read into partitions or to the host (trainer/engine.py)."""
    return is_drawn(request) and request.choices.offload == "none"


def _slices(model: Statics, gpus: int, itemsize: int) -> list[Parameter]:
    """What DeepSpeed hands the optimizer: one flat slice for the weights that decay and one for the others."""
    decaying, others = (
        sum(weight.numel for weight in model.trained if (len(weight.shape) >= 2) == decays) for decays in (True, False)
    )
    return [Parameter((_share(numel, gpus),), itemsize) for numel in (decaying, others) if numel]


def _fsdp(request: Request, model: Statics) -> Placement:
    choices, gpus = request.choices, request.choices.gpus
    # Shards are kept, and gradients made, in the dtype the weights were loaded in: fp32 under autocast's words.
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
    # Outside the layers accelerate makes a unit of the last norm and the head, which stays gathered through forward and
    # backward, and one of the embeddings, which belong to the former where they are tied (fsdp2_prepare_model).
    # Beside it: in the forward a layer's weights, or what they were gathered into until the next layer's are; in the
    # backward a layer, what the next is gathered into, and a reduction's input (FSDPParamGroup: wait_for_unshard,
    # post_backward). Gathered and reduced weights and gradients are allocated on streams of their own.
    layer, outside = _layer_bytes(model), [weight for weight in model.weights if weight.layer is None]
    untied = any(weight.shape == model.head_shape and not weight.embedding for weight in outside)
    tail = sum(weight.nbytes for weight in outside if not (untied and weight.embedding))
    gathered = tail + layer if choices.reshard else model.weight_bytes
    # Below the first weight that learns nothing is gathered for a backward pass: heads on a frozen model have none.
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
