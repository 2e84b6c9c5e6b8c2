"""Whole-run techniques: what a training run does, beyond its model and its rows, to fit and to be fast.

choices.py        one value a technique: what a recipe chooses, and what the planner searches over
technique.py      what a technique is: the record, and what it may ask about a run
condition.py      conditions on choices, as data
matrix.py         the choices that exclude each other, with reason, alternative and source
optimizers.py     the optimizers: bytes of state and of the step, package, precision
galore.py         GaLore, the one optimizer of our own
tiling.py         MLPs that take a tile of tokens at a time
head_groups.py    attention whose backward takes a group of heads at a time
precision.py, checkpointing.py, accumulation.py, sharding.py, lora.py    the records
host_offload.py   what autograd saves, in host memory beside the computation

`TECHNIQUES` is the registry: the trainer, the documents and the tests go through it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tigon.techniques import (
    accumulation,
    checkpointing,
    head_groups,
    lora,
    optimizers,
    precision,
    sharding,
    tiling,
)
from tigon.techniques.technique import Technique

TECHNIQUES: Mapping[str, Technique] = {
    technique.name: technique
    for room in (precision, checkpointing, tiling, head_groups, accumulation, optimizers, sharding, lora)
    for technique in room.TECHNIQUES
}
