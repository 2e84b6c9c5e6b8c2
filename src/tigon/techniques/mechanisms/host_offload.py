"""Keeps the tensors that autograd saves in pinned host memory, and copies them on a second stream.

A copy to the host starts when a tensor is saved, and runs while the next layer computes. The copy back starts one
tensor before it is used. On devices without streams, tensors stay on the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

MIN_BYTES = 2**20  # copying smaller tensors costs more than it frees
MAX_LEAVING = 2  # tensors being copied to the host; before a third, the compute stream waits for the oldest


class _Waiting:
    """A tensor that waits on the host. It links to the tensor saved before it, which the backward pass needs next."""

    __slots__ = ("__weakref__", "arrived", "device", "earlier", "host", "returned")

    def __init__(self, host: Tensor, device: torch.device, earlier: _Waiting | None) -> None:
        self.host, self.device = host, device
        self.earlier = weakref.ref(earlier) if earlier is not None else None
        self.returned: Tensor | None = None
        self.arrived: Any = None


class HostOffload:
    """Use `with offload.saving():` around code whose saved tensors should wait on the host."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._newest: weakref.ref[_Waiting] | None = None

    def saving(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._save, self._restore)

    def _save(self, tensor: Tensor) -> Any:
        is_parameter = tensor.is_leaf and tensor.requires_grad
        if tensor.device.type != "cuda" or is_parameter or tensor.nbytes < MIN_BYTES:
            return tensor
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        computing = torch.cuda.current_stream(tensor.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            left = self._stream.record_event()
        # The reference is dropped only after the compute stream has waited for the copy, so that nothing overwrites
        # the memory early. record_stream would also do this, but it frees an unknown number of layers later.
        self._leaving.append((left, tensor))
        while len(self._leaving) > MAX_LEAVING:
            computing.wait_event(self._leaving.popleft()[0])
        waiting = _Waiting(host, tensor.device, self._newest() if self._newest else None)
        self._newest = weakref.ref(waiting)
        return waiting

    def _restore(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        computing = torch.cuda.current_stream(saved.device)
        while self._leaving:  # the forward pass is over
            computing.wait_event(self._leaving.popleft()[0])
        self._fetch(saved)
        computing.wait_event(saved.arrived)
        tensor: Tensor = saved.returned
        saved.returned = None
        earlier = saved.earlier() if saved.earlier is not None else None
        if earlier is not None:
            self._fetch(earlier)
        return tensor

    def _fetch(self, waiting: _Waiting) -> None:
        """Start the copy back, unless it has started. The compute stream allocates the tensor, because it uses it."""
        if waiting.returned is not None:
            return
        waiting.returned = torch.empty_like(waiting.host, device=waiting.device)
        self._stream.wait_stream(torch.cuda.current_stream(waiting.device))
        with torch.cuda.stream(self._stream):
            waiting.returned.copy_(waiting.host, non_blocking=True)
            waiting.arrived = self._stream.record_event()
