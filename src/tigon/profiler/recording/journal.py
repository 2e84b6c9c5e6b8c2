"""Notes phases and known tensors while a run is recorded.

The recorder sees allocations with their address and order. The model's hooks know phases and tensors. Both are joined
by `Recorder.position`, a place between two allocations that is resolved at the end of the recording.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tigon.profiler.timeline.timeline import Call


@dataclass(frozen=True)
class RawEvent:
    """One allocation (nbytes > 0) or release (nbytes < 0)."""

    time_ns: int
    address: int
    nbytes: int
    call: Call


@dataclass
class Recording:
    """The output of a recorder."""

    device: str
    events: list[RawEvent]
    positions: list[int]
    """The number of events before each position, in the order of the calls of `Recorder.position`."""
    base_bytes: int = 0
    """Bytes that were alive before the recording began."""
    allocator_peak_bytes: int | None = None
    notes: list[str] = field(default_factory=list)


class Recorder(ABC):
    """Records every allocation of a device between `start` and `stop`."""

    device_type: str
    """`cpu` or `cuda`."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def position(self) -> int:
        """The index in `Recording.positions` of the current place of the run."""

    @abstractmethod
    def stop(self) -> Recording: ...


@dataclass(frozen=True)
class Enter:
    """The run enters a phase."""

    position: int
    name: str
    step: int
    layer: int | None = None
    recomputed: bool = False


@dataclass(frozen=True)
class Tag:
    """The memory at `address` has this category."""

    position: int
    address: int
    nbytes: int
    category: str


@dataclass(frozen=True)
class Node:
    """Autograd starts to compute this node."""

    position: int
    name: str


class Journal:
    """Entries in the order of the run."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.entries: list[Enter | Tag | Node] = []
        self.step = 0
        self.phase = "load"
        self.enter("load")

    def enter(self, name: str, layer: int | None = None, *, recomputed: bool = False) -> None:
        self.phase = name
        self.entries.append(Enter(self._recorder.position(), name, self.step, layer, recomputed))

    def node(self, name: str) -> None:
        self.entries.append(Node(self._recorder.position(), name))

    def tag(self, tensors: Iterable[Tensor], category: str) -> None:
        """Give the memory of these tensors a category until it is freed."""
        here: int | None = None
        for tensor in tensors:
            for part in plain_tensors(tensor):
                storage = part.untyped_storage()
                if storage.nbytes() == 0 or storage.device.type != self._recorder.device_type:
                    continue
                here = self._recorder.position() if here is None else here
                self.entries.append(Tag(here, storage.data_ptr(), storage.nbytes(), category))


def plain_tensors(value: object) -> Iterable[Tensor]:
    """The plain tensors in a value: a tensor, the inner tensors of a subclass, or the items of a container."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) and hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from plain_tensors(getattr(value, name))
        elif value.device.type != "meta":
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from plain_tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from plain_tensors(each)
