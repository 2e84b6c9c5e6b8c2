"""Checks on a tiny stand-in, before patching, whether an op computes the same as a module.

A class name proves nothing: subclasses override forward, remote code reuses names, and a release may change a formula.
The stand-in is an object of the module's own class with the module's plain attributes (eps, activation, scaling) and
random parameters of width 8. A check takes under a millisecond. It does not need the weights, which may be quantised,
on the meta device, or on another rank. It runs in training mode, so that dropout shows. Numbers come from a separate
generator and dropout from a fork of the global one, so patching does not change the random state of a run.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

WIDTH = 8
# The original and the op round differently in fp32. A wrong formula is off by far more than this tolerance.
TOLERANCE = 1e-4

_Forward = Callable[..., Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def random(*shape: int, seed: int) -> Tensor:
    """fp32 normal values on the CPU, reproducible by seed."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def rows() -> tuple[Tensor]:
    """x (3, WIDTH): an ordinary row, a row so small that eps decides the result, and a large row."""
    x = random(3, WIDTH, seed=1) * torch.tensor([[1.0], [1e-3], [50.0]], device="cpu")
    return (x.requires_grad_(),)


def many_rows() -> tuple[Tensor]:
    """x (128, WIDTH) in bf16: enough elements to distinguish two ways of rounding."""
    return (random(128, WIDTH, seed=6).to(torch.bfloat16),)


def make_stand_in(
    module: nn.Module,
    parameters: Mapping[str, tuple[int, ...]] = _NOTHING,
    linears: Mapping[str, tuple[int, int]] = _NOTHING,
    attributes: Mapping[str, Any] = _NOTHING,
) -> nn.Module:
    """An object of `module`'s class with its plain attributes, in training mode.

    Its own parameters and projections are replaced by random `parameters` (name -> shape) and `linears` (name -> inner,
    outer width). `attributes` replace existing attributes.
    """
    double = object.__new__(type(module))
    nn.Module.__init__(double)
    state = vars(double)
    state.update({name: value for name, value in vars(module).items() if name not in state})
    state.update({name: value for name, value in attributes.items() if hasattr(module, name)})
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        del parameter
        state.pop(name, None)
    for name in module._parameters.keys() - parameters.keys():
        if module._parameters[name] is None:
            double.register_parameter(name, None)
    # Children without weights, such as the activation or a dropout, are the module's own.
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            setattr(double, name, copy.copy(child).train())
    for seed, (name, shape) in enumerate(parameters.items(), start=10):
        setattr(double, name, nn.Parameter(random(*shape, seed=seed)))
    for seed, (name, (inner, outer)) in enumerate(linears.items(), start=20):
        linear = nn.Linear(inner, outer, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            linear.weight.copy_(random(outer, inner, seed=seed))
            linear.bias.zero_()
        setattr(double, name, linear)
    return double


def disagreement(
    make: Callable[[], nn.Module],
    inputs: Callable[[], tuple[Tensor, ...]],
    fused: _Forward,
    original: _Forward,
) -> str | None:
    """The difference between two forwards of a module made by `make`, in outputs or gradients; None if they agree."""

    def measure() -> str | None:
        expected = _measure(make(), inputs(), original)
        return _difference(_measure(make(), inputs(), fused), expected)

    return answered(measure)


def rounding_disagreement(
    make: Callable[[], nn.Module], inputs: Callable[[], tuple[Tensor, ...]], fused: _Forward, original: _Forward
) -> str | None:
    """The difference between two forwards in the place of rounding to bf16, or in the dtype returned; None if equal.

    In fp32 the families' norms are equal. In bf16 they round the normalised value before or after the weight.
    """

    def measure() -> str | None:
        for dtype in (torch.bfloat16, torch.float32):
            want, got = (forward(make().to(dtype), *inputs()) for forward in (original, fused))
            if got.dtype != want.dtype:
                return f"for bf16 with {dtype} parameters the op returns {got.dtype}, the module {want.dtype}"
            share = (got != want).float().mean().item()
            # The sums may run in another order, which changes one element in a thousand.
            if dtype == torch.bfloat16 and share > 0.02:
                return f"it rounds at another place: {share:.0%} of the op's bf16 results differ from the module's"
        return None

    return answered(measure)


def answered(measure: Callable[[], str | None]) -> str | None:
    """The answer of a comparison on stand-ins, or that it raised an error."""
    try:
        with undisturbed():
            return measure()
    except Exception as error:  # the module's forward may raise anything on the stand-in; report it
        return f"its forward cannot be compared with the op ({type(error).__name__}: {first_line(error)})"


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run with real fp32 tensors on the CPU, even if the model is built under another mode.

    Other modes are fake tensors, autocast and another default dtype.
    """
    default_dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with (
            _disable_current_modes(),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
            torch.random.fork_rng(devices=()),
        ):
            yield
    finally:
        torch.set_default_dtype(default_dtype)


def first_line(error: Exception) -> str:
    """The beginning of an error's text, on one line."""
    return (str(error).splitlines() or [""])[0][:120]


def _difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    for name, want in expected.items():
        got = actual[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"the op's {name} is {tuple(got.shape)} {got.dtype}, the module's {tuple(want.shape)} {want.dtype}"
        error_max = ((got - want).abs().max() / want.abs().max().clamp_min(1e-12)).item()
        if not error_max <= TOLERANCE:
            return f"the op's {name} differs from the module's by {error_max:.1e} relative (limit {TOLERANCE:.0e})"
    return None


def _measure(double: nn.Module, inputs: tuple[Tensor, ...], forward: _Forward) -> dict[str, Tensor]:
    result = forward(double, *inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    leaves = [t for t in (*inputs, *double.parameters()) if t.requires_grad]
    # Fixed random weights, so that a wrong sign or swapped rows show in the gradient.
    total = torch.stack([(out * random(*out.shape, seed=5)).sum() for out in outputs]).sum()
    grads = torch.autograd.grad(total, leaves)
    named = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    return {**named, **{f"gradient {i}": grad for i, grad in enumerate(grads)}}
