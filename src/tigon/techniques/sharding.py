"""Several GPUs, and offload of states: DDP, FSDP2, DeepSpeed ZeRO (arXiv 1910.02054, 2101.06840, 2104.07857).

This file computes configurations from the model, and marks its layers. The engines are DeepSpeed's and PyTorch's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tigon._trunk import decoder_layers
from tigon.errors import RecipeError
from tigon.techniques.records.choices import Choices
from tigon.techniques.records.condition import Condition, Exclusion, KeyExclusion, KeySwitch
from tigon.techniques.records.setting import Flag, Setting
from tigon.techniques.records.technique import Declaration, RunInfo, Technique

AIO_BLOCK_BYTES = 2**20  # smaller parameters are not swapped
AIO_THREADS = 8  # threads per read or write; each takes a share of the bytes
AIO_ALIGNED_BYTES = 1024  # a thread's share is a multiple of this
ADAM_TENSORS = 4  # DeepSpeed's optimizer swapper holds weight, gradient and two moments at a time
# Larger layers are gathered weight by weight. It is DeepSpeed's own default for its buckets, and half of the gathered
# weights that it keeps at a time (stage3_max_live_parameters).
LARGEST_LAYER = 500_000_000


def deepspeed_config(choices: Choices, run_info: RunInfo) -> dict[str, Any]:
    """Returns the whole DeepSpeed configuration. Sizes are numbers of elements, as DeepSpeed expects.

    Bucket sizes follow from the hidden size, like those of transformers' `auto`, so that small models get small ones.
    If stage 3 gathers whole layers, its buckets hold one.
    """
    square = max(run_info.hidden_size**2, 2**16)
    whole_layers = gathers_layers(choices, run_info)
    bucket = max(square, run_info.largest_layer()) if whole_layers else square
    zero: dict[str, Any] = {
        "stage": choices.zero,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": square,
    }
    if choices.zero == 3:
        zero |= {
            "stage3_prefetch_bucket_size": bucket if whole_layers else square * 9 // 10,
            "stage3_param_persistence_threshold": 10 * run_info.hidden_size,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    zero |= _offloads(choices, run_info) | zero_plus_plus(choices)
    pure = choices.precision == "bf16"
    config: dict[str, Any] = {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # any torch.optim.Optimizer; excluded ones are refused earlier
        "bf16": {"enabled": choices.precision in ("amp-bf16", "bf16")},
        "fp16": {"enabled": choices.precision == "amp-fp16"},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    if pure:
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if choices.offload == "nvme":
        config["aio"] = {
            "block_size": AIO_BLOCK_BYTES,
            "queue_depth": 32,
            "intra_op_parallelism": AIO_THREADS,
            "overlap_events": True,
        }
    return config


def gathers_layers(choices: Choices, run_info: RunInfo) -> bool:
    """Returns whether stage 3 gathers and reduces the weights of a layer together, instead of one by one.

    DeepSpeed then has hooks on layers, not on each of their modules, which takes most of its host time away. Its hook
    for gradients runs when a layer's backward pass ends. So each layer has to run once, with trained weights in front
    of it: adapters, heads and post-training keep the hooks on each module. Offload keeps them because its buffers are
    counted by weights.
    """
    return (
        choices.zero == 3 and run_info.processes > 1 and run_info.runs_layers_once
        and choices.offload == "none" and choices.lora_rank is None and not zero_plus_plus(choices)
        and 0 < run_info.largest_layer() <= LARGEST_LAYER
    )  # fmt: skip


def _mark_layers(model: Any, choices: Choices, run_info: RunInfo) -> Any:
    """Let DeepSpeed see each decoder layer as one module, if `gathers_layers` says so."""
    layers = decoder_layers(model)
    weights = [weight for layer in layers for weight in layer.parameters()]
    if gathers_layers(choices, run_info) and len(weights) == len(set(weights)):  # layers may share weights
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


def zero_plus_plus(choices: Choices) -> dict[str, Any]:
    """Returns the keys of ZeRO++ (arXiv 2306.10209) in DeepSpeed's configuration."""
    keys: dict[str, Any] = {}
    if choices.zero_copy_ranks > 1:
        keys["zero_hpz_partition_size"] = choices.zero_copy_ranks
    if choices.zero_int8_weights:
        keys["zero_quantized_weights"] = True
    if choices.zero_int4_gradients:
        keys["zero_quantized_gradients"] = True
    return keys


