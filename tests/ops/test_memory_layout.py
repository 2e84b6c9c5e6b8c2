"""Inputs and upstream gradients of any strides, offsets beyond int32, and no tokens at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backends import HAS_GPU
from helpers import (
    CONTRACT,
    assert_same,
    cast,
    contract_cases,
    differentiable,
    in_fork,
    make,
    poisoned,
    relative_error,
    run,
    tensors_of,
    upstream_for,
    virtually_strided,
    with_leaves,
)
from tests.ops.cases import cases_of
from tigon.ops import OPS, Case, Op


def _expanded(t: Tensor) -> Tensor:
    # Not along the vocabulary of a head's (V, H): equal logits have a gradient of exactly 0 to compare rounding with.
    return t[:, :1].expand(t.shape) if t.ndim == 2 else t[:1].expand(t.shape)


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def _every_second_column(t: Tensor) -> Tensor:
    return torch.stack((t, torch.full_like(t, float("nan"))), -1).flatten(-2)[..., ::2]


def _one_element_off(t: Tensor) -> Tensor:
    return torch.cat((t.new_full((1,), float("nan")), t.reshape(-1)))[1:].view(t.shape)


def _slice_of_wider_rows(t: Tensor) -> Tensor:
    return torch.cat((torch.full_like(t, float("nan")), t, torch.full_like(t, float("nan"))), -1)[
        ..., t.shape[-1] : 2 * t.shape[-1]
    ]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": _expanded,
    "transposed": _transposed,
    "every-second-column": _every_second_column,
    "one-element-off": _one_element_off,
    "slice-of-wider-rows": _slice_of_wider_rows,
}
# Sums may run in another order over other strides in the reference, and in the products of matrices.
ULPS = 8.0


def only_an_offset(layout: str, backend: str) -> Any:
    """The marks of a layout whose misaligned addresses show on a GPU alone."""
    interpreted = backend == "kernel" and not HAS_GPU
    if layout == "one-element-off" and interpreted:
        return pytest.mark.second_proof("in the interpreter it differs by an offset, as a slice of wider rows does")
    return ()


def laid_out_cases() -> list[Any]:
    """(backend, op, case, layout). The multi-head kernels are linear_cross_entropy's, and 50 programs a call: the
    interpreter has two layouts of them, rows that are one row and rows with a gap."""
    two = ("expanded", "slice-of-wider-rows")
    return [
        pytest.param(
            backend, op, case, layout, id=f"{backend}-{op.name}-{case.id}-{name}", marks=only_an_offset(name, backend)
        )
        for backend, op, case in (each.values for each in contract_cases(first=True, heads=True))
        for name, layout in LAYOUTS.items()
        if name in two or backend == "reference" or HAS_GPU or not op.name.startswith("multi_head")
    ]


@pytest.mark.parametrize((*CONTRACT, "layout"), laid_out_cases(), indirect=["backend"])
@pytest.mark.parametrize(
    "dtype",
    # Alignment decides the width of a GPU's loads, and the 16-bit ones have further to fall.
    [pytest.param(torch.float32, id="fp32"), pytest.param(torch.float16, id="fp16", marks=pytest.mark.gpu)],
)
def test_inputs_of_any_strides_give_the_same_result(
    op: Op, case: Case, dtype: torch.dtype, layout: Callable[[Tensor], Tensor], backend: Any
) -> None:
    """Expanded, transposed, strided, misaligned."""
    inputs = make(op, case, dtype, backend.device)
    names = differentiable(op, inputs)
    laid_out = {name: layout(inputs[name]) if name in names else t for name, t in inputs.items()}
    compact = {name: laid_out[name].contiguous() if name in names else t for name, t in inputs.items()}
    with poisoned():
        got = run(op.call, op, with_leaves(op, laid_out, lambda t: t))
    upstream = upstream_for(got.outputs)
    expected = run(op.call, op, with_leaves(op, compact), upstream).named()
    truth: dict[str, Tensor] = {}
    for name, value in got.named().items():
        difference = relative_error(value, expected[name])
        if difference > ULPS * torch.finfo(value.dtype).eps:
            # A divergence's gradient is a small difference of large numbers. A product with other strides may take
            # another algorithm, with other rounding: the result must still obey the rule of twice the error.
            truth = truth or run(op.oracle, op, with_leaves(op, cast(laid_out, torch.float64)), upstream).named()
            assert difference <= 3 * relative_error(expected[name], truth[name]), (name, difference)


def _ones(t: Tensor) -> Tensor:
    return t.new_ones(()).expand(t.shape)


UPSTREAM = {**LAYOUTS, "ones-expanded": _ones}


def upstream_cases() -> list[Any]:
    """(backend, op, case, layout)."""
    return [
        pytest.param(*each.values, layout, id=f"{each.id}-{name}", marks=only_an_offset(name, each.values[0]))
        for each in contract_cases(first=True)
        for name, layout in UPSTREAM.items()
    ]


@pytest.mark.parametrize((*CONTRACT, "layout"), upstream_cases(), indirect=["backend"])
def test_upstream_gradients_of_any_strides_give_the_same_gradient(
    op: Op, case: Case, layout: Callable[[Tensor], Tensor], backend: Any
) -> None:
    """`y.sum().backward()` sends a gradient of stride 0; an attention behind rope sends a transposed one."""
    # A loss has a gradient of more than one number where it is not reduced.
    case = next((c for c in cases_of(op) if c.options.get("reduction") == "none"), case)
    leaves = with_leaves(op, make(op, case, torch.float32, backend.device))
    outputs = tensors_of(op.call(**leaves))
    if any(t.ndim == 0 for t in outputs):
        pytest.skip("a scalar has no strides")
    upstream = [layout(g) for g in upstream_for(outputs)]
    wanted = [leaves[n] for n in differentiable(op, leaves)]
    got = torch.autograd.grad(outputs, wanted, upstream, retain_graph=True)
    expected = torch.autograd.grad(outputs, wanted, [g.contiguous() for g in upstream])
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= ULPS * torch.finfo(a.dtype).eps


# Shapes with 9 entries along each outer dimension; a dimension to spread for each input.
VIRTUAL = {
    "rms_norm": ((9, 40), {"x": 0}),
    "add_rms_norm": ((9, 40), {"x": 0, "residual": 0}),
    "layer_norm": ((9, 40), {"x": 0}),
    "swiglu": ((9, 40), {"gate": 0, "up": 0}),
    "geglu": ((9, 40), {"gate": 0, "up": 0}),
    "rope": ((9, 9, 9, 16), {"q": 0, "k": 0}),
    "rope tokens": ((9, 9, 9, 16), {"q": 2, "k": 2, "cos": -2, "sin": -2}),
    "rope heads": ((9, 9, 9, 16), {"q": 1, "k": 1}),
    "cross_entropy": ((9, 40), {"logits": 0}),
    "linear_cross_entropy": ((9, 16, 40), {"hidden": 0}),
}


@pytest.mark.parametrize("name", VIRTUAL)
def test_offsets_beyond_int32_are_addressed_right(name: str, backend: Any) -> None:
    """Row · stride > 2^31, in the inputs and in the upstream gradient; only the touched pages are real."""
    op = OPS[name.split()[0]]
    shape, spread = VIRTUAL[name]
    case = dataclasses.replace(op.case, shape=shape, options={"kv_heads": 9} if op.name == "rope" else {})
    dim = next(iter(spread.values()))

    def compare() -> None:
        compact = make(op, case, torch.float16, backend.device)
        expected = run(op.call, op, with_leaves(op, compact))
        far = {n: virtually_strided(t, spread[n]) if n in spread else t for n, t in compact.items()}
        assert_same(run(op.call, op, with_leaves(op, far, lambda t: t)), expected, ulps=ULPS)
        if expected.outputs[0].ndim:
            upstream = [virtually_strided(g, dim) for g in upstream_for(expected.outputs)]
            assert_same(run(op.call, op, with_leaves(op, compact), upstream), expected, ulps=ULPS)

    # Only the interpreter can take this process down; and a fork after CUDA has started cannot run autograd.
    in_fork(compare) if backend.interpreted else compare()


# The dimension of a case's shape that counts tokens, for the first case of each op.
TOKENS = {"attention_with_sinks": 2, "rope": 2, "topk_sigmoid": 0, "topk_softmax": 0, "load_balancing_loss": 0}


@pytest.mark.parametrize(CONTRACT, contract_cases(first=True), indirect=["backend"])
@pytest.mark.parametrize("which", ["tokens", "batch"])
def test_empty_inputs_give_empty_outputs_and_zero_gradients(op: Op, case: Case, which: str, backend: Any) -> None:
    """Outputs without elements, losses of 0, gradients of exactly 0 for the parameters."""
    shape = list(case.shape)
    shape[TOKENS.get(op.name, 1) if which == "tokens" else 0] = 0
    empty = dataclasses.replace(case, shape=tuple(shape))
    with poisoned():
        got = run(op.call, op, with_leaves(op, make(op, empty, torch.float32, backend.device)))
    for name, t in got.named().items():
        assert not t.numel() or (t == 0).all(), f"{name} of nothing is {t}"
    full = run(op.call, op, with_leaves(op, make(op, case, torch.float32, backend.device)))
    assert got.named().keys() == full.named().keys()
    assert [t.ndim for t in got.outputs] == [t.ndim for t in full.outputs]
