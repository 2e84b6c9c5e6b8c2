"""The optimizers as techniques. table.py has their rows."""

from __future__ import annotations

import torch

from tigon.techniques.condition import Condition, Exclusion, Switch
from tigon.techniques.keys.settings import Settings
from tigon.techniques.optimizers import muon
from tigon.techniques.optimizers.table import OPTIMIZERS, Optimizer
from tigon.techniques.technique import Declaration, Search, Technique


def _technique(row: Optimizer) -> Technique:
    return Technique(
        name=row.name,
        effect_on_result=row.effect_on_result,
        needs=(row.package,) if row.package else (),
        devices=row.devices,
        recipe=row.recipe,
        chosen=(Condition("train.optimizer", "is", row.name),),
        arguments=lambda settings, run_info: _arguments(row),
        change_rank=row.change_rank,
        last_resort=row.last_resort,
        searched_with=row.searched_with,
    )


def _arguments(row: Optimizer) -> dict[str, str]:
    named = {"optim": row.trainer_name} if row.trainer_name else {}
    # Its package warms up by itself, so a schedule with a warm-up would square it.
    return named | ({"lr_scheduler_type": "constant"} if row.averages else {})


_GALORE = Condition("train.optimizer", "is one of", ("galore", "galore-layerwise"))
_LAYERWISE, _ADAFACTOR = (Condition("train.optimizer", "is", name) for name in ("galore-layerwise", "adafactor"))
_ZERO, _FSDP = Condition("sharding.zero", "is at least", 1), Condition("sharding.fsdp", "is", True)
_BITSANDBYTES = tuple(row.name for row in OPTIMIZERS.values() if row.package == "bitsandbytes")

_MUON = Condition("train.optimizer", "is", "muon")
_SCHEDULE_FREE = Condition("train.optimizer", "is", "schedule-free")


def _muon_not_with(condition: Condition, reason: str, instead: str) -> Exclusion:
    return Exclusion(when=(_MUON, condition), reason=reason, instead=instead, source="torch 2.13 optim/_muon.py")


