"""Linear layers whose backward adds the weight's gradient to `.grad` in the product (ops/accumulation_fusion.py).

The first micro-batch of a step has no `.grad` yet. Its backward returns the gradient, as PyTorch's layer does. In a
CUDA graph it writes the gradient to the graph's buffer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.accumulation_fusion import LeafGradient
from tigon.ops.lm_head import keeps_graph, no_autocast, product_dtype, product_into

# N tokens, H input width, F output width.


def fuse_linears(model: nn.Module) -> int:
    """Let the trained linear layers of this instance add to `.grad` in place. Returns their number.

    Left alone: a head that tigon has patched, whose loss does it itself; adapters; experts, which are no linear layers;
    and layers with a forward of their own.
    """
    layers = [module for name, module in model.named_modules() if "lora_" not in name and _is_plain(module)]
    for layer in layers:
        layer.forward = FusedLinear(layer)
    return len(layers)


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
        saved = (_Saved.apply(x, weight),) if recomputing else ()
        y: Tensor = _FusedLinear.apply(x, weight, bias, leaf, saved)
        return y


class _Saved(torch.autograd.Function):
    """A node that saves the input and the weight of a layer before the layer computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FH: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_FH)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on this node")


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_FH: Tensor, bias: Tensor | None, leaf: LeafGradient, saved: tuple[Tensor, ...]
    ) -> Tensor:
        ctx.leaf, ctx.saved = leaf, saved
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
                dx = (dy_NF @ weight_FH).view(x.shape)
            if want_weight:
                x_NH, target = x.reshape(-1, x.shape[-1]), ctx.leaf.target()
                if target is None:
                    dw = dy_NF.t() @ x_NH
                else:
                    product_into(dy_NF.t(), x_NH, target.tensor, accumulate=target.accumulate)
            if want_bias:
                db = dy_NF.sum(0)
        return dx, dw, db, None, None
