"""The planner's part: the choice of `tigon:auto`, and the predicted peak and time of the variants that it knows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tigon.bench.training.cases import Case
from tigon.bench.training.variants import Code
from tigon.errors import RecipeError, UsageError
from tigon.planner.gpus import Gpu, find_gpu, row_of
from tigon.planner.request import Request
from tigon.planner.search.checkpointing import choose
from tigon.planner.search.option import Option, estimate_option
from tigon.planner.search.space import with_headroom
from tigon.techniques.keys.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RATES_WITHOUT_GPU = "h200"
"""The GPU whose rates the choice on a CPU assumes."""


def gpu_of(device: torch.device) -> Gpu:
    """The planner's row of the device, with the device's memory."""
    if device.type != "cuda":
        return find_gpu(RATES_WITHOUT_GPU)
    properties = torch.cuda.get_device_properties(device)
    return replace(row_of(properties.name, properties.total_memory), memory_bytes=properties.total_memory)


def chosen(case: Case, config: PreTrainedConfig, device: torch.device) -> tuple[str, int]:
    """What `auto` recomputes in this case, and its micro-batch.

    A memory limit is one on the peak of PyTorch's allocator, which is what the benchmark measures. Without a limit the
    whole device has to hold the run, with the planner's headroom.
    """
    gpu, limit_bytes = gpu_of(device), case.limit_bytes
    request = _request(case, config, "tigon")
    splits = [(micro, case.batch // micro) for micro in case.micro_batches()]
    if limit_bytes is None:
        option = choose(request, with_headroom(gpu), splits).option
    else:
        option = choose(request, replace(gpu, memory_bytes=limit_bytes), splits, needs=_allocated_bytes).option
    return option.request.settings.train.checkpointing, option.request.batch


def predicted(
    case: Case, config: PreTrainedConfig, device: torch.device, code: Code, recomputed: str, micro: int
) -> dict[str, float] | None:
    """Predicted peak in bytes and step in ms; None on a CPU, and for a variant that the planner does not know."""
    if device.type != "cuda" or code.kernels is None:
        return None
    request = _request(case, config, code.kernels)
    chosen = {"train.checkpointing": recomputed, "train.gradient_accumulation": case.batch // micro}
    settings = request.settings.having({**chosen, **code.settings})
    try:
        option = estimate_option(replace(request, batch=micro, settings=settings), gpu_of(device))
    except (RecipeError, UsageError):
        return None
    return {"peak_bytes": _allocated_bytes(option), "step_ms": 1000 * option.estimate.step_s}


def _request(case: Case, config: PreTrainedConfig, kernels: str) -> Request:
    settings = Settings.of({"train.precision": case.precision, "train.optimizer": "adamw", "model.kernels": kernels})
    return Request(model=case.model, config=config, batch=case.batch, seq=case.seq, settings=settings)


def _allocated_bytes(option: Option) -> int:
    return option.estimate.peak_allocated_bytes
