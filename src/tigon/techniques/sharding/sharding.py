"""Several GPUs, and offload of states: DDP, FSDP2, DeepSpeed ZeRO (arXiv 1910.02054, 2101.06840, 2104.07857).

This file computes configurations from the model, and marks its layers. The engines are DeepSpeed's and PyTorch's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tigon._trunk import decoder_layers
from tigon.errors import RecipeError
from tigon.techniques.condition import Condition, Exclusion, Switch
from tigon.techniques.keys.settings import Settings
from tigon.techniques.precision import format_of
from tigon.techniques.technique import Declaration, RunInfo, Search, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU_ZERO_PROCESSES = 1  # Accelerate 1.15 lacks a backend for more on the CPU
AIO_BLOCK_BYTES = 2**20  # smaller parameters are not swapped
AIO_THREADS = 8  # threads per read or write; each takes a share of the bytes
AIO_ALIGNED_BYTES = 1024  # a thread's share is a multiple of this
ADAM_TENSORS = 4  # DeepSpeed's optimizer swapper holds weight, gradient and two moments at a time
# Larger layers are gathered weight by weight. It is DeepSpeed's own default for its buckets, and half of the gathered
# weights that it keeps at a time (stage3_max_live_parameters).
LARGEST_LAYER = 500_000_000


def deepspeed_config(settings: Settings, run_info: RunInfo) -> dict[str, Any]:
    """Returns the whole DeepSpeed configuration. Sizes are numbers of elements, as DeepSpeed expects.

    Bucket sizes follow from the hidden size, like those of transformers' `auto`, so that small models get small ones.
    If stage 3 gathers whole layers, its buckets hold one.
    """
    square = max(run_info.hidden_size**2, 2**16)
    whole_layers = gathers_layers(settings, run_info)
    bucket = max(square, run_info.largest_layer()) if whole_layers else square
    zero: dict[str, Any] = {
        "stage": settings.sharding.zero,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": square,
    }
    if settings.sharding.zero == 3:
        zero |= {
            "stage3_prefetch_bucket_size": bucket if whole_layers else square * 9 // 10,
            "stage3_param_persistence_threshold": 10 * run_info.hidden_size,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    zero |= _offloads(settings, run_info) | zero_plus_plus(settings)
    pure = settings.train.precision == "bf16"
    config: dict[str, Any] = {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # any torch.optim.Optimizer; excluded ones are refused earlier
        "bf16": {"enabled": settings.train.precision in ("amp-bf16", "bf16")},
        "fp16": {"enabled": settings.train.precision == "amp-fp16"},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    if pure:
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if settings.sharding.offload == "nvme":
        config["aio"] = {
            "block_size": AIO_BLOCK_BYTES,
            "queue_depth": 32,
            "intra_op_parallelism": AIO_THREADS,
            "overlap_events": True,
        }
    return config


def gathers_layers(settings: Settings, run_info: RunInfo) -> bool:
    """Returns whether stage 3 gathers and reduces the weights of a layer together, instead of one by one.

    DeepSpeed then has hooks on layers, not on each of their modules, which takes most of its host time away. Its hook
    for gradients runs when a layer's backward pass ends. So each layer has to run once, with trained weights in front
    of it: adapters, heads and post-training keep the hooks on each module. Offload keeps them because its buffers are
    counted by weights.
    """
    return (
        settings.sharding.zero == 3
        and run_info.processes > 1
        and run_info.runs_layers_once
        and settings.sharding.offload == "none"
        and settings.lora.rank is None
        and not zero_plus_plus(settings)
        and 0 < run_info.largest_layer() <= LARGEST_LAYER
    )


def _mark_layers(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    """Let DeepSpeed see each decoder layer as one module, if `gathers_layers` says so."""
    layers = decoder_layers(model)
    weights = [weight for layer in layers for weight in layer.parameters()]
    if gathers_layers(settings, run_info) and len(weights) == len(set(weights)):  # layers may share weights
        from deepspeed.utils import set_z3_leaf_module

        for layer in layers:
            set_z3_leaf_module(layer, True)
            _check_first_input(layer)
    return model


def _check_first_input(layer: Any) -> None:
    """Let a layer's first training call raise RecipeError if no input passes gradients on.

    DeepSpeed's hook would then run before the gradients of the layer's weights exist, and take zeros for them.
    """

    def check(module: Any, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
            raise RecipeError(
                f"sharding.zero: 3 gathers whole layers, and a {type(module).__name__} of this model gets no input "
                "with a gradient, as if the weights before it were frozen; use sharding.fsdp: true, or sharding.zero: 2"
            )

    handle = layer.register_forward_pre_hook(check)


def zero_plus_plus(settings: Settings) -> dict[str, Any]:
    """Returns the keys of ZeRO++ (arXiv 2306.10209) in DeepSpeed's configuration."""
    keys: dict[str, Any] = {}
    if settings.sharding.zero_copy_ranks > 1:
        keys["zero_hpz_partition_size"] = settings.sharding.zero_copy_ranks
    if settings.sharding.zero_int8_weights:
        keys["zero_quantized_weights"] = True
    if settings.sharding.zero_int4_gradients:
        keys["zero_quantized_gradients"] = True
    return keys