def _offloads(choices: Choices, run_info: RunInfo) -> dict[str, Any]:
    if choices.offload == "none":
        return {}
    place: dict[str, Any] = {"device": choices.offload, "pin_memory": run_info.device == "cuda"}
    optimizer, weights = dict(place), dict(place)
    extra: dict[str, Any] = {}
    if choices.offload == "nvme":
        optimizer |= {"nvme_path": run_info.nvme_folder, "buffer_count": ADAM_TENSORS}
        weights |= {"nvme_path": run_info.nvme_folder, "max_in_cpu": 0, **nvme_buffers(choices, run_info)}
        # The optimizer's buffers hold a sub-group. DeepSpeed's default of 1e9 elements would take 16 GB of pinned
        # memory. Weights that are used again within its default reuse distance of 1e9 elements would stay in their
        # buffers, until no buffer is left.
        extra |= {"sub_group_size": nvme_group_size(run_info), "stage3_max_reuse_distance": 0}
    return {"offload_optimizer": optimizer, **({"offload_param": weights} if choices.zero == 3 else {}), **extra}


def nvme_group_size(run_info: RunInfo) -> int:
    """Returns the number of elements that the optimizer reads from files and updates at a time."""
    return max(10**8, run_info.largest())


def nvme_buffers(choices: Choices, run_info: RunInfo) -> dict[str, int]:
    """Returns size and number of the buffers for swapped weights.

    Each is as large as the largest partition, and there are as many as can be in use at a time. DeepSpeed 0.19.8 fails
    at the first layer if there are fewer buffers than the layer's parameters and those it prefetches. It also fails if
    a buffer is smaller than the largest parameter (default 1e8 elements; Llama-3.2-1B's embedding has 262.7e6).
    """
    itemsize = 4 if choices.precision == "fp32" else 2

    def swapped(numels: list[int]) -> int:
        return sum(math.ceil(n / run_info.processes) * itemsize >= AIO_BLOCK_BYTES for n in numels)

    layers = run_info.by_layer()
    outside = swapped(layers.pop("", []))
    most = max((swapped(numels) for numels in layers.values()), default=0)
    partition = math.ceil(run_info.largest() / run_info.processes)
    share = AIO_THREADS * AIO_ALIGNED_BYTES // itemsize
    return {"buffer_size": math.ceil(partition / share) * share, "buffer_count": max(5, 2 * most + outside + 1)}


def _zero(choices: Choices, run_info: RunInfo) -> Mapping[str, Any]:
    return {"deepspeed": deepspeed_config(choices, run_info)}


def name_present_layers(model: Any) -> None:
    """Leave the classes out of the model's `_no_split_modules` that it has no module of.

    FSDP2 wraps these classes, and Accelerate refuses one that it does not find. LLaVA names those of every tower.
    """
    present = {type(module).__name__ for module in model.modules()}
    names = getattr(model, "_no_split_modules", None)
    if names is not None:
        model._no_split_modules = [name for name in names if name in present]


def weights_are_sharded(choices: Choices) -> bool:
    """Returns whether a process holds only a part of the weights between steps."""
    return choices.zero == 3 or choices.fsdp


def are_drawn_in_place(choices: Choices) -> bool:
    """Returns whether a preset's random weights are drawn on their device.

    Otherwise they are written to files first: to be quantised while they are read, or to be read a second time when
    adapters are merged.
    """
    return not choices.quantized and not (weights_are_sharded(choices) and choices.lora_rank is not None)


def fit_whole(weights_bytes: Iterable[int], room_bytes: int | None) -> bool:
    """Returns whether all weights fit the GPU at one time while they are drawn; otherwise the host holds them until
    they are divided.

    A head that is not tied to its embedding yet counts too. room_bytes: None for no limit.
    """
    sizes = list(weights_bytes)
    return room_bytes is None or sum(sizes) + max(sizes) <= room_bytes


def are_read_in_parts(choices: Choices, *, reads_whole_weights: bool) -> bool:
    """Returns whether files are read directly into stage 3's partitions.

    Adapters and some objectives need whole weights, and DeepSpeed needs one dtype for all partitioned weights. With
    them it first moves the model to the GPU in 16 bits.
    """
    return choices.zero == 3 and choices.lora_rank is None and not choices.quantized and not reads_whole_weights


