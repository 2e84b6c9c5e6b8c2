"""Chooses the engine that a run trains with."""

from __future__ import annotations

from collections.abc import Mapping

from tigon.planner.engines.base import Engine
from tigon.planner.engines.ddp import Ddp
from tigon.planner.engines.fsdp import Fsdp
from tigon.planner.engines.single import SingleGpu
from tigon.planner.engines.zero import Zero1, Zero2, Zero3
from tigon.techniques.keys.settings import Settings


def engine_of(settings: Settings) -> Engine:
    """DeepSpeed for a ZeRO stage, FSDP2 if chosen, DDP for several GPUs, else no engine around the model."""
    if settings.sharding.zero:
        stages: Mapping[int, type[Engine]] = {1: Zero1, 2: Zero2, 3: Zero3}
        return stages[settings.sharding.zero](settings)
    if settings.sharding.fsdp:
        return Fsdp(settings)
    return Ddp(settings) if settings.sharding.gpus > 1 else SingleGpu(settings)