def _offloads(settings: Settings, run_info: RunInfo) -> dict[str, Any]:
    if settings.sharding.offload == "none":
        return {}
    place: dict[str, Any] = {"device": settings.sharding.offload, "pin_memory": run_info.device == "cuda"}
    optimizer, weights = dict(place), dict(place)
    extra: dict[str, Any] = {}
    if settings.sharding.offload == "nvme":
        optimizer |= {"nvme_path": settings.sharding.nvme_folder, "buffer_count": ADAM_TENSORS}
        weights |= {"nvme_path": settings.sharding.nvme_folder, "max_in_cpu": 0, **nvme_buffers(settings, run_info)}
        # The optimizer's buffers hold a sub-group. DeepSpeed's default of 1e9 elements would take 16 GB of pinned
        # memory. Weights that are used again within its default reuse distance of 1e9 elements would stay in their
        # buffers, until no buffer is left.
        extra |= {"sub_group_size": nvme_group_size(run_info), "stage3_max_reuse_distance": 0}
    return {
        "offload_optimizer": optimizer,
        **({"offload_param": weights} if settings.sharding.zero == 3 else {}),
        **extra,
    }


def nvme_group_size(run_info: RunInfo) -> int:
    """Returns the number of elements that the optimizer reads from files and updates at a time."""
    return max(10**8, run_info.largest())


def nvme_buffers(settings: Settings, run_info: RunInfo) -> dict[str, int]:
    """Returns size and number of the buffers for swapped weights.

    Each is as large as the largest partition, and there are as many as can be in use at a time. DeepSpeed 0.19.8 fails
    at the first layer if there are fewer buffers than the layer's parameters and those it prefetches. It also fails if
    a buffer is smaller than the largest parameter (default 1e8 elements; Llama-3.2-1B's embedding has 262.7e6).
    """
    itemsize = format_of(settings).products.itemsize

    def swapped(numels: list[int]) -> int:
        return sum(math.ceil(n / run_info.processes) * itemsize >= AIO_BLOCK_BYTES for n in numels)

    layers = run_info.by_layer()
    outside = swapped(layers.pop("", []))
    most = max((swapped(numels) for numels in layers.values()), default=0)
    partition = math.ceil(run_info.largest() / run_info.processes)
    share = AIO_THREADS * AIO_ALIGNED_BYTES // itemsize
    return {"buffer_size": math.ceil(partition / share) * share, "buffer_count": max(5, 2 * most + outside + 1)}


def _zero(settings: Settings, run_info: RunInfo) -> Mapping[str, Any]:
    return {"deepspeed": deepspeed_config(settings, run_info)}


def name_present_layers(model: PreTrainedModel) -> None:
    """Leave the classes out of the model's `_no_split_modules` that it has no module of.

    FSDP2 wraps these classes, and Accelerate refuses one that it does not find. LLaVA names those of every tower.
    """
    present = {type(module).__name__ for module in model.modules()}
    names = getattr(model, "_no_split_modules", None)
    if names is not None:
        model._no_split_modules = [name for name in names if name in present]


def are_drawn_in_place(settings: Settings) -> bool:
    """Returns whether a preset's random weights are drawn on their device.

    Otherwise they are written to files first: to be quantised while they are read, or to be read a second time when
    adapters are merged.
    """
    return not settings.lora.quantize and not (settings.sharding.divides_weights and settings.lora.rank is not None)


def fit_whole(weights_bytes: Iterable[int], room_bytes: int | None) -> bool:
    """Returns whether all weights fit the GPU at one time while they are drawn; otherwise the host holds them until
    they are divided.

    A head that is not tied to its embedding yet counts too. room_bytes: None for no limit.
    """
    sizes = list(weights_bytes)
    return room_bytes is None or sum(sizes) + max(sizes) <= room_bytes


