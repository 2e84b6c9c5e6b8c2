"""DeepSpeed's configuration, computed from the model, and the layers that stage 3 takes as one module."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tigon._trunk import decoder_layers
from tigon.errors import RecipeError
from tigon.techniques.keys.settings import Settings
from tigon.techniques.precision import number_format
from tigon.techniques.technique import RunInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        and not settings.sharding.offloads
        and not settings.lora.used
        and not zero_plus_plus(settings)
        and 0 < run_info.largest_layer() <= LARGEST_LAYER
    )


def mark_layers(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    """Let DeepSpeed see each decoder layer as one module, if `gathers_layers` says so."""
    layers = decoder_layers(model)
    weights = [weight for layer in layers for weight in layer.parameters()]
    if gathers_layers(settings, run_info) and len(weights) == len(set(weights)):  # layers may share weights
        from deepspeed.utils import set_z3_leaf_module

        for layer in layers:
            set_z3_leaf_module(layer, True)
            _check_first_input(layer)
    return model


def _check_first_input(layer: nn.Module) -> None:
    """Let a layer's first training call raise RecipeError if no input passes gradients on.

    DeepSpeed's hook would then run before the gradients of the layer's weights exist, and take zeros for them.
    """

    def check(module: nn.Module, args: tuple[object, ...]) -> None:
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
    if not settings.sharding.offloads:
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
    itemsize = number_format(settings).compute_dtype.itemsize

    def swapped(numels: list[int]) -> int:
        return sum(math.ceil(n / run_info.processes) * itemsize >= AIO_BLOCK_BYTES for n in numels)

    layers = run_info.by_layer()
    outside = swapped(layers.pop("", []))
    most = max((swapped(numels) for numels in layers.values()), default=0)
    partition = math.ceil(run_info.largest() / run_info.processes)
    share = AIO_THREADS * AIO_ALIGNED_BYTES // itemsize
    return {"buffer_size": math.ceil(partition / share) * share, "buffer_count": max(5, 2 * most + outside + 1)}


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