@contextlib.contextmanager
def partitioned_loading(choices: Choices, run_info: RunInfo) -> Iterator[None]:
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
    alive = HfDeepSpeedConfig({**deepspeed_config(choices, run_info), **batch, "train_batch_size": run_info.processes})
    try:
        yield
    finally:
        del alive


def shard_ranks(choices: Choices) -> int:
    """Returns the number of processes that hold one whole copy of the states between them, under FSDP2."""
    return choices.gpus // choices.replicas


def check_sizes(choices: Choices) -> None:
    """Raise RecipeError if the copies of `sharding.replicas` or `sharding.zero_copy_ranks` do not divide the GPUs."""
    if choices.gpus % choices.zero_copy_ranks:
        raise RecipeError(
            f"sharding.zero_copy_ranks is {choices.zero_copy_ranks}, and sharding.gpus {choices.gpus} is not a "
            f"multiple of it; set it to a divisor of {choices.gpus}"
        )
    size, gpus = choices.replicas, choices.gpus
    if size > 1 and (gpus % size or gpus < 2 * size):
        raise RecipeError(
            f"sharding.replicas is {size}, and each copy needs the same number of at least 2 GPUs, but sharding.gpus "
            f"is {gpus} in all; set sharding.replicas to a divisor of {gpus} below it"
            + ("" if gpus > 3 else ", which needs at least 4 GPUs")
        )


def _fsdp(choices: Choices, run_info: RunInfo) -> Mapping[str, Any]:
    return {
        **_mesh(choices),
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": choices.reshard,
            "cpu_offload": choices.offload == "cpu",
            "state_dict_type": "FULL_STATE_DICT",
        },
    }


def _mesh(choices: Choices) -> Mapping[str, Any]:
    """The argument that says which processes shard and which hold copies. By default all of them shard."""
    if choices.replicas == 1:
        return {}
    from accelerate import ParallelismConfig

    config = ParallelismConfig(dp_replicate_size=choices.replicas, dp_shard_size=shard_ranks(choices))
    return {"parallelism_config": config}


PLACEMENTS: tuple[Mapping[str, Any], ...] = (
    {"zero": 0, "fsdp": False, "offload": "none"},
    {"zero": 2, "fsdp": False, "offload": "none"},
    {"zero": 3, "fsdp": False, "offload": "none"},
    {"zero": 0, "fsdp": True, "offload": "none"},
    {"zero": 2, "fsdp": False, "offload": "cpu"},
    {"zero": 3, "fsdp": False, "offload": "cpu"},
    {"zero": 0, "fsdp": True, "offload": "cpu"},
    {"zero": 3, "fsdp": False, "offload": "nvme"},
)
"""The placements of weights and states that the planner tries, least traffic first."""

