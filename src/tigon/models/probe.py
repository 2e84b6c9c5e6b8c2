"""Does an op compute what a module computes? Asked of a tiny stand-in, before the module is patched.

A class name proves nothing: subclasses override forward, remote code reuses names, and a release may change a formula.
The stand-in is an object of the module's own class with the module's plain attributes (eps, activation, scaling) and
random parameters of width 8, so the answer costs under a millisecond and does not need the weights, which may be
quantised, on the meta device, or on another rank. Numbers are drawn from a generator of our own: patching a model does
not move the random state of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

WIDTH = 8
# The original and the op round differently in fp32; a wrong formula is off by far more than this.
TOLERANCE = 1e-4

_Forward = Callable[..., Any]


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def rows() -> tuple[Tensor]:
    """x (3, WIDTH): an ordinary row, one so small that eps decides the result, one large."""
    x = _random(3, WIDTH, seed=1) * torch.tensor([[1.0], [1e-3], [50.0]], device="cpu")
    return (x.requires_grad_(),)


def rotary() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (2, 4, 5, WIDTH), k (2, 2, 5, WIDTH), cos and sin (2, 5, WIDTH), both halves equal, as the models make them."""
    angle = _random(2, 5, WIDTH // 2, seed=2).repeat(1, 1, 2)
    q, k = _random(2, 4, 5, WIDTH, seed=3), _random(2, 2, 5, WIDTH, seed=4)
    return q.requires_grad_(), k.requires_grad_(), angle.cos(), angle.sin()


def _stand_in(
    module: nn.Module, parameters: Mapping[str, tuple[int, ...]], linears: Mapping[str, tuple[int, int]]
) -> nn.Module:
    copy = object.__new__(type(module))
    nn.Module.__init__(copy)
    state = vars(copy)
    state.update({name: value for name, value in vars(module).items() if name not in state})
    state["training"] = module.training
    # Children without weights, such as the activation, are the module's own.
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            setattr(copy, name, child)
    for seed, (name, shape) in enumerate(parameters.items(), start=10):
        setattr(copy, name, nn.Parameter(_random(*shape, seed=seed)))
    for seed, (name, (inner, outer)) in enumerate(linears.items(), start=20):
        linear = nn.Linear(inner, outer, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            linear.weight.copy_(_random(outer, inner, seed=seed))
            linear.bias.zero_()
        setattr(copy, name, linear)
    return copy


def disagreement(
    module: nn.Module,
    inputs: Callable[[], tuple[Tensor, ...]],
    fused: _Forward,
    original: _Forward,
    *,
    parameters: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    linears: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> str | None:
    """What differs between two forwards of `module` on the stand-in, outputs and gradients; None where they agree."""
    try:
        # Whatever mode the model is built under (fake tensors, a memory tracker), these numbers are real and our own.
        with _disable_current_modes(), torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            expected = _measure(_stand_in(module, parameters, linears), inputs(), original)
            actual = _measure(_stand_in(module, parameters, linears), inputs(), fused)
            return _difference(actual, expected)
    except Exception as error:  # whatever somebody else's forward raises on the stand-in is the answer
        return f"its forward cannot be compared with the op ({type(error).__name__}: {error})"


def _difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    for name, want in expected.items():
        got = actual[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"the op's {name} is {tuple(got.shape)} {got.dtype}, its own {tuple(want.shape)} {want.dtype}"
        error_max = ((got - want).abs().max() / want.abs().max().clamp_min(1e-12)).item()
        if not error_max <= TOLERANCE:
            return f"the op's {name} differs from its own by {error_max:.1e} relative (limit {TOLERANCE:.0e})"
    return None


def _measure(copy: nn.Module, inputs: tuple[Tensor, ...], forward: _Forward) -> dict[str, Tensor]:
    result = forward(copy, *inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    leaves = [t for t in (*inputs, *copy.parameters()) if t.requires_grad]
    # A fixed, uneven weighting, so that a wrong sign or a swap of rows shows in the gradient.
    total = torch.stack([(out * _random(*out.shape, seed=5)).sum() for out in outputs]).sum()
    grads = torch.autograd.grad(total, leaves)
    named = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    return {**named, **{f"gradient {i}": grad for i, grad in enumerate(grads)}}
