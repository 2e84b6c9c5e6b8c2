"""A configuration and its estimate."""

from __future__ import annotations

from dataclasses import dataclass

from tigon.planner.estimate import Estimate, estimate
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request

GPUS_PER_HOST = 8
"""More GPUs than this are assumed to be in several machines."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A configuration and its estimate."""

    request: Request
    estimate: Estimate

    def fits(self, gpu: Gpu, host_bytes: int | None = None) -> bool:
        """Whether the run fits into the GPU's memory; the allocator returns cached blocks to the device if it must.

        host_bytes: the host memory that offloading may use; None: any amount.
        """
        return self.estimate.device_bytes <= gpu.memory_bytes and self.host_excess(host_bytes) <= 0

    def host_excess(self, host_bytes: int | None) -> int:
        """The bytes that offloading needs beyond `host_bytes` on a host with at most GPUS_PER_HOST of the GPUs."""
        return 0 if host_bytes is None else self.all_host_bytes - host_bytes

    @property
    def all_host_bytes(self) -> int:
        """Pinned host memory of all the GPUs of one host."""
        return self.estimate.host_bytes * min(self.request.gpus, GPUS_PER_HOST)


def estimate_option(request: Request, gpu: Gpu) -> Option:
    """The request with its estimate. The evaluation is left out unless the request evaluates."""
    return Option(request=request, estimate=estimate(request, gpu=gpu, evaluation=False))
