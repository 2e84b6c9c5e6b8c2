"""Several GPUs, and states that live elsewhere: DDP, DeepSpeed ZeRO (arXiv 1910.02054, 2101.06840, 2104.07857), FSDP2.

Everything here is configuration, computed from the model: the engines are DeepSpeed's and PyTorch's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tigon.techniques.choices import Choices
from tigon.techniques.condition import Condition
from tigon.techniques.technique import Facts, Technique

AIO_BLOCK_BYTES = 2**20  # parameters below a block are not swapped
AIO_THREADS = 8  # of one read or write, each with its share of the bytes
AIO_ALIGNED_BYTES = 1024  # a thread's share is a multiple of it
ADAM_TENSORS = 4  # weight, gradient and two moments: what DeepSpeed's optimizer swapper holds at a time


def deepspeed_config(choices: Choices, facts: Facts) -> dict[str, Any]:
    """The whole DeepSpeed configuration. Sizes are elements, as DeepSpeed has them.

    Buckets are a product of the hidden size as transformers' `auto` makes them, so that small models get small ones.
    """
    square = max(facts.hidden_size**2, 2**16)
    zero: dict[str, Any] = {
        "stage": choices.zero,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": square,
        "allgather_bucket_size": square,
    }
    if choices.zero == 3:
        zero |= {
            "stage3_prefetch_bucket_size": square * 9 // 10,
            "stage3_param_persistence_threshold": 10 * facts.hidden_size,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    zero |= _offloads(choices, facts)
    pure = choices.precision == "bf16"
    config: dict[str, Any] = {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # any torch.optim.Optimizer; the excluded ones are refused before
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


def _offloads(choices: Choices, facts: Facts) -> dict[str, Any]:
    if choices.offload == "none":
        return {}
    place: dict[str, Any] = {"device": choices.offload, "pin_memory": facts.device == "cuda"}
    optimizer, weights = dict(place), dict(place)
    extra: dict[str, Any] = {}
    if choices.offload == "nvme":
        optimizer |= {"nvme_path": facts.nvme_folder, "buffer_count": ADAM_TENSORS}
        weights |= {"nvme_path": facts.nvme_folder, "max_in_cpu": 0, **nvme_buffers(choices, facts)}
        # The optimizer's buffers hold a sub-group: DeepSpeed's 1e9 elements would be 16 GB of pinned memory. Weights
        # that are used again within its 1e9 elements would stay, each in a buffer, until none is left.
        extra |= {"sub_group_size": nvme_group_size(facts), "stage3_max_reuse_distance": 0}
    return {"offload_optimizer": optimizer, **({"offload_param": weights} if choices.zero == 3 else {}), **extra}


def nvme_group_size(facts: Facts) -> int:
    """Elements that the optimizer updates at a time, and reads from files before."""
    return max(10**8, facts.largest())


def nvme_buffers(choices: Choices, facts: Facts) -> dict[str, int]:
    """Buffers of swapped weights: each as large as the largest partition, and as many as can be in flight.

    DeepSpeed 0.19.8 fails at the first layer with fewer than a layer's parameters and what it prefetches, and with
    smaller ones than the largest parameter (1e8 elements unless told; Llama-3.2-1B's embedding has 262.7e6).
    """
    itemsize = 4 if choices.precision == "fp32" else 2

    def swapped(numels: list[int]) -> int:
        return sum(math.ceil(n / facts.processes) * itemsize >= AIO_BLOCK_BYTES for n in numels)

    layers = facts.by_layer()
    outside = swapped(layers.pop("", []))
    most = max((swapped(numels) for numels in layers.values()), default=0)
    partition = math.ceil(facts.largest() / facts.processes)
    share = AIO_THREADS * AIO_ALIGNED_BYTES // itemsize
    return {"buffer_size": math.ceil(partition / share) * share, "buffer_count": max(5, 2 * most + outside + 1)}


def _zero(choices: Choices, facts: Facts) -> Mapping[str, Any]:
    return {"deepspeed": deepspeed_config(choices, facts)}


def weights_are_sharded(choices: Choices) -> bool:
    """Whether a process holds only a part of the weights between steps."""
    return choices.zero == 3 or choices.fsdp


def are_drawn_in_place(choices: Choices) -> bool:
    """Whether a preset's random weights are drawn where the run wants them; else they are files first, which are
    quantised while they are read, or read a second time to be merged with adapters."""
    return not choices.quantized and not (weights_are_sharded(choices) and choices.lora_rank is not None)


def fit_whole(weights_bytes: Iterable[int], room_bytes: int | None) -> bool:
    """Whether all weights, and a head that is not tied to its embedding yet, are on the GPU at a time while they are
    drawn; else they wait on the host to be divided. room_bytes: None for no end."""
    sizes = list(weights_bytes)
    return room_bytes is None or sum(sizes) + max(sizes) <= room_bytes


def are_read_in_parts(choices: Choices, *, heads: bool) -> bool:
    """Whether files go into stage 3's partitions as they are read. Adapters and heads want whole weights to look at,
    and DeepSpeed one dtype of all that is partitioned: with them it moves the model to the GPU, in 16 bits, first."""
    return choices.zero == 3 and choices.lora_rank is None and not choices.quantized and not heads


@contextlib.contextmanager
def partitioned_loading(choices: Choices, facts: Facts) -> Iterator[None]:
    """What from_pretrained reads goes into stage 3's partitions, and the GPU has one weight at a time. The host may
    hold all, in each process: transformers merges the files first. It asks a configuration that is alive, which wants
    numbers where the Trainer would fill them in; DeepSpeed checks them by the number of processes, which it takes for
    one as long as its own communication has not begun.
    """
    from deepspeed import init_distributed
    from transformers.integrations import HfDeepSpeedConfig

    init_distributed(auto_mpi_discovery=False)
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    alive = HfDeepSpeedConfig({**deepspeed_config(choices, facts), **batch, "train_batch_size": facts.processes})
    try:
        yield
    finally:
        del alive


def _fsdp(choices: Choices, facts: Facts) -> Mapping[str, Any]:
    return {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": choices.reshard,
            "cpu_offload": choices.offload == "cpu",
            "state_dict_type": "FULL_STATE_DICT",
        },
    }


# DeepSpeedCPUAdam is compiled at its first use (op_builder/cpu_adam.py, async_io.py).
_CPU_ADAM_TOOLS = ("a C++ compiler", "nvcc where there is a GPU")
_NO_OFFLOAD, _CPU, _NVME = (Condition("offload", "is", place) for place in ("none", "cpu", "nvme"))
_ZERO_PRECISION = "Weights are bf16 with an fp32 copy in the optimizer: norms run in bf16 too, unlike under autocast."


def _stage(stage: int, saves: str, costs: str) -> Technique:
    return Technique(
        name=f"zero-{stage}", page="zero", saves=saves, costs=costs, precision=_ZERO_PRECISION, needs=("deepspeed",),
        recipe={"sharding.gpus": 2, "sharding.zero": stage},
        chosen=(Condition("zero", "is", stage),), arguments=_zero,
        source="DeepSpeed; arXiv 1910.02054 §5",
    )  # fmt: skip


TECHNIQUES = (
    Technique(
        name="ddp", page="ddp",
        saves="Nothing: every GPU holds everything. It divides time.",
        costs="A sum of all gradients over the GPUs each step, beside the backward pass.",
        recipe={"sharding.gpus": 2},
        chosen=(
            Condition("gpus", "is at least", 2), Condition("zero", "is", 0), Condition("fsdp", "is", False),
        ),
        source="torch.nn.parallel.DistributedDataParallel",
    ),
    _stage(1, "Optimizer states, divided by the GPUs.", "Weights are gathered once a step: little more than DDP."),
    _stage(2, "Optimizer states and gradients, divided by the GPUs.", "As stage 1."),
    _stage(3, "Weights too, divided by the GPUs: a layer is gathered for its forward and its backward pass.",
           "Half again as much traffic as DDP, as the weights are gathered twice."),
    Technique(
        name="zero-offload-cpu", page="offload",
        saves="12 bytes per parameter of the GPU's memory: the optimizer's states and their fp32 weights move to the "
        "host. With stage 3 the bf16 weights move too.",
        costs="AdamW runs on the CPU, gradients go there and weights come back each step.",
        precision="DeepSpeedCPUAdam: fp32 states.", needs=("deepspeed",), tools=_CPU_ADAM_TOOLS,
        recipe={"sharding.zero": 2, "sharding.offload": "cpu"}, chosen=(Condition("zero", "is at least", 1), _CPU),
        source="arXiv 2101.06840",
    ),
    Technique(
        name="zero-offload-nvme", page="offload",
        saves="Weights and optimizer states move to files; on the host stay buffers.",
        costs="12 bytes a parameter are read and written each step, at the speed of the disk. Wears an SSD.",
        precision="DeepSpeedCPUAdam: fp32 states.", needs=("deepspeed",),
        tools=(*_CPU_ADAM_TOOLS, "libaio with its headers"),
        recipe={"sharding.zero": 3, "sharding.offload": "nvme", "sharding.nvme_folder": "nvme"},
        chosen=(Condition("zero", "is", 3), _NVME), source="arXiv 2104.07857",
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
        name="fsdp2-offload", page="fsdp2",
        saves="Weights, gradients and states of FSDP2 live on the host; the optimizer runs there.",
        costs="Each layer's weights are copied in for each pass, gradients out.", devices=("cuda",),
        recipe={"sharding.gpus": 2, "sharding.fsdp": True, "sharding.offload": "cpu"},
        chosen=(Condition("fsdp", "is", True), _CPU), source="torch.distributed.fsdp.CPUOffloadPolicy",
    ),
)  # fmt: skip
