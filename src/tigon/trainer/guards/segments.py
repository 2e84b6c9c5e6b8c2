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


_refusals: list[str] = []
"""Why this process's GPU has no expandable segments."""


def used(settings: Settings, device: torch.device) -> bool:
    """Whether a run with these settings on `device` has expandable segments, unless its GPU refuses them."""
    return (
        not _refusals
        and device.type == "cuda"
        and torch.version.cuda is not None
        and sets_expandable_segments(settings, None)
    )


def switch_on(settings: Settings, device: torch.device) -> None:
    """Switch expandable segments on if the run uses them.

    A GPU without virtual memory management, such as some virtual GPUs, cannot allocate with them, and a later PyTorch
    may lack the function. Then they are off, a line says so, and `used` is False from then on.
    """
    if not used(settings, device):
        return
    torch.cuda.empty_cache()
    try:
        _set(EXPANDABLE)
        torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError) as error:
        _refusals.append(str(error).splitlines()[0])
        if isinstance(error, RuntimeError):
            _set(EXPANDABLE.replace("True", "False"))
        if launch.rank() == 0:
            print(
                "warning  this GPU has no expandable segments, with which the plan counts; free memory may be "
                f"fragmented: {_refusals[0]} ({ALLOCATOR_SETTINGS}=expandable_segments:False leaves them "
                "out of the plan)",
                flush=True,
            )


def _set(text: str) -> None:
    """Tell the allocator. PyTorch has no public function for it (2.13). AttributeError: it has none of these either."""
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(text)
