"""DeepSpeed's classes that a checkpoint may hold, and a fix for the dtype of its partitions on some CPUs."""

from __future__ import annotations

import importlib
from typing import Any

import torch


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

    def set_dtype(self: Any, ds_config: Any, dtype: Any) -> None:
        partition_parameters.InsertPostInitMethodToModuleSubClasses._set_dtype(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    # Set on the subclass and calling its base class, so that a second call does not wrap the first.
    partition_parameters.Init._set_dtype = set_dtype
