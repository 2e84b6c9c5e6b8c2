"""`liger_kernel.utils`, and `is_transformers_available`: the functions that scripts use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch


def infer_device() -> str:
    """The kind of device torch sees: "cuda" (ROCm too), "xpu", or "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if torch.xpu.is_available() else "cpu"


def infer_comm_backend() -> str:
    """The torch.distributed backend of that device."""
    return {"cuda": "nccl", "xpu": "xccl"}.get(infer_device(), "gloo")


def is_npu_available() -> bool:
    """False, because tigon does not support Ascend."""
    return False


def is_peft_available() -> bool:
    """Whether peft is installed; it is not imported."""
    return importlib.util.find_spec("peft") is not None


def is_transformers_available() -> bool:
    """Whether transformers is installed; it is not imported."""
    return importlib.util.find_spec("transformers") is not None


def transformers_version_dispatch(
    required_version: str, before_fn: Callable[..., Any], after_fn: Callable[..., Any],
    before_args: tuple[Any, ...] = (), after_args: tuple[Any, ...] = (),
    before_kwargs: dict[str, Any] | None = None, after_kwargs: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Call `before_fn` under a transformers older than `required_version`, else `after_fn`."""
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version(required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))