_EXCLUSIONS = (
    _muon_not_with(
        _ZERO,
        "ZeRO hands the optimizer flat slices of all parameters, and Muon orthogonalises whole matrices",
        "sharding.zero: 0, or train.optimizer: adamw",
    ),
    _muon_not_with(
        Condition("sharding.offload", "is not", "none"),
        "Muon gathers divided matrices in its step, and the processes do not exchange tensors of the host",
        "sharding.offload: none, or train.optimizer: adamw",
    ),
    _muon_not_with(
        Condition("sharding.replicas", "is at least", 2),
        "tigon has not tried Muon on copies of divided matrices",
        "sharding.replicas: 1, or train.optimizer: adamw",
    ),
    _muon_not_with(
        Condition("sharding.tensor", "is at least", 2),
        "tensor parallelism divides matrices, and Muon orthogonalises whole ones",
        "sharding.tensor: 1, or train.optimizer: adamw",
    ),
    _muon_not_with(
        Condition("lora.rank", "is at least", 1),
        "an adapter is two matrices of low rank, and Muon would orthogonalise each of them alone",
        "train.optimizer: adamw",
    ),
    Exclusion(
        when=(_SCHEDULE_FREE, Condition("train.schedule", "is not", "constant")),
        reason="averages of the weights take the place of a schedule, and the warm-up is the optimizer's own",
        instead="train.schedule: constant, or train.optimizer: adamw",
        source="arXiv 2405.15682; schedulefree 1.4.1 adamw_schedulefree.py",
    ),
    Exclusion(
        when=(_SCHEDULE_FREE, _ZERO),
        reason="DeepSpeed keeps its own copy of the weights, so the averages would be neither evaluated nor saved",
        instead="sharding.zero: 0, or train.optimizer: adamw",
        source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py",
    ),
    Exclusion(
        when=(_GALORE, _ZERO),
        reason="ZeRO hands the optimizer flat slices of all parameters, and GaLore projects whole matrices",
        instead="sharding.zero: 0, or train.optimizer: adamw-8bit with ZeRO",
        source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py; github.com/jiaweizzhao/GaLore/issues/2",
    ),
    Exclusion(
        when=(_ADAFACTOR, _ZERO),
        reason="ZeRO hands the optimizer flat slices, and Adafactor keeps whole second moments for these: this saves "
        "nothing, and the updates differ from those without ZeRO",
        instead="train.optimizer: adamw-8bit, or sharding.zero: 0",
        source="transformers 5.17 optimization.py: Adafactor._get_options; losses of both compared on a small model",
    ),
    Exclusion(
        when=(_GALORE, _FSDP),
        reason="FSDP2 hands the optimizer a slice of each matrix, and GaLore projects whole matrices",
        instead="sharding.fsdp: false, or train.optimizer: adamw-torchao-8bit with FSDP2",
        source="tigon.techniques.optimizers.galore; torch.distributed.fsdp.fully_shard",
    ),
    Exclusion(
        when=(Condition("train.optimizer", "is one of", _BITSANDBYTES), _FSDP),
        reason="bitsandbytes' ops do not support the sharded tensors of FSDP2: the first step fails",
        instead="train.optimizer: adamw-torchao-8bit, or sharding.zero: 2 instead of sharding.fsdp",
        source="bitsandbytes 0.50.2 with PyTorch 2.13, run on two processes",
    ),
    Exclusion(
        when=(_ADAFACTOR, _FSDP),
        reason="Adafactor mixes sharded and whole tensors: the first step fails",
        instead="train.optimizer: adamw-torchao-4bit",
        source="transformers 5.17 optimization.py with PyTorch 2.13, run on two processes",
    ),
    Exclusion(
        when=(_GALORE, Condition("lora.rank", "is at least", 1)),
        reason="LoRA's matrices are no larger than a projection, so GaLore would be plain AdamW",
        instead="train.optimizer: adamw",
        source="arXiv 2403.03507 §4.2",
    ),
    Exclusion(
        when=(_LAYERWISE, Condition("train.gradient_accumulation", "is at least", 2)),
        reason="each micro-batch's gradient is used and freed at once, so there is nothing to accumulate",
        instead="train.gradient_accumulation: 1, or train.optimizer: galore",
        source="transformers 5.17 trainer_optimizer.py; arXiv 2403.03507 §4.4",
    ),
    Exclusion(
        when=(_LAYERWISE, Condition("sharding.gpus", "is at least", 2)),
        reason="each weight is updated before its gradient has been summed over the GPUs",
        instead="sharding.gpus: 1, or train.optimizer: galore",
        source="transformers 5.17 trainer_optimizer.py",
    ),
    Exclusion(
        when=(_LAYERWISE, Condition("train.precision", "is", "amp-fp16")),
        reason="each weight is updated in the backward pass, before the loss scale is divided out of its gradient",
        instead="train.precision: amp-bf16, or train.optimizer: galore",
        source="torch.amp.GradScaler",
    ),
    Exclusion(
        when=(_LAYERWISE, Condition("train.max_grad_norm", "is above", 0)),
        reason="each gradient is freed before the total norm is known, so it cannot be clipped",
        instead="train.max_grad_norm: 0, or train.optimizer: galore",
        source="arXiv 2403.03507 §4.4",
    ),
)


def _machine(settings: Settings, device: torch.device) -> None:
    if settings.train.optimizer == "muon":
        muon.check()


DECLARATION = Declaration(
    machine=_machine,
    techniques=tuple(_technique(row) for row in OPTIMIZERS.values()),
    searches=(
        Search(
            key="train.optimizer",
            how="run",
            candidates=lambda config: tuple(row.name for row in OPTIMIZERS.values() if row.searched),
        ),
    ),
    labels={"train.optimizer": lambda settings: settings.train.optimizer},
    exclusions=_EXCLUSIONS,
    switches=(
        Switch(
            ("train.galore_rank", "train.galore_gap"),
            "train.optimizer",
            Condition("train.optimizer", "starts with", "galore").holds,
            "train.optimizer: galore",
        ),
    ),
)
