"""Traces `train.checkpointing: offload-attention`, with copies that only record shapes.

The trace runs the code of `techniques/checkpointing/attention_offload.py`, so the recording has each tensor that leaves
the GPU and comes back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.planner.trace.dispatch_recorder import TraceRecorder
from tigon.techniques.checkpointing.attention_offload import HostFrame, LayersOnHost
from tigon.techniques.checkpointing.host_offload import HostOffload, Waiting
from tigon.techniques.checkpointing.recompute import run_frame

COMPONENT = "checkpoints"


class _OnHost(NamedTuple):
    """A tensor on the host, without its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class _TracedOffload(HostOffload):
    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__(ahead=False)
        self.recorder = recorder

    def has_streams(self, device: torch.device) -> bool:
        return True

    def copied_out(self, tensor: Tensor) -> tuple[_OnHost, None]:
        if torch._C._current_graph_task_id() == -1:  # no backward pass is running
            self.recorder.relabel(tensor, COMPONENT)
        return _OnHost(tensor.shape, tensor.stride(), tensor.dtype, tensor.nbytes), None

    def copied_back(self, sent: Waiting) -> tuple[Tensor, None]:
        host: Any = sent.host
        component, self.recorder.component = self.recorder.component, COMPONENT
        try:
            return torch.empty_strided(host.shape, host.strides, dtype=host.dtype), None
        finally:
            self.recorder.component = component

    def wait_for(self, event: object, tensor: Tensor) -> None:
        pass


class _TracedFrame(HostFrame):
    """A frame that marks its recomputation in the recording. A trace draws no random numbers."""

    __slots__ = ()
    layers: TracedLayers

    def generators(self, device: torch.device) -> Any:
        return _NoGenerators()

    def recompute(self) -> None:
        with self.layers.recomputation():
            super().recompute()


class _NoGenerators:
    def have_moved(self) -> bool:
        return False


class TracedLayers(LayersOnHost):
    """The checkpointing function of the layers in a trace. recomputation: a context for each recomputation."""

    def __init__(
        self, recorder: TraceRecorder, recomputation: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        self.input_offload, self.result_offload, self.saved_offload = (_TracedOffload(recorder) for _ in range(3))
        self.newest = None
        self.recomputation = recomputation

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            function = functools.partial(function, **kwargs)
        if not torch.is_grad_enabled():
            return function(*args)
        # `run_recomputed` would take PyTorch's checkpoint, because the recorder is a dispatch mode.
        output = run_frame(_TracedFrame(self, function, args, torch.device("cpu")), args)
        self.settle()
        return output