def are_read_in_parts(settings: Settings, *, reads_whole_weights: bool) -> bool:
    """Returns whether files are read directly into stage 3's partitions.

    Adapters and some objectives need whole weights, and DeepSpeed needs one dtype for all partitioned weights. With
    them it first moves the model to the GPU in 16 bits.
    """
    return (
        settings.sharding.zero == 3
        and settings.lora.rank is None
        and not settings.lora.quantize
        and not reads_whole_weights
    )


@contextlib.contextmanager
def partitioned_loading(settings: Settings, run_info: RunInfo) -> Iterator[None]:
    """Context in which from_pretrained reads weights into stage 3's partitions, with one whole weight at a time on the
    GPU.

    The host may hold all weights in each process, because transformers merges the files first. transformers looks for
    a live configuration. Its numbers have to be set here, because the Trainer fills them in later. DeepSpeed checks
    them against the number of processes, which it takes for one until its own communication has started.
    """
    from deepspeed import init_distributed
    from transformers.integrations import HfDeepSpeedConfig

    init_distributed(auto_mpi_discovery=False)
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    alive = HfDeepSpeedConfig({**deepspeed_config(settings, run_info), **batch, "train_batch_size": run_info.processes})
    try:
        yield
    finally:
        del alive


def shard_ranks(settings: Settings) -> int:
    """Returns the number of processes that hold one whole copy of the states between them, under FSDP2."""
    return settings.sharding.gpus // settings.sharding.replicas


def _check_machine(settings: Settings, device: torch.device) -> None:
    check_sizes(settings)
    too_many = settings.sharding.gpus > CPU_ZERO_PROCESSES or settings.train.precision != "fp32"
    if device.type == "cpu" and settings.sharding.zero and too_many:
        raise RecipeError(
            "sharding.zero on the CPU supports one process in fp32 only, because of Accelerate; use GPUs, or leave "
            "sharding.zero out"
        )


def check_sizes(settings: Settings) -> None:
    """Raise RecipeError if the copies of `sharding.replicas` or `sharding.zero_copy_ranks` do not divide the GPUs."""
    size, gpus, copy_ranks = settings.sharding.replicas, settings.sharding.gpus, settings.sharding.zero_copy_ranks
    if gpus % copy_ranks:
        raise RecipeError(
            f"sharding.zero_copy_ranks is {copy_ranks}, and sharding.gpus {gpus} is not a multiple of it; set it to a "
            f"divisor of {gpus}"
        )
    if size > 1 and (gpus % size or gpus < 2 * size):
        raise RecipeError(
            f"sharding.replicas is {size}, and each copy needs the same number of at least 2 GPUs, but sharding.gpus "
            f"is {gpus} in all; set sharding.replicas to a divisor of {gpus} below it"
            + ("" if gpus > 3 else ", which needs at least 4 GPUs")
        )


def _fsdp(settings: Settings, run_info: RunInfo) -> Mapping[str, Any]:
    return {
        **_mesh(settings),
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": settings.sharding.reshard,
            "cpu_offload": settings.sharding.offload == "cpu",
            "state_dict_type": "FULL_STATE_DICT",
        },
    }


def _mesh(settings: Settings) -> Mapping[str, Any]:
    """The argument that says which processes shard and which hold copies. By default all of them shard."""
    if settings.sharding.replicas == 1:
        return {}
    from accelerate import ParallelismConfig

    config = ParallelismConfig(dp_replicate_size=settings.sharding.replicas, dp_shard_size=shard_ranks(settings))
    return {"parallelism_config": config}


PLACEMENTS: tuple[Mapping[str, Any], ...] = (
    {"sharding.zero": 0, "sharding.fsdp": False, "sharding.offload": "none"},
    {"sharding.zero": 2, "sharding.fsdp": False, "sharding.offload": "none"},
    {"sharding.zero": 3, "sharding.fsdp": False, "sharding.offload": "none"},
    {"sharding.zero": 0, "sharding.fsdp": True, "sharding.offload": "none"},
    {"sharding.zero": 2, "sharding.fsdp": False, "sharding.offload": "cpu"},
    {"sharding.zero": 3, "sharding.fsdp": False, "sharding.offload": "cpu"},
    {"sharding.zero": 0, "sharding.fsdp": True, "sharding.offload": "cpu"},
    {"sharding.zero": 3, "sharding.fsdp": False, "sharding.offload": "nvme"},
)
"""The placements of weights and states that the planner tries, least traffic first."""

_LABELS: Mapping[str, str] = {
    "sharding.zero": "ZeRO-{}",
    "sharding.zero_copy_ranks": "hpZ {}",
    "sharding.zero_int8_weights": "qwZ",
    "sharding.zero_int4_gradients": "qgZ",
    "sharding.fsdp": "FSDP2",
    "sharding.replicas": "{} copies",
    "sharding.offload": "offload {}",
}

