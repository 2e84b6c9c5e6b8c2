"""Several GPUs, and offload of states: DDP, FSDP2, DeepSpeed ZeRO (arXiv 1910.02054, 2101.06840, 2104.07857).

The engines are DeepSpeed's and PyTorch's. deepspeed_config.py has the first one's configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tigon.errors import RecipeError
from tigon.techniques.condition import Condition, Exclusion, Switch
from tigon.techniques.keys.settings import Settings
from tigon.techniques.sharding.deepspeed_config import deepspeed_config, mark_layers
from tigon.techniques.technique import Declaration, RunInfo, Search, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU_ZERO_PROCESSES = 1  # Accelerate 1.15 lacks a backend for more on the CPU


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
    return not settings.lora.quantize and not (settings.sharding.divides_weights and settings.lora.used)


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
        and not settings.lora.used
        and not settings.lora.quantize
        and not reads_whole_weights
    )


def shard_ranks(settings: Settings) -> int:
    """Returns the number of processes over which FSDP2 divides each tensor.

    They hold one copy of the states between them, or of a part of each matrix with tensor parallelism.
    """
    return settings.sharding.gpus // (settings.sharding.replicas * settings.sharding.tensor)


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


def _stage(stage: int) -> Technique:
    return Technique(
        name=f"zero-{stage}",
        effect_on_result=_ZERO_EFFECT_ON_RESULT,
        change_rank=1,
        needs=("deepspeed",),
        recipe={"sharding.gpus": 2, "sharding.zero": stage},
        chosen=(Condition("sharding.zero", "is", stage),),
        arguments=lambda settings, run_info: {"deepspeed": deepspeed_config(settings, run_info)},
        model=mark_layers,
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
    *map(_stage, (1, 2, 3)),
    Technique(
        name="zero-3-hpz",
        needs=("deepspeed",),
        recipe={"sharding.gpus": 4, "sharding.zero": 3, "sharding.zero_copy_ranks": 2},
        chosen=(Condition("sharding.zero", "is", 3), Condition("sharding.zero_copy_ranks", "is at least", 2)),
    ),
    Technique(
        name="zero-3-int8-weights",
        effect_on_result="Gathered weights have about 8 bits of precision: losses of a small model differ by 0.2 %.",
        needs=("deepspeed",),
        devices=("cuda",),
        recipe={"sharding.gpus": 2, "sharding.zero": 3, "sharding.zero_int8_weights": True},
        chosen=(Condition("sharding.zero", "is", 3), Condition("sharding.zero_int8_weights", "is", True)),
        change_rank=1,
    ),
    Technique(
        name="zero-3-int4-gradients",
        effect_on_result="Gradients between machines are rounded to 4 bits twice. No such run was measured.",
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
