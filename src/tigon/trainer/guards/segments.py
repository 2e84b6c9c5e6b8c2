"""Switches PyTorch's expandable segments on for the runs that are planned with them.

PyTorch reads its environment variables when it first allocates on the GPU. Which settings a run has is known later, so
the allocator is told by the function that PyTorch's own tests use.
"""

from __future__ import annotations

import torch

from tigon.planner.simulate.allocator import ALLOCATOR_SETTINGS, EXPANDABLE, sets_expandable_segments
from tigon.techniques.keys.settings import Settings
from tigon.trainer.distributed import launch

PROBE_BYTES = 32 << 20
"""Larger than the free blocks that a process has before its model is loaded."""


def used(settings: Settings, device: torch.device) -> bool:
    """Whether `tigon train` switches expandable segments on for a run with these settings on `device`."""
    return device.type == "cuda" and torch.version.cuda is not None and sets_expandable_segments(settings, None)


def switch_on(settings: Settings, device: torch.device) -> None:
    """Switch expandable segments on if the run uses them.

    A GPU without virtual memory management, such as some virtual GPUs, cannot allocate with them. Then they are off
    again, and a line says so.
    """
    if not used(settings, device):
        return
    torch.cuda.empty_cache()
    _set(EXPANDABLE)
    try:
        torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _set(EXPANDABLE.replace("True", "False"))
        if launch.rank() == 0:
            print(
                "warning  this GPU has no expandable segments, with which the plan counts; free memory may be "
                f"fragmented: {str(error).splitlines()[0]} ({ALLOCATOR_SETTINGS}=expandable_segments:False leaves them "
                "out of the plan)",
                flush=True,
            )


def _set(text: str) -> None:
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(text)
