"""Gradient accumulation fusion: a backward adds a weight's gradient to `.grad` within the product that computes it.

Autograd makes each gradient as a new tensor and adds it to `.grad` afterwards. From the second micro-batch on, that is
a second tensor of the weight's size and a pass over both. A backward that writes to `.grad` itself and returns None
needs neither. Megatron-LM calls this gradient accumulation fusion.

Only a backward pass that would accumulate may do so. `torch.autograd.grad` must not write to `.grad`, and hooks on the
weight must see its gradient. `LeafGradient` therefore asks autograd's engine whether the running pass accumulates for
this weight, and a training step allows the fusion for its own passes alone.

A node that gets None still runs: autograd calls the hooks of the weight's accumulation node afterwards. DDP copies
`.grad` into its buckets in such a hook.

A CUDA graph is captured from `torch.autograd.grad` and writes to buffers that become `.grad` later. `gradients_into`
gives these buffers to the backward pass that is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge

# The planner traces fake tensors. Other subclasses, such as DTensor, accumulate in their own way.
_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor)

_steps = 0
"""Training steps that allow the fusion now. Not per thread: a GPU's backward runs in a thread of autograd."""


@contextlib.contextmanager
def accumulation_fusion() -> Iterator[None]:
    """Let the backward passes inside add the gradients of weights to `.grad` in place.

    Hold it around the forward and the backward of a micro-batch, on the stream that reads the gradients.
    """
    global _steps
    _steps += 1
    try:
        yield
    finally:
        _steps -= 1


class Target(NamedTuple):
    """The tensor that receives a weight's gradient."""

    tensor: Tensor
    accumulate: bool
    """Whether to add to the tensor; False: overwrite it."""


class GradientBuffers:
    """Buffers that receive the gradients of weights in the products, instead of `.grad`.

    Args:
        buffers: Each weight, and its buffer or None. The backward pass returns the gradients of all other weights.
        adds: Whether the first product of each weight adds to its buffer. False: it overwrites the buffer. Further
            products of the weight add.
    """

    def __init__(self, buffers: Iterable[tuple[Tensor, Tensor | None]] = (), *, adds: bool = False) -> None:
        self._buffers = {id(weight): buffer for weight, buffer in buffers if _takes(buffer, weight)}
        self._adds, self._written = adds, set[int]()

    def target_of(self, weight: Tensor) -> Target | None:
        """Returns the target of the next product of the weight; None: the backward returns its gradient."""
        buffer = self._buffers.get(id(weight))
        if buffer is None:
            return None
        accumulate = self._adds or self.holds(weight)
        self._written.add(id(weight))
        return Target(buffer, accumulate)

    def holds(self, weight: Tensor) -> bool:
        """Whether a product of the weight has gone to its buffer."""
        return id(weight) in self._written


_buffers: GradientBuffers | None = None


@contextlib.contextmanager
def gradients_into(buffers: GradientBuffers) -> Iterator[None]:
    """Let the backward passes inside write gradients to these buffers and return None for them.

    The forward pass of such a backward pass has to run inside too, with any buffers. Capture one layer at a time.
    """
    global _buffers
    before, _buffers = _buffers, buffers
    try:
        yield
    finally:
        _buffers = before


class LeafGradient:
    """The `.grad` of a weight, for the backward of one call that reads the weight."""

    __slots__ = ("node", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.node: Any = get_gradient_edge(weight).node
        """Autograd's node that accumulates into `weight.grad`."""

    @classmethod
    def of(cls, weight: Tensor) -> LeafGradient | None:
        """None if a backward must return the gradient of `weight`. Call it in the forward."""
        if not (_steps or _buffers is not None) or not (
            weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()
        ):
            return None
        if torch.compiler.is_compiling() or type(weight) not in _TYPES:
            return None
        return None if torch._C._functorch.is_functorch_wrapped_tensor(weight) else cls(weight)

    def to_add_to(self) -> Tensor | None:
        """`.grad` if the running backward pass may add to it, else None. Call it in the backward.

        It is None in the first micro-batch, with hooks on the weight, under `create_graph=True`, in
        `torch.autograd.grad`, and if `.grad` is not an ordinary tensor of the weight's dtype or fp32.
        """
        weight, grad = self.weight, self.weight.grad
        if grad is None or not _steps or torch.is_grad_enabled():
            return None
        hooks: Any = weight._backward_hooks, weight._post_accumulate_grad_hooks
        if any(hooks) or not _takes(grad, weight):
            return None
        return grad if self._accumulates() else None

    def target(self) -> Target | None:
        """The tensor to which the running backward pass may write the gradient; None: it returns the gradient.

        Call it in the backward.
        """
        if _buffers is not None:
            return _buffers.target_of(self.weight)
        grad = self.to_add_to()
        return None if grad is None else Target(grad, accumulate=True)

    def _accumulates(self) -> bool:
        """Whether the running pass accumulates into `.grad`. It does not if it leaves the weight out of its inputs."""
        try:
            return bool(torch._C._will_engine_execute_node(self.node))
        except RuntimeError:  # torch.autograd.grad, which returns the gradient of this weight
            return False


def _takes(grad: Tensor | None, weight: Tensor) -> bool:
    """Whether a product may write the gradient of `weight` to `grad`."""
    if grad is None or type(grad) not in _TYPES or grad.dtype not in (weight.dtype, torch.float32):
        return False
    return grad.layout == torch.strided and grad.shape == weight.shape and grad.is_contiguous()


def gradient_to_add_to(leaf: LeafGradient | None) -> Tensor | None:
    """`leaf.to_add_to()`; None without a leaf."""
    return None if leaf is None else leaf.to_add_to()