_SETTINGS = (
    Setting(
        field="gpus", key="sharding.gpus",
        help="Processes, one per GPU; also `--gpus`. Without a GPU they run on the CPU.", minimum=1, maximum=64,
        flag=Flag(name="gpus", help="Number of GPUs."),
    ),
    Setting(
        field="zero", key="sharding.zero",
        help="DeepSpeed ZeRO stage: 1 partitions the optimizer states over the GPUs, 2 also the gradients, 3 also the "
        "weights.",
        minimum=0, maximum=3, flag=Flag(name="zero", help="DeepSpeed ZeRO stage: 0, 1, 2 or 3."), search="placement",
        label=lambda choices: f"ZeRO-{choices.zero}" if choices.zero else "",
    ),
    Setting(
        field="fsdp", key="sharding.fsdp",
        help="PyTorch FSDP2: shard weights, gradients and optimizer states over the GPUs.",
        flag=Flag(name="fsdp", help="PyTorch FSDP2."), search="placement",
        label=lambda choices: "FSDP2" if choices.fsdp else "",
    ),
    Setting(
        field="replicas", key="sharding.replicas",
        help="FSDP2: copies of the sharded states (hybrid sharding). Each is divided over `gpus` / `replicas` "
        "consecutive processes; with as many copies as machines, weights are gathered within each machine.",
        minimum=1, maximum=1024,
        label=lambda choices: f"{choices.replicas} copies" if choices.replicas > 1 else "",
    ),
    Setting(
        field="reshard", key="sharding.reshard", help="FSDP2: free a layer's gathered weights after its forward pass.",
    ),
    Setting(
        field="zero_copy_ranks", key="sharding.zero_copy_ranks",
        help="ZeRO++ (hpZ): this many consecutive processes, such as those of one machine, keep a second copy of the "
        "16-bit weights between them, and the backward pass gathers from it. Requires `zero: 3`.",
        minimum=1, maximum=64,
        label=lambda choices: f"hpZ {choices.zero_copy_ranks}" if choices.zero_copy_ranks > 1 else "",
    ),
    Setting(
        field="zero_int8_weights", key="sharding.zero_int8_weights",
        help="ZeRO++ (qwZ): gather weights as 8-bit integers. Requires `zero: 3` and a GPU; no GPU has run it yet.",
        label=lambda choices: "qwZ" if choices.zero_int8_weights else "",
    ),
    Setting(
        field="zero_int4_gradients", key="sharding.zero_int4_gradients",
        help="ZeRO++ (qgZ): reduce gradients as 4-bit integers between machines. Requires `zero: 3` and a GPU; no GPU "
        "has run it yet.",
        label=lambda choices: "qgZ" if choices.zero_int4_gradients else "",
    ),
    Setting(
        field="offload", key="sharding.offload",
        help="Offload partitioned states: `cpu`: optimizer states to host memory, and with `zero: 3` or `fsdp` the "
        "weights too; `nvme`: both to files, requires `zero: 3`.",
        words=("none", "cpu", "nvme"), flag=Flag(name="offload", help="none, cpu or nvme."), search="placement",
        label=lambda choices: f"offload {choices.offload}" if choices.offload != "none" else "",
    ),
)  # fmt: skip

# DeepSpeed compiles its CPU Adam at the first use (op_builder/cpu_adam.py, async_io.py).
_CPU_ADAM_TOOLS = ("a C++ compiler", "nvcc if there is a GPU")
_CPU, _NVME = (Condition("offload", "is", place) for place in ("cpu", "nvme"))
_ZERO, _OFFLOADED = Condition("zero", "is at least", 1), Condition("offload", "is not", "none")
_ZERO_PLUS_PLUS = (
    Condition("zero_copy_ranks", "is at least", 2), Condition("zero_int8_weights", "is", True),
    Condition("zero_int4_gradients", "is", True),
)  # fmt: skip
_ZERO_EFFECT_ON_RESULT = (
    "With `amp-bf16`, weights are bf16 with an fp32 copy in the optimizer: norms run in bf16 too, unlike under "
    "autocast."
)


def _stage(stage: int, saves: str, costs: str) -> Technique:
    return Technique(
        name=f"zero-{stage}", page="zero", saves=saves, costs=costs, effect_on_result=_ZERO_EFFECT_ON_RESULT,
        needs=("deepspeed",), recipe={"sharding.gpus": 2, "sharding.zero": stage},
        chosen=(Condition("zero", "is", stage),), arguments=_zero, model=_mark_layers, change_rank=1,
        source="DeepSpeed; arXiv 1910.02054 §5",
    )  # fmt: skip


