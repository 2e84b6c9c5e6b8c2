"""A configuration and its estimate."""

from __future__ import annotations

from dataclasses import dataclass

from tigon.planner.estimate import Estimate, estimate
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request


@dataclass(frozen=True, kw_only=True)
class Option:
    """A configuration and its estimate."""

    request: Request
    estimate: Estimate

    def fits(self, gpu: Gpu) -> bool:
        """Whether the run fits into the GPU's memory; the allocator returns cached blocks to the device if it must."""
        return self.estimate.device_bytes <= gpu.memory_bytes


def estimate_option(request: Request, gpu: Gpu) -> Option:
    """The request with its estimate. The evaluation is left out unless the request evaluates."""
    return Option(request=request, estimate=estimate(request, gpu=gpu, evaluation=False))
