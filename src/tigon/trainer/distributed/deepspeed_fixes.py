"""Fixes for DeepSpeed 0.19.8: checkpoints without code, the dtype of partitions, and a repeatable Adam on the CPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch

UNUSED_STEP = 2**30  # a step number that no run reaches


def allow_deepspeed_globals() -> None:
    """Let torch.load rebuild the objects in DeepSpeed 0.19.8's checkpoints. Their classes hold only data."""
    names = {
        "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
        "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
        "deepspeed.utils.tensor_fragment": ("fragment_address",),
    }
    classes = [
        getattr(importlib.import_module(module), name) for module, importable in names.items() for name in importable
    ]
    torch.serialization.add_safe_globals(classes)


def keep_partition_dtype() -> None:
    """Make deepspeed.zero.Init partition parameters in the dtype that its caller requests.

    DeepSpeed 0.19.8 (runtime/zero/partition_parameters.py, _set_dtype) reads `dtype or float16` only if the accelerator
    supports fp16, and takes bf16 otherwise. On a CPU without AVX512-FP16 or AMX-FP16, ZeRO-3 then swaps fp32 parameters
    through buffers in bf16, and they come back from their files rounded.
    """
    from deepspeed.runtime.zero import partition_parameters

    def set_dtype(self: partition_parameters.Init, ds_config: object, dtype: torch.dtype | None) -> None:
        partition_parameters.InsertPostInitMethodToModuleSubClasses._set_dtype(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    # Set on the subclass and calling its base class, so that a second call does not wrap the first.
    partition_parameters.Init._set_dtype = set_dtype


class ExactBetaPowers:
    """DeepSpeed's operators, with powers of the betas that do not depend on earlier steps in this process.

    DeepSpeed multiplies each power by its beta once per step, in fp32. It calls pow() only if a step does not follow
    the last one, as in the first step of a resumed run (0.19.8, csrc/includes/cpu_adam.h: IncrementStep). The two round
    differently, by 6e-8 of a weight. Updating one element with an unused step number before each step makes every step
    call pow(), which costs microseconds.
    """

    def __init__(self, operators: Any) -> None:
        self._operators = operators
        self._element = torch.zeros(4, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def adam_update(self, optimizer_id: int, step: int, *rest: object) -> None:
        settings = rest[:-4]
        self._operators.adam_update(optimizer_id, UNUSED_STEP, *settings, *self._element)
        self._operators.adam_update(optimizer_id, step, *rest)


def use_exact_beta_powers(optimizer: Any) -> None:
    """Apply ExactBetaPowers to `optimizer` if it is DeepSpeed's CPU Adam."""
    operators = getattr(optimizer, "ds_opt_adam", None)
    if operators is not None:
        optimizer.ds_opt_adam = ExactBetaPowers(operators)