_TECHNIQUES = (
    Technique(
        name="ddp", page="ddp",
        saves="Nothing: every GPU holds everything. It divides time.",
        costs="A sum of all gradients over the GPUs in each step, beside the backward pass.",
        effect_on_result="None for the same samples per step, except for rounding. N GPUs use N times as many samples "
        "per step as one GPU with the same recipe.",
        recipe={"sharding.gpus": 2},
        chosen=(
            Condition("gpus", "is at least", 2), Condition("zero", "is", 0), Condition("fsdp", "is", False),
        ),
        source="torch.nn.parallel.DistributedDataParallel",
    ),
    _stage(1, "Optimizer states, divided by the GPUs.",
           "Weights are gathered once per step: little more traffic than DDP."),
    _stage(2, "Optimizer states and gradients, divided by the GPUs.", "As stage 1."),
    _stage(3, "Weights too, divided by the GPUs. A layer's weights are gathered for its forward and its backward pass.",
           "1.5 times the traffic of DDP, because the weights are gathered twice."),
    Technique(
        name="zero-3-hpz", page="zero",
        saves="Traffic between machines: the backward pass gathers weights from a second copy, which the processes of "
        "one machine hold between them.",
        costs="2 / `sharding.zero_copy_ranks` bytes per parameter on each GPU.",
        effect_on_result=_ZERO_EFFECT_ON_RESULT, needs=("deepspeed",),
        recipe={"sharding.gpus": 4, "sharding.zero": 3, "sharding.zero_copy_ranks": 2},
        chosen=(Condition("zero", "is", 3), Condition("zero_copy_ranks", "is at least", 2)),
        source="DeepSpeed, zero_hpz_partition_size; arXiv 2306.10209",
    ),
    Technique(
        name="zero-3-int8-weights", page="zero",
        saves="Half of the traffic of gathered weights: they are sent as 8-bit integers with scales per block.",
        costs="Rounding of the weights in both passes, and kernels that convert them.", tools=("nvcc",),
        effect_on_result="Gathered weights have about 8 bits of precision. No GPU has run it with tigon yet.",
        needs=("deepspeed",), devices=("cuda",),
        recipe={"sharding.gpus": 2, "sharding.zero": 3, "sharding.zero_int8_weights": True},
        chosen=(Condition("zero", "is", 3), Condition("zero_int8_weights", "is", True)), change_rank=1,
        source="DeepSpeed, zero_quantized_weights; arXiv 2306.10209",
    ),
    Technique(
        name="zero-3-int4-gradients", page="zero",
        saves="Three quarters of the traffic of reduced gradients between machines: they are sent as 4-bit integers. "
        "On one machine it has no effect.",
        costs="Rounding of the gradients, and kernels that convert them.", tools=("nvcc",),
        effect_on_result="Gradients are rounded to 4 bits twice. No GPU has run it with tigon yet.",
        needs=("deepspeed",), devices=("cuda",),
        recipe={"sharding.gpus": 2, "sharding.zero": 3, "sharding.zero_int4_gradients": True},
        chosen=(Condition("zero", "is", 3), Condition("zero_int4_gradients", "is", True)), change_rank=1,
        source="DeepSpeed, zero_quantized_gradients; arXiv 2306.10209",
    ),
    Technique(
        name="zero-offload-cpu", page="offload",
        saves="12 bytes per parameter of the GPU's memory: the optimizer's states and their fp32 weights move to the "
        "host. With stage 3 the bf16 weights move too.",
        costs="AdamW runs on the CPU. In each step gradients are copied to the host and weights back.",
        effect_on_result="As ZeRO without offload. DeepSpeedCPUAdam makes the update, with fp32 states.",
        needs=("deepspeed",), tools=_CPU_ADAM_TOOLS,
        recipe={"sharding.zero": 2, "sharding.offload": "cpu"}, chosen=(_ZERO, _CPU), rough_time=True,
        source="arXiv 2101.06840",
    ),
    Technique(
        name="zero-offload-nvme", page="offload",
        saves="Weights and optimizer states move to files. The host keeps only buffers.",
        costs="Each step reads and writes 12 bytes per parameter at the speed of the disk. This wears an SSD.",
        effect_on_result="As ZeRO without offload. DeepSpeedCPUAdam makes the update, with fp32 states.",
        needs=("deepspeed",), tools=(*_CPU_ADAM_TOOLS, "libaio with its headers"),
        recipe={"sharding.zero": 3, "sharding.offload": "nvme", "sharding.nvme_folder": "nvme"},
        chosen=(Condition("zero", "is", 3), _NVME), rough_time=True, source="arXiv 2104.07857",
    ),
    Technique(
        name="fsdp2", page="fsdp2",
        saves="Weights, gradients and states, divided by the GPUs. `sharding.reshard: false` keeps a layer's gathered "
        "weights between its two passes.",
        costs="As ZeRO-3; without resharding as ZeRO-2.", devices=("cuda",),
        recipe={"sharding.gpus": 2, "sharding.fsdp": True},
        chosen=(Condition("fsdp", "is", True),), arguments=_fsdp,
        source="torch.distributed.fsdp.fully_shard; arXiv 2304.11277",
    ),
    Technique(
        name="fsdp2-hybrid", page="fsdp2",
        saves="As FSDP2 over `sharding.gpus` / `sharding.replicas` GPUs.",
        costs="Weights are gathered among the GPUs of one copy only. After that, gradients of each shard are summed "
        "over the copies: the only traffic between machines if each holds one copy.", devices=("cuda",),
        recipe={"sharding.gpus": 4, "sharding.fsdp": True, "sharding.replicas": 2},
        chosen=(Condition("fsdp", "is", True), Condition("replicas", "is at least", 2)),
        source="torch.distributed.fsdp.fully_shard on a mesh of two dimensions; arXiv 2304.11277 §3.2.2",
    ),
    Technique(
        name="fsdp2-offload", page="fsdp2",
        saves="FSDP2's weights, gradients and states stay on the host, and the optimizer runs there.",
        costs="Each layer's weights are copied to the GPU for each pass, and gradients to the host.", devices=("cuda",),
        recipe={"sharding.gpus": 2, "sharding.fsdp": True, "sharding.offload": "cpu"},
        chosen=(Condition("fsdp", "is", True), _CPU), rough_time=True, source="torch.distributed.fsdp.CPUOffloadPolicy",
    ),
)  # fmt: skip

