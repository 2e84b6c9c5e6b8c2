"""The dtype of the losses that Liger's classes and functions return."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.errors import OptionError

LOSS_DTYPES = ("fp32", "logits", "liger")
LOSS_DTYPE_OPTION = "--loss-dtype"  # of python -m tigon.compat.liger
_loss_dtype = "fp32"


def set_loss_dtype(choice: str) -> None:
    """Choose the dtype of the losses that Liger's classes and functions return in this process.

    PyTorch's cross entropy of bf16 logits is bf16, and `torch.allclose` refuses to compare fp32 with bf16. Losses of
    patched models are always fp32, as in transformers. Gradients do not change.

    Args:
        choice: one of three values.

            - "fp32": the default.
            - "logits": the dtype of the logits; for the fused loss, the dtype of the hidden states.
            - "liger": as in liger-kernel 0.8.5, where only the fused loss is fp32.

    Raises:
        OptionError: `choice` is not one of the three values.
    """
    global _loss_dtype
    if choice not in LOSS_DTYPES:
        raise OptionError(f"loss_dtype={choice!r} is not known; choose one of {', '.join(LOSS_DTYPES)}.")
    _loss_dtype = choice


def in_chosen_dtype(loss: Tensor, dtype: torch.dtype, fused: bool) -> Tensor:
    """A loss in the dtype chosen by `set_loss_dtype`.

    Args:
        loss: fp32, or fp64.
        dtype: of the logits, or of the hidden states.
        fused: whether Liger returns this loss in fp32.
    """
    return loss if _loss_dtype == "fp32" or (fused and _loss_dtype == "liger") else loss.to(dtype)