# DeepSpeed compiles its CPU Adam at the first use (op_builder/cpu_adam.py, async_io.py).
_CPU_ADAM_TOOLS = ("a C++ compiler", "nvcc if there is a GPU")
_CPU, _NVME = (Condition("sharding.offload", "is", place) for place in ("cpu", "nvme"))
_ZERO, _OFFLOADED = Condition("sharding.zero", "is at least", 1), Condition("sharding.offload", "is not", "none")
_ZERO_PLUS_PLUS = (
    Condition("sharding.zero_copy_ranks", "is at least", 2),
    Condition("sharding.zero_int8_weights", "is", True),
    Condition("sharding.zero_int4_gradients", "is", True),
)
_ZERO_EFFECT_ON_RESULT = (
    "With `amp-bf16`, weights are bf16 with an fp32 copy in the optimizer: norms run in bf16 too, unlike under "
    "autocast."
)


def _stage(stage: int, saves: str, costs: str) -> Technique:
    return Technique(
        name=f"zero-{stage}",
        effect_on_result=_ZERO_EFFECT_ON_RESULT,
        needs=("deepspeed",),
        recipe={"sharding.gpus": 2, "sharding.zero": stage},
        chosen=(Condition("sharding.zero", "is", stage),),
        arguments=_zero,
        model=_mark_layers,
        change_rank=1,
    )


_TECHNIQUES = (
    Technique(
        name="ddp",
        recipe={"sharding.gpus": 2},
        chosen=(
            Condition("sharding.gpus", "is at least", 2),
            Condition("sharding.zero", "is", 0),
            Condition("sharding.fsdp", "is", False),
        ),
    ),
    _stage(
        1, "Optimizer states, divided by the GPUs.", "Weights are gathered once per step: little more traffic than DDP."
    ),
    _stage(2, "Optimizer states and gradients, divided by the GPUs.", "As stage 1."),
    _stage(
        3,
        "Weights too, divided by the GPUs. A layer's weights are gathered for its forward and its backward pass.",
        "1.5 times the traffic of DDP, because the weights are gathered twice.",
    ),
    Technique(
        name="zero-3-hpz",
        needs=("deepspeed",),
        recipe={"sharding.gpus": 4, "sharding.zero": 3, "sharding.zero_copy_ranks": 2},
        chosen=(Condition("sharding.zero", "is", 3), Condition("sharding.zero_copy_ranks", "is at least", 2)),
    ),
    Technique(
        name="zero-3-int8-weights",
        effect_on_result="Gathered weights have about 8 bits of precision. No GPU has run it with tigon yet.",
        needs=("deepspeed",),
        devices=("cuda",),
        recipe={"sharding.gpus": 2, "sharding.zero": 3, "sharding.zero_int8_weights": True},
        chosen=(Condition("sharding.zero", "is", 3), Condition("sharding.zero_int8_weights", "is", True)),
        change_rank=1,
    ),
    Technique(
        name="zero-3-int4-gradients",
        effect_on_result="Gradients are rounded to 4 bits twice. No GPU has run it with tigon yet.",
        needs=("deepspeed",),
        devices=("cuda",),
        recipe={"sharding.gpus": 2, "sharding.zero": 3, "sharding.zero_int4_gradients": True},
        chosen=(Condition("sharding.zero", "is", 3), Condition("sharding.zero_int4_gradients", "is", True)),
        change_rank=1,
    ),
    Technique(
        name="zero-offload-cpu",
        needs=("deepspeed",),
        recipe={"sharding.zero": 2, "sharding.offload": "cpu"},
        chosen=(_ZERO, _CPU),
        rough_time=True,
    ),
    Technique(
        name="zero-offload-nvme",
        needs=("deepspeed",),
        recipe={"sharding.zero": 3, "sharding.offload": "nvme", "sharding.nvme_folder": "nvme"},
        chosen=(Condition("sharding.zero", "is", 3), _NVME),
        rough_time=True,
    ),
    Technique(
        name="fsdp2",
        devices=("cuda",),
        recipe={"sharding.gpus": 2, "sharding.fsdp": True},
        chosen=(Condition("sharding.fsdp", "is", True),),
        arguments=_fsdp,
    ),
    Technique(
        name="fsdp2-hybrid",
        devices=("cuda",),
        recipe={"sharding.gpus": 4, "sharding.fsdp": True, "sharding.replicas": 2},
        chosen=(Condition("sharding.fsdp", "is", True), Condition("sharding.replicas", "is at least", 2)),
    ),
    Technique(
        name="fsdp2-offload",
        devices=("cuda",),
        recipe={"sharding.gpus": 2, "sharding.fsdp": True, "sharding.offload": "cpu"},
        chosen=(Condition("sharding.fsdp", "is", True), _CPU),
        rough_time=True,
    ),
)

