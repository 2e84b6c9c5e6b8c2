"""Chooses the engine that a run trains with."""

from __future__ import annotations

from collections.abc import Mapping

from tigon.planner.engines.base import Engine
from tigon.planner.engines.ddp import Ddp
from tigon.planner.engines.fsdp import Fsdp
from tigon.planner.engines.single import SingleGpu
from tigon.planner.engines.zero import Zero1, Zero2, Zero3
from tigon.techniques.records.choices import Choices


def engine_of(choices: Choices) -> Engine:
    """DeepSpeed for a ZeRO stage, FSDP2 if chosen, DDP for several GPUs, else no engine around the model."""
    if choices.zero:
        stages: Mapping[int, type[Engine]] = {1: Zero1, 2: Zero2, 3: Zero3}
        return stages[choices.zero](choices)
    if choices.fsdp:
        return Fsdp(choices)
    return Ddp(choices) if choices.gpus > 1 else SingleGpu(choices)