_EXCLUSIONS = (
    Exclusion(
        when=(_ZERO, _OFFLOADED, Condition("optimizer", "is not one of", ("adamw", "adamw-foreach"))),
        reason="with offload, Accelerate and DeepSpeed replace every optimizer by DeepSpeedCPUAdam, which has fp32 "
        "states and, unless AdamW was asked for, L2 regularisation instead of decoupled weight decay",
        instead="train.optimizer: adamw, or sharding.offload: none",
        source="accelerate 1.15 utils/deepspeed.py: map_pytorch_optim_to_deepspeed",
    ),
    Exclusion(
        when=(_ZERO, _OFFLOADED, Condition("precision", "is", "bf16")),
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
            (Condition("lora_rank", "is at least", 1), "lora.rank: null"),
        )
    ),
    Exclusion(
        when=(Condition("fsdp", "is", True), _ZERO),
        reason="both partition the same states",
        instead="one of sharding.fsdp and sharding.zero",
        source="transformers 5.17 training_args.py",
    ),
    Exclusion(
        when=(Condition("replicas", "is at least", 2), Condition("fsdp", "is", False)),
        reason="FSDP2 shards the copies",
        instead="sharding.fsdp: true",
        source="torch.distributed.fsdp.fully_shard",
    ),
    *(
        Exclusion(
            when=(used, Condition("zero", "is not", 3)),
            reason="ZeRO++ is part of stage 3",
            instead="sharding.zero: 3",
            source="arXiv 2306.10209",
        )
        for used in _ZERO_PLUS_PLUS
    ),
    Exclusion(
        when=(_OFFLOADED, Condition("zero", "is", 0), Condition("fsdp", "is", False)),
        reason="offload moves the states that ZeRO or FSDP2 manage, and neither is on",
        instead="sharding.zero: 2 (states) or 3 (weights too), or train.checkpointing: offload for activations",
        source="deepspeed.ai/docs/config-json; torch.distributed.fsdp.CPUOffloadPolicy",
    ),
    Exclusion(
        when=(_NVME, Condition("zero", "is not", 3)),
        reason="only DeepSpeed's stage 3 swaps to files",
        instead="sharding.zero: 3, or sharding.offload: cpu",
        source="deepspeed.ai/docs/config-json, offload_optimizer and offload_param",
    ),
)
_NVME_TOGETHER = "sharding.offload: nvme and sharding.nvme_folder belong together; give both or neither"

DECLARATION = Declaration(
    pages={
        "ddp": "Data parallelism", "zero": "DeepSpeed ZeRO", "offload": "DeepSpeed offload", "fsdp2": "PyTorch FSDP2",
    },
    settings=_SETTINGS,
    techniques=_TECHNIQUES,
    exclusions=_EXCLUSIONS,
    key_exclusions=(
        KeyExclusion(when=_NVME, key="sharding.nvme_folder", test="is", wanted=None, reason=_NVME_TOGETHER),
        KeyExclusion(
            when=Condition("offload", "is not", "nvme"), key="sharding.nvme_folder", test="is not", wanted=None,
            reason=_NVME_TOGETHER,
        ),
    ),
    key_switches=(
        KeySwitch(
            keys=("sharding.reshard", "sharding.replicas"), on=Condition("fsdp", "is", True),
            instead="sharding.fsdp: true",
        ),
        KeySwitch(
            keys=("sharding.zero_copy_ranks", "sharding.zero_int8_weights", "sharding.zero_int4_gradients"),
            on=Condition("zero", "is", 3), instead="sharding.zero: 3",
        ),
    ),
)  # fmt: skip
