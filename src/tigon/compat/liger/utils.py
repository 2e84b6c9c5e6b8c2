"""`liger_kernel.utils`, and `is_transformers_available`: the functions that scripts use."""

from __future__ import annotations

import importlib.util

import torch


def infer_device() -> str:
    """The kind of device torch sees: "cuda" (ROCm too), "xpu", or "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if torch.xpu.is_available() else "cpu"


def infer_comm_backend() -> str:
    """The torch.distributed backend of that device."""
    return {"cuda": "nccl", "xpu": "xccl"}.get(infer_device(), "gloo")


def is_peft_available() -> bool:
    """Whether peft is installed; it is not imported."""
    return importlib.util.find_spec("peft") is not None


def is_transformers_available() -> bool:
    """Whether transformers is installed; it is not imported."""
    return importlib.util.find_spec("transformers") is not None
