"""Recomputes a layer whose input and whose attention's results wait on the host. Attention itself runs forward once.

Attention's time grows with the square of a sample's length, and its results only with the length. So for long samples a
copy to the host and back is far shorter than a second forward pass of attention. It works for attention that calls
`recomputation.compute_once`: sdpa that is causal and has no mask.

The recomputation fetches the input and attention's results. Then the backward pass of the MLP comes first, which needs
neither. So large tensors (1 GiB or more) leave the GPU again until the backward pass of attention: the layer's input,
attention's output, and what the layer saved before attention, such as the output of its first norm.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.ops import recomputation
from tigon.techniques.checkpointing import host_offload
from tigon.techniques.checkpointing.host_offload import HostOffload, Waiting
from tigon.techniques.checkpointing.recompute import Frame, run_recomputed


class LayersOnHost:
    """The checkpointing function of a model's layers: `layers(layer, *inputs)`."""

    def __init__(self) -> None:
        self.input_offload, self.result_offload, self.saved_offload = (HostOffload(ahead=False) for _ in range(3))
        self.newest: weakref.ref[HostFrame] | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = run_recomputed(self._frame, function, args, kwargs)
        self.settle()
        return output

    def settle(self) -> None:
        """Free what a layer has sent. Its MLP took longer than these copies, so they are done at the layer's end."""
        self.input_offload.settle()
        self.result_offload.settle()

    def _frame(self, function: Callable[..., Any], args: tuple[Any, ...], device: torch.device) -> Frame:
        return HostFrame(self, function, args, device)


class _Cell:
    """A tensor on the host for several uses, which may be different views. The last use drops the copy on the GPU."""

    __slots__ = ("left", "offload", "sent", "value")

    def __init__(self, offload: HostOffload, sent: Tensor | Waiting) -> None:
        self.offload, self.sent, self.left = offload, sent, 0
        self.value: Tensor | None = None

    def view(self, tensor: Tensor) -> _View:
        self.left += 1
        return _View(self, tensor)

    def take(self) -> Tensor:
        value = self.offload.fetch(self.sent) if self.value is None else self.value
        self.left -= 1
        self.value = value if self.left else None
        return value


class _View:
    """One saved tensor: a view of a cell's tensor."""

    __slots__ = ("cell", "offset", "shape", "strides")

    def __init__(self, cell: _Cell, tensor: Tensor) -> None:
        self.cell, self.shape = cell, tensor.shape
        self.strides, self.offset = tensor.stride(), tensor.storage_offset()

    def take(self) -> Tensor:
        return self._of(self.cell.take())

    def look(self) -> Tensor:
        return self._of(self.cell.offload.fetch(self.cell.sent))

    def _of(self, whole: Tensor) -> Tensor:
        return whole.detach().as_strided(self.shape, self.strides, self.offset)


class HostFrame(Frame):
    """One call of a layer: its input and its attention's results on the host."""

    __slots__ = ("__weakref__", "earlier", "layers", "next_result", "on_host", "results")

    def __init__(
        self, layers: LayersOnHost, function: Callable[..., Any], args: tuple[Any, ...], device: torch.device
    ) -> None:
        self.layers = layers
        self.results: list[tuple[Any, ...]] = []
        """What `compute_once` computed in the first run, on the host."""
        self.on_host: dict[int, tuple[Any, _Cell]] = {}
        """Storage -> (weak reference to it, its cell), during the recomputation."""
        self.next_result = 0
        self.earlier = layers.newest
        """The call of the layer before this one, whose backward pass comes after this one's."""
        layers.newest = weakref.ref(self)
        super().__init__(function, args, device, [])

    def hold(self, tensors: list[Tensor]) -> Any:
        return [(self.layers.input_offload.send(tensor.detach()), tensor.requires_grad) for tensor in tensors]

    def held(self) -> Sequence[Tensor]:
        self.next_result = 0
        return [self._input(sent).requires_grad_(wanted) for sent, wanted in self.inputs]

    def start(self) -> None:
        """Start the copies to the GPU of all but large tensors."""
        waiting = [(self.layers.input_offload, sent) for sent, _ in self.inputs]
        waiting += [(self.layers.result_offload, one) for results in self.results for one in results]
        for offload, sent in waiting:
            if isinstance(sent, Waiting) and sent.host.nbytes < host_offload.LARGE_BYTES:
                offload.start(sent)

    def _input(self, sent: Tensor | Waiting) -> Tensor:
        tensor = self.layers.input_offload.fetch(sent).detach()
        self._leave_on_host(tensor, self.layers.input_offload, sent)
        return tensor

    def first_run(self) -> recomputation.Run:
        return recomputation.Run(self.kept, drops_saved=True, once=self._send)

    def second_run(self) -> recomputation.Run:
        return recomputation.Run(self.kept, backward_follows=True, once=self._fetch)

    def _send(self, compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        results = compute()
        send = self.layers.result_offload.send
        self.results.append(tuple(send(one.detach()) if isinstance(one, Tensor) else one for one in results))
        return results

    def _fetch(self, compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        self._send_saved()
        results, self.next_result = self.results[self.next_result], self.next_result + 1
        fetched = tuple(self._result(one) if isinstance(one, (Tensor, Waiting)) else one for one in results)
        self.layers.saved_offload.settle()  # copies in both directions run at the same time
        return fetched

    def _result(self, sent: Tensor | Waiting) -> Tensor:
        tensor = self.layers.result_offload.fetch(sent)
        self._leave_on_host(tensor, self.layers.result_offload, sent)
        return tensor

    def _leave_on_host(self, tensor: Tensor, offload: HostOffload, sent: Tensor | Waiting) -> None:
        """Remember that a large tensor is on the host too, so that `put` saves a view of that instead of the tensor."""
        storage = tensor.untyped_storage()
        if isinstance(sent, Waiting) and storage.nbytes() >= host_offload.LARGE_BYTES:
            self.on_host[storage._cdata] = weakref.ref(storage), _Cell(offload, sent)

    def _send_saved(self) -> None:
        """Send away the large tensors that were saved before attention. The backward pass needs them last."""
        cells: dict[int, _Cell] = {}
        for number, entry in enumerate(self.recomputed):
            if not isinstance(entry, Tensor):
                continue
            storage = entry.untyped_storage()
            whole = entry.is_contiguous() and entry.nbytes == storage.nbytes()
            cell = cells.get(storage._cdata)
            if cell is None and whole and entry.nbytes >= host_offload.LARGE_BYTES:
                sent = self.layers.saved_offload.send(entry)
                if isinstance(sent, Waiting):
                    cell = cells[storage._cdata] = _Cell(self.layers.saved_offload, sent)
            if cell is not None:
                self.recomputed[number] = cell.view(entry)

    def put(self, tensor: Tensor) -> Any:
        found = self.on_host.get(tensor.untyped_storage()._cdata)
        if found is None or found[0]() is None:  # a new tensor may have the address of one that was freed
            return super().put(tensor)
        return found[1].view(tensor)

    def take(self, entry: Any) -> Tensor:
        return entry.take() if isinstance(entry, _View) else super().take(entry)

    def look(self, entry: Any) -> Tensor:
        return entry.look() if isinstance(entry, _View) else super().look(entry)

    def recompute(self) -> None:
        try:
            super().recompute()
        finally:
            self.on_host.clear()
        earlier = None if self.earlier is None else self.earlier()
        if earlier is not None:  # its tensors come while this layer's backward pass runs
            earlier.start()
