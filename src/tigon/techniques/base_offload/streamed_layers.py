"""Keeps the frozen weights of decoder layers in host memory, and copies each layer to the device before it computes.

Layer i always computes in the same memory of the device: buffer i modulo the number of buffers. So whatever the
forward pass keeps of a weight, such as a saved tensor or a function that makes a 4-bit weight dense, is right again in
the backward pass once the layer is back. A parameter's `data` is the buffer while its layer is there, and else the
host's memory, so that it always reads the right values.

On a GPU the copies run on their own stream, one layer ahead of the computation in either direction. A copy waits for
all that was launched before it, which includes the last use of its buffer. A layer waits for its copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tigon.techniques.lora.four_bit_weights import packed_weights

BUFFERS = 2
"""Layers on the device: the one that computes, and the one that is copied."""
ALIGNMENT = 256  # bytes; each tensor begins at a multiple in the memory of its layer


@dataclass(frozen=True)
class _Place:
    """A tensor of a layer: the `data` of a parameter, or the scales of a 4-bit weight."""

    owner: Any
    name: str

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self.owner, self.name)
        return tensor

    def put(self, tensor: Tensor) -> None:
        setattr(self.owner, self.name, tensor)


class StreamedLayer:
    """The frozen matrices of one layer, side by side in one block of host memory."""

    def __init__(self, places: Sequence[_Place], number: int, *, pinned: bool) -> None:
        self.places, self.number = places, number
        tensors = [place.tensor for place in places]
        self.nbytes = _packed_bytes(tensors)
        self.host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.on_host = _views(self.host, tensors)
        self.on_device: list[Tensor] = []
        self.arrived: Any = None
        """The event after which the copy on the device is complete."""
        for place, held, tensor in zip(places, self.on_host, tensors, strict=True):
            held.copy_(tensor)
            place.put(held)

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Let the layer read `tensors`: `on_host` or `on_device`."""
        for place, tensor in zip(self.places, tensors, strict=True):
            place.put(tensor)


class StreamedLayers:
    """Streams the layers of one model. `undo` brings them back to the device for good."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], device: torch.device) -> None:
        """Move the frozen matrices of `layers` to the host, and all other weights of `model` to `device`."""
        self.model, self.device = model, device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the memory of the weights that were made or quantised there
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.layers: list[StreamedLayer] = []
        with torch.no_grad():
            for module in layers:
                _keep_tables(module, device)
            for number, places in enumerate(_places(model, layers)):
                self.layers.append(StreamedLayer(places, number, pinned=device.type == "cuda"))
        sizes = [max(layer.nbytes for layer in self.layers[first::BUFFERS]) for first in range(self._n_buffers)]
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        for layer in self.layers:
            layer.on_device = _views(self.buffers[self._buffer_of(layer)], layer.on_host)
        self._inside: list[StreamedLayer | None] = [None] * self._n_buffers
        self._hooks: list[Any] = []
        for number, module in enumerate(layers):
            self._hooks.append(module.register_forward_pre_hook(partial(self._before_forward, number)))
            self._hooks.append(module.register_forward_hook(partial(self._after_forward, number)))
        vars(model)["to"] = self._to  # trainers call it, and it would bring all layers to the device
        model.to(device)

    @property
    def _n_buffers(self) -> int:
        return min(BUFFERS, len(self.layers))

    def _buffer_of(self, layer: StreamedLayer) -> int:
        return layer.number % self._n_buffers

    def use(self, number: int, following: int) -> None:
        """Have layer `number` on the device for what is launched next, and start the copy of layer `following`."""
        layer = self.layers[number]
        self._start(layer)
        self.wait_for(layer.arrived)
        layer.put(layer.on_device)
        if 0 <= following < len(self.layers):
            self._start(self.layers[following])

    def undo(self) -> None:
        """Bring all layers to the device, and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        vars(self.model).pop("to", None)
        if self._stream is not None:
            self._stream.synchronize()
        for layer in self.layers:
            layer.put([tensor.to(self.device, copy=True) for tensor in layer.on_host])
        self.layers, self.buffers, self._inside, self._hooks = [], [], [], []

    def _start(self, layer: StreamedLayer) -> None:
        """Start the copy of a layer to its buffer, unless it is there or on its way."""
        place = self._buffer_of(layer)
        before = self._inside[place]
        if before is layer:
            return
        if before is not None:
            before.put(before.on_host)
        self._inside[place] = layer
        with torch.no_grad():
            layer.arrived = self.copied_in(layer.host, self.buffers[place][: layer.nbytes])

    def _before_forward(self, number: int, module: nn.Module, args: object) -> None:
        self.use(number, number - 1 if _in_backward() else number + 1)

    def _after_forward(self, number: int, module: nn.Module, args: object, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad and not _in_backward():
            hidden.register_hook(partial(self._before_backward, number))

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        # All of the layer above has been launched: PyTorch runs what was recorded last first.
        self.use(number, number - 1)

    def _to(self, *args: Any, **kwargs: Any) -> nn.Module:
        with self._as_on_device():
            return nn.Module.to(self.model, *args, **kwargs)

    @contextmanager
    def _as_on_device(self) -> Iterator[None]:
        """Let all layers seem to be on the device."""
        for layer in self.layers:
            layer.put(layer.on_device)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.put(layer.on_host)
            self._inside = [None] * self._n_buffers

    # The copies. Tests have others.

    def copied_in(self, host: Tensor, buffer: Tensor) -> Any:
        """Start a copy to the device. Returns the event after which it is complete."""
        if self._stream is None:
            buffer.copy_(host)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # the last use of the buffer
        with torch.cuda.stream(self._stream):
            buffer.copy_(host, non_blocking=True)
            return self._stream.record_event()

    def wait_for(self, arrived: Any) -> None:
        """Let the stream that computes wait for a copy."""
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _packed_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def _views(block: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the shapes and dtypes of `like`, one after another in a block of bytes."""
    views, start = [], 0
    for tensor in like:
        views.append(block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return views


def _places(model: nn.Module, layers: Sequence[nn.Module]) -> list[list[_Place]]:
    """The frozen matrices of each layer, in 4 bits with their scales. One that is also used elsewhere is left out.

    Vectors, tables and the scales of scales stay on the device. They are a thousandth of the bytes, but most of the
    tensors, and each costs host time whenever its layer arrives or leaves.
    """
    inside = {module for layer in layers for module in layer.modules()}
    uses: Counter[nn.Parameter] = Counter()
    for module in model.modules():
        uses.update(module.parameters(recurse=False) if module not in inside else ())
    for layer in layers:
        uses.update(layer.parameters())
    places = []
    for layer in layers:
        matrices = (one for one in layer.parameters() if not one.requires_grad and one.numel() and one.ndim > 1)
        moved = [_Place(one, "data") for one in matrices if uses[one] == 1]
        places.append([*moved, *(_Place(state, SCALES) for state in _states(layer))])
    return places


SCALES = "absmax"


def _states(layer: nn.Module) -> Sequence[Any]:
    """bitsandbytes' descriptions of the layer's 4-bit weights."""
    return [state for _, _, state in packed_weights(layer)]


def _keep_tables(layer: nn.Module, device: torch.device) -> None:
    """Have all tensors of the layer's 4-bit weights on the device that `_places` does not move."""
    for state in _states(layer):
        for part in (state, getattr(state, "state2", None)):
            for name, value in vars(part).items() if part is not None else ():
                if isinstance(value, Tensor) and not (part is state and name == SCALES):
                    setattr(part, name, value.to(device))
