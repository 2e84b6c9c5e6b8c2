"""Linear layers whose backward adds the weight's gradient to `.grad` in the product (ops/accumulation_fusion.py).

The first micro-batch of a step has no `.grad` yet. Its backward returns the gradient, as PyTorch's layer does. In a
CUDA graph it writes the gradient to the graph's buffer.

Layers that read the same input, such as the projections to queries, keys and values, sum its gradient in their
products. Autograd would make one tensor per layer and add them afterwards.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.accumulation_fusion import LeafGradient
from tigon.ops.dispatch import no_autocast, product_dtype
from tigon.ops.products import keeps_graph, product_into
from tigon.techniques.checkpointing.recompute import SavedInputs

# N tokens, H input width, F output width.


def fuse_linears(model: nn.Module) -> list[nn.Module]:
    """Let the trained linear layers of this instance add to `.grad` in place. Returns them.

    Left alone: a head that tigon has patched, whose loss does it itself; adapters; experts, which are no linear layers;
    and layers with a forward of their own.
    """
    layers = [module for name, module in model.named_modules() if "lora_" not in name and _is_plain(module)]
    for layer in layers:
        layer.forward = FusedLinear(layer)
    return layers


def has_fused_linears(model: nn.Module) -> bool:
    """Whether `fuse_linears` has changed a layer of the model."""
    return any(isinstance(vars(module).get("forward"), FusedLinear) for module in model.modules())


def _is_plain(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Linear.forward and module.weight.requires_grad


class FusedLinear:
    """Replaces the forward of a linear layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer: Any = layer

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        leaf = LeafGradient.of(weight)
        device = input.device.type
        if leaf is None or (input.dtype != weight.dtype and not torch.is_autocast_enabled(device)):
            return F.linear(input, weight, bias)
        dtype = product_dtype(input, weight)
        bias = None if bias is None else bias.to(dtype)
        # A cast weight is not a leaf. Without a gradient its cast does nothing in the backward.
        x, weight = input.to(dtype), weight.to(dtype)
        # A recomputation ends when all tensors are saved. A function saves its own after its forward, so that the last
        # layer's product would be computed for nothing.
        recomputing = torch._C._current_graph_task_id() != -1
        saved = (SavedInputs.apply(x, x, weight),) if recomputing else ()
        y: Tensor = _FusedLinear.apply(x, weight, bias, leaf, saved, _SharedInput.of(x))
        return y


class _SharedInput:
    """The gradient of a tensor that consecutive layers read, summed in their products.

    The last layer of a backward pass returns the sum, and the others return None. Autograd passes the tensor's gradient
    on after all of them.
    """

    def __init__(self, x: Tensor) -> None:
        self._x, self._version = weakref.ref(x), x._version
        self._nodes: list[Any] = []
        """Weak references to autograd's nodes of the layers. A node refers to this object."""
        self._sums: dict[int, _Sum] = {}
        """The unfinished sum of each backward pass, by autograd's number of the pass. A sum stays if the pass fails, or
        needs no gradient of the tensor: `torch.autograd.grad` of one layer's output and another's weight."""

    @classmethod
    def of(cls, x: Tensor) -> _SharedInput | None:
        """The object of the previous layer if it has read `x` too, and has not been followed by another input."""
        if not x.requires_grad:
            return None
        shared: _SharedInput | None = getattr(_latest, "shared", None)
        if shared is None or shared._x() is not x or shared._version != x._version:
            shared = _latest.shared = cls(x)
        return shared

    def add(self, node: Any) -> None:
        """Let the layer of this node take part."""
        self._nodes = [other for other in self._nodes if other() is not None]
        self._nodes.append(weakref.ref(node))

    def sum(self, node: Any, dy_NF: Tensor, weight_FH: Tensor) -> Tensor | None:
        """Add the share of the running node. Returns the sum [N, H] in the last one, and None before."""
        task = torch._C._current_graph_task_id()
        one = self._sums.setdefault(task, _Sum())
        if one.dx_NH is None:
            one.dx_NH = dy_NF @ weight_FH
        else:
            product_into(dy_NF, weight_FH, one.dx_NH, accumulate=True)
        one.done.add(id(node))
        if any(self._comes(other(), one) for other in self._nodes):
            return None
        return self._sums.pop(task).dx_NH

    @staticmethod
    def _comes(node: Any, one: _Sum) -> bool:
        """Whether the running backward pass will run this node."""
        return node is not None and id(node) not in one.done and bool(torch._C._will_engine_execute_node(node))


class _Sum:
    """The unfinished sum of one backward pass."""

    def __init__(self) -> None:
        self.dx_NH: Tensor | None = None
        self.done: set[int] = set()


_latest = threading.local()
"""The `shared` input of the latest layer in this thread."""


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_FH: Tensor,
        bias: Tensor | None,
        leaf: LeafGradient,
        saved: tuple[Tensor, ...],
        shared: _SharedInput | None,
    ) -> Tensor:
        ctx.leaf, ctx.saved, ctx.shared = leaf, saved, shared
        if shared is not None:
            shared.add(ctx)
        if not saved:
            ctx.save_for_backward(x, weight_FH)
        return F.linear(x, weight_FH, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_FH = ctx.saved[0].grad_fn.saved_tensors if ctx.saved else ctx.saved_tensors
        if not keeps_graph():
            ctx.saved = ()
        want_x, want_weight, want_bias, *_ = ctx.needs_input_grad
        dx = dw = db = None
        dy_NF = dy.reshape(-1, dy.shape[-1])
        with no_autocast(x):
            if want_x:
                # A second derivative needs a product of its own.
                alone = ctx.shared is None or torch.is_grad_enabled()
                dx_NH = dy_NF @ weight_FH if alone else ctx.shared.sum(ctx, dy_NF, weight_FH)
                dx = None if dx_NH is None else dx_NH.view(x.shape)
            if want_weight:
                x_NH, target = x.reshape(-1, x.shape[-1]), ctx.leaf.target()
                if target is None:
                    dw = dy_NF.t() @ x_NH
                else:
                    product_into(dy_NF.t(), x_NH, target.tensor, accumulate=target.accumulate)
            if want_bias:
                db = dy_NF.sum(0)
        return dx, dw, db, None, None, None
