"""Keeps tensors in pinned host memory until the backward pass, and copies them on a second stream.

A copy to the host starts when a tensor is sent, and runs while the next layer computes. The copy back starts one
tensor before it is used. A tensor of 1 GiB or more is copied back only when it is used, because an early copy would add
it to the peak. At such lengths attention takes so long that the wait is short. On devices without streams, tensors stay
on the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

MIN_BYTES = 2**20  # copying smaller tensors costs more than it frees
MAX_LEAVING = 2  # tensors being copied to the host; before a third, the compute stream waits for the oldest
LARGE_BYTES = 2**30  # tensors that come back only when they are used


class Waiting:
    """A tensor that waits on the host. It links to the tensor sent before it, which the backward pass needs next."""

    __slots__ = ("__weakref__", "arrived", "device", "earlier", "host", "returned")

    def __init__(self, host: Tensor, device: torch.device, earlier: Waiting | None) -> None:
        self.host, self.device = host, device
        self.earlier = weakref.ref(earlier) if earlier is not None else None
        self.returned: Tensor | None = None
        self.arrived: Any = None


class HostOffload:
    """Use `with offload.saving():` around code whose saved tensors should wait on the host, or `send` and `fetch`.

    ahead: whether a fetch starts the copy of the tensor that was sent before.
    """

    def __init__(self, *, ahead: bool = True) -> None:
        self._ahead = ahead
        self._stream: Any = None
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._newest: weakref.ref[Waiting] | None = None

    def saving(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.send, self.fetch)

    def send(self, tensor: Tensor) -> Any:
        """Start the copy to the host. Returns what `fetch` takes: the tensor itself if it stays on the device."""
        is_parameter = tensor.is_leaf and tensor.requires_grad
        if not self.has_streams(tensor.device) or is_parameter or tensor.nbytes < MIN_BYTES:
            return tensor
        host, left = self.copied_out(tensor)
        # The reference is dropped only after the compute stream has waited for the copy, so that nothing overwrites
        # the memory early. record_stream would also do this, but it frees an unknown number of layers later.
        self._leaving.append((left, tensor))
        while len(self._leaving) > MAX_LEAVING:
            self.wait_for(*self._leaving.popleft())
        waiting = Waiting(host, tensor.device, self._newest() if self._newest else None)
        self._newest = weakref.ref(waiting)
        return waiting

    def settle(self) -> None:
        """Let the compute stream wait for the copies to the host, and drop the tensors on the device."""
        while self._leaving:
            self.wait_for(*self._leaving.popleft())

    def fetch(self, sent: Tensor | Waiting) -> Tensor:
        """The tensor of a `send`, on the device. It can be fetched again."""
        if isinstance(sent, Tensor):
            return sent
        self.settle()  # the forward pass is over
        self.start(sent)
        tensor = sent.returned
        assert tensor is not None
        self.wait_for(sent.arrived, tensor)
        sent.returned = None
        earlier = sent.earlier() if sent.earlier is not None else None
        if self._ahead and earlier is not None and earlier.host.nbytes < LARGE_BYTES:
            self.start(earlier)
        return tensor

    def start(self, sent: Tensor | Waiting) -> None:
        """Start the copy back, unless it has started."""
        if not isinstance(sent, Tensor) and sent.returned is None:
            sent.returned, sent.arrived = self.copied_back(sent)

    # The copies. Tests and the planner's trace have others.

    def has_streams(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def copied_out(self, tensor: Tensor) -> tuple[Any, Any]:
        """Returns (the copy on the host, the event after which it is there)."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            return host, self._stream.record_event()

    def copied_back(self, sent: Waiting) -> tuple[Tensor, Any]:
        """Returns (the copy on the device, the event after which it is there)."""
        # The compute stream allocates the tensor, because it uses it.
        tensor = torch.empty_like(sent.host, device=sent.device, pin_memory=False)
        self._stream.wait_stream(torch.cuda.current_stream(sent.device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            tensor.copy_(sent.host, non_blocking=True)
            return tensor, self._stream.record_event()

    def wait_for(self, event: torch.cuda.Event, tensor: Tensor) -> None:
        """Let the stream that computes with `tensor` wait for a copy of it."""
        torch.cuda.current_stream(tensor.device).wait_event(event)