_EXCLUSIONS = (
    Exclusion(
        when=(_ZERO, _OFFLOADED, Condition("train.optimizer", "is not one of", ("adamw", "adamw-foreach"))),
        reason="with offload, Accelerate and DeepSpeed replace every optimizer by DeepSpeedCPUAdam, which has fp32 "
        "states and, unless AdamW was asked for, L2 regularisation instead of decoupled weight decay",
        instead="train.optimizer: adamw, or sharding.offload: none",
        source="accelerate 1.15 utils/deepspeed.py: map_pytorch_optim_to_deepspeed",
    ),
    Exclusion(
        when=(_ZERO, _OFFLOADED, Condition("train.precision", "is", "bf16")),
        reason="bf16 states on the host need a DeepSpeedCPUAdam made for bf16, and Accelerate makes it for fp32, so "
        "DeepSpeed refuses it",
        instead="train.precision: amp-bf16, or sharding.offload: none",
        source="deepspeed 0.19.8 runtime/base_optimizer.py: _configure_master_weights",
    ),
    *(
        Exclusion(
            when=(used, condition),
            reason="tigon has not tried ZeRO++ with it",
            instead=instead,
            source="tigon.techniques.sharding",
        )
        for used in _ZERO_PLUS_PLUS
        for condition, instead in (
            (_OFFLOADED, "sharding.offload: none"),
            (Condition("lora.rank", "is at least", 1), "lora.rank: null"),
        )
    ),
    Exclusion(
        when=(Condition("sharding.fsdp", "is", True), _ZERO),
        reason="both partition the same states",
        instead="one of sharding.fsdp and sharding.zero",
        source="transformers 5.17 training_args.py",
    ),
    Exclusion(
        when=(Condition("sharding.replicas", "is at least", 2), Condition("sharding.fsdp", "is", False)),
        reason="FSDP2 shards the copies",
        instead="sharding.fsdp: true",
        source="torch.distributed.fsdp.fully_shard",
    ),
    *(
        Exclusion(
            when=(used, Condition("sharding.zero", "is not", 3)),
            reason="ZeRO++ is part of stage 3",
            instead="sharding.zero: 3",
            source="arXiv 2306.10209",
        )
        for used in _ZERO_PLUS_PLUS
    ),
    Exclusion(
        when=(_OFFLOADED, Condition("sharding.zero", "is", 0), Condition("sharding.fsdp", "is", False)),
        reason="offload moves the states that ZeRO or FSDP2 manage, and neither is on",
        instead="sharding.zero: 2 (states) or 3 (weights too), or train.checkpointing: offload for activations",
        source="deepspeed.ai/docs/config-json; torch.distributed.fsdp.CPUOffloadPolicy",
    ),
    Exclusion(
        when=(_NVME, Condition("sharding.zero", "is not", 3)),
        reason="only DeepSpeed's stage 3 swaps to files",
        instead="sharding.zero: 3, or sharding.offload: cpu",
        source="deepspeed.ai/docs/config-json, offload_optimizer and offload_param",
    ),
    Exclusion(
        when=(_NVME, Condition("sharding.nvme_folder", "is", None)),
        reason="the states need a folder on a fast local disk",
        instead="sharding.nvme_folder: FOLDER too",
        source="deepspeed.ai/docs/config-json",
    ),
    Exclusion(
        when=(Condition("sharding.offload", "is not", "nvme"), Condition("sharding.nvme_folder", "is not", None)),
        reason="no files go into that folder",
        instead="sharding.offload: nvme, or leave sharding.nvme_folder out",
        source="deepspeed.ai/docs/config-json",
    ),
)

DECLARATION = Declaration(
    machine=_check_machine,
    searches=tuple(Search(key=key, how="placement") for key in PLACEMENTS[0]),
    labels=_LABELS,
    techniques=_TECHNIQUES,
    exclusions=_EXCLUSIONS,
    switches=(
        Switch(
            ("sharding.reshard", "sharding.replicas"),
            "sharding.fsdp",
            lambda settings: settings.sharding.fsdp,
            "sharding.fsdp: true",
        ),
        Switch(
            ("sharding.zero_copy_ranks", "sharding.zero_int8_weights", "sharding.zero_int4_gradients"),
            "sharding.zero",
            Condition("sharding.zero", "is", 3).holds,
            "sharding.zero: 3",
        ),
    ),
)
