"""A head divided by vocabulary (tensor parallelism), inside its module: when it can compute the loss.

`parallelize_module` with `ColwiseParallel` makes the weight a DTensor of Shard(0). Its hooks make the hidden states a
DTensor and gather the logits. transformers' `tp_plan` makes the same weight, and sets a `forward` on the instance that
does what the hooks do. The fused loss needs no logits of another process, so it takes the place of both.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from tigon.models.seams.base import is_dtensor
from tigon.ops import VocabParallelOptions


def is_divided(head: nn.Linear, hidden: Tensor, same_hidden: bool = False) -> bool:
    """Whether `tigon.linear_cross_entropy` takes this head's DTensors. A compiled graph does not.

    FSDP2's shards are such DTensors too, if nothing gathered them. There the processes have different tokens. So the
    hidden states must be a DTensor that says they are the same, as ColwiseParallel makes it.

    same_hidden: whether they are known to be the same.
    """
    if torch.compiler.is_compiling() or not _is_rows(head.weight):
        return False
    if head.bias is not None and not _is_rows(head.bias):
        return False
    if not is_dtensor(hidden):
        return same_hidden
    tensors: tuple[Any, Any] = hidden, head.weight
    return _kinds(hidden) == ["Replicate"] and tensors[0].device_mesh == tensors[1].device_mesh


def own_rows(head: nn.Linear) -> tuple[Tensor, Tensor | None, VocabParallelOptions]:
    """This process's rows of the weight and bias, and which rows they are. Gradients become DTensors again."""
    weight, bias = cast(Any, head.weight), cast(Any, head.bias)
    rows = VocabParallelOptions.of_dtensor(weight)
    return weight.to_local(), None if bias is None else bias.to_local(), rows


def has_tensor_parallel_forward(module: nn.Module) -> bool:
    """Whether transformers' `tp_plan` has set this module's forward."""
    forward = vars(module).get("forward")
    home = str(getattr(forward, "__module__", ""))
    return home.startswith("transformers.") and getattr(forward, "__name__", "") == "tp_forward"


def _kinds(tensor: Any) -> list[str]:
    return [type(placement).__name__ for placement in tensor.placements]


def _is_rows(tensor: Any) -> bool:
    """Whether a tensor is a DTensor that is divided by rows on a mesh of one dimension."""
    return is_dtensor(tensor) and _kinds(tensor) == ["Shard"] and tensor.placements[0].dim == 0
