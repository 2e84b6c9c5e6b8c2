"""Drops inputs of linear layers that a norm or a gated unit computed, and recomputes them in the backward pass.

A linear layer saves its input for the gradient of its weight. If tigon's RMSNorm or gated unit computed this input, it
can be computed again from what that op saved for its own backward pass, in one pass over memory. No matrix product is
repeated. The op runs again with the tensors of the forward pass, so the result is the same bit for bit.

PyTorch's selective checkpointing reaches the same result with a dispatch mode around every operator of a layer, which
takes more host time than small operators take on a GPU. Here only the linear layers call Python, once per saved tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tigon.ops.glu import GLU, glu_fwd
from tigon.ops.norms.norm import norm_fwd, norm_options
from tigon.ops.norms.rms_norm import AddRMSNorm, RMSNorm


def _glu(node: Any) -> Tensor:
    gate, up = node.saved_tensors
    return glu_fwd(gate, up, node.activation)  # type: ignore[no-any-return]


def _rms_norm(node: Any) -> Tensor:
    """Both ops save the norm's input, which for `add_rms_norm` is the sum, and return the normalised tensor first."""
    x, weight, _ = node.saved_tensors
    y, *_ = norm_fwd(x, None, weight, None, norm_options(node.eps, node.offset, False, node.fp32_weight))
    return y  # type: ignore[no-any-return]


# Autograd function -> its output, computed again from its node.
_COMPUTE: Mapping[type[torch.autograd.Function], Callable[[Any], Tensor]] = {
    GLU: _glu,
    RMSNorm: _rms_norm,
    AddRMSNorm: _rms_norm,
}
_CAST = "ToCopyBackward0"
# Nodes of views that keep the order of the elements.
_VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"})


class DroppedInputs:
    """The dropped inputs of one pass through a decoder layer. Linear layers that share an input share its result."""

    def __init__(self) -> None:
        self._cells: dict[tuple[Any, torch.dtype], _Cell] = {}

    def saving(self) -> saved_tensors_hooks:
        """Hooks for the call of one linear layer, or of anything that saves only its inputs and not its outputs."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Any:
        node = _producer(tensor)
        if node is None:
            return tensor
        key = node, tensor.dtype
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(node, tensor.dtype)
        cell.uses += 1
        return _Dropped(cell, tensor.shape)


class _Dropped:
    __slots__ = ("cell", "shape")

    def __init__(self, cell: _Cell, shape: torch.Size) -> None:
        self.cell, self.shape = cell, shape


class _Cell:
    """The output of a node in one dtype. It is computed at the first of its uses and freed at the last."""

    __slots__ = ("dtype", "left", "node", "task", "uses", "value")

    def __init__(self, node: Any, dtype: torch.dtype) -> None:
        self.node, self.dtype = node, dtype
        self.uses = self.left = 0
        self.value: Tensor | None = None
        self.task = -1
        """The backward pass in which `value` was computed."""

    def take(self) -> Tensor:
        task = torch._C._current_graph_task_id()
        if self.value is None or self.task != task:
            with torch.no_grad():
                self.value = _COMPUTE[self.node._forward_cls](self.node).to(self.dtype)
            self.task, self.left = task, self.uses
        value = self.value
        self.left -= 1
        if self.left <= 0:
            self.value = None
        return value


def _unpack(packed: Any) -> Tensor:
    return packed.cell.take().reshape(packed.shape) if isinstance(packed, _Dropped) else packed


def _producer(tensor: Tensor) -> Any:
    """The node that computed the tensor, except for views and at most one cast, if it can run again; else None."""
    node: Any = None if tensor.output_nr else tensor.grad_fn
    casts = 0
    while node is not None:
        if getattr(type(node), "_forward_cls", None) in _COMPUTE:
            return node
        name = type(node).__name__
        casts += name == _CAST
        if casts > 1 or (name != _CAST and name not in _VIEWS):
            return None
        node, output = node.next_functions[0]
        if output:
            return None
    return None
