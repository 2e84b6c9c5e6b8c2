"""The guarantees of PyTorch's autograd: inputs stay, graphs can be walked twice, gradients go where asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import (
    CONTRACT,
    assert_same,
    contract_cases,
    differentiable,
    make,
    relative_error,
    run,
    subsets,
    tensors_of,
    upstream_for,
    with_leaves,
)
from tigon.errors import DoubleBackwardError
from tigon.ops import Case, Op


def _tensors(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: t for name, t in inputs.items() if isinstance(t, torch.Tensor)}


@pytest.mark.parametrize(CONTRACT, contract_cases(), indirect=["backend"])
def test_inputs_outputs_and_upstream_gradient_are_not_modified(op: Op, case: Case, backend: Any) -> None:
    """Values and autograd's version counters, after the forward, after the backward, and without gradients."""
    inputs = with_leaves(op, make(op, case, torch.float32, backend.device))
    before = {name: (t.detach().clone(), t._version) for name, t in _tensors(inputs).items()}
    outputs = tensors_of(op.call(**inputs))
    upstream = upstream_for(outputs)
    kept = [(t.detach().clone(), t._version) for t in (*upstream, *outputs)]
    torch.autograd.grad(outputs, [inputs[n] for n in differentiable(op, inputs)], upstream)
    with torch.no_grad():
        op.call(**inputs)
    for name, t in _tensors(inputs).items():
        value, version = before[name]
        assert torch.equal(t.detach(), value), f"{name} was written to"
        assert t._version == version, f"{name} counts as written to"
    for t, (value, version) in zip((*upstream, *outputs), kept, strict=True):
        assert torch.equal(t.detach(), value), "the backward wrote to its upstream gradient or to an output"
        assert t._version == version


@pytest.mark.parametrize(CONTRACT, contract_cases(), indirect=["backend"])
def test_second_backward_equals_the_first(op: Op, case: Case, backend: Any) -> None:
    """With an upstream gradient other than 1, which scaling in place would apply twice."""
    leaves = with_leaves(op, make(op, case, torch.float32, backend.device))
    outputs = tensors_of(op.call(**leaves))
    wanted = [leaves[n] for n in differentiable(op, leaves)]
    upstream = [3.0 * g for g in upstream_for(outputs)]
    first = torch.autograd.grad(outputs, wanted, upstream, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(outputs, wanted, upstream)
    for a, b, c in zip(first, second, kept, strict=True):
        assert torch.equal(b, c), "the second backward is another gradient"
        assert torch.equal(a, c), "the second backward changed the first one's result"


@pytest.mark.parametrize(CONTRACT, contract_cases(first=True), indirect=["backend"])
def test_second_derivative_is_refused(op: Op, case: Case, backend: Any) -> None:
    """A gradient penalty must not lose this op's term without a word."""
    leaves = with_leaves(op, make(op, case, torch.float32, backend.device))
    outputs = tensors_of(op.call(**leaves))
    total = sum(t.sum() for t in outputs)
    with pytest.raises(DoubleBackwardError, match="create_graph"):
        torch.autograd.grad(total, [leaves[n] for n in differentiable(op, leaves)], create_graph=True)


@pytest.mark.parametrize(CONTRACT, contract_cases(), indirect=["backend"])
def test_gradient_is_the_same_whichever_other_inputs_require_one(op: Op, case: Case, backend: Any) -> None:
    """Frozen weights, frozen activations, and every mix."""
    inputs = make(op, case, torch.float32, backend.device)
    full = run(op.call, op, with_leaves(op, inputs))
    upstream = upstream_for(full.outputs)
    for names in subsets(differentiable(op, inputs)):
        leaves = with_leaves(op, inputs, names=names)
        torch.autograd.backward(tensors_of(op.call(**leaves)), upstream)
        for name in differentiable(op, inputs):
            grad = leaves[name].grad
            assert (grad is not None) == (name in names), f"with {names}: gradient of {name} is {grad}"
            if grad is not None:
                # The choice of gradients may change the others by rounding only.
                assert grad.dtype == leaves[name].dtype
                error = relative_error(grad, full.grads[name])
                assert error <= 8 * torch.finfo(grad.dtype).eps, f"with {names}: {name} is off by {error:.1e}"


@pytest.mark.parametrize(CONTRACT, contract_cases(first=True), indirect=["backend"])
@pytest.mark.parametrize("op_first", [True, False], ids=["op-first", "op-last"])
def test_input_with_a_second_consumer_gets_the_sum_of_both_gradients(
    op: Op, case: Case, op_first: bool, backend: Any
) -> None:
    """F(x) + x², where autograd shares gradient tensors between branches and x² has saved x."""
    inputs = make(op, case, torch.float32, backend.device)
    alone = run(op.call, op, with_leaves(op, inputs))
    upstream = upstream_for(alone.outputs)
    leaves = with_leaves(op, inputs)
    names = differentiable(op, leaves)
    squares = sum(leaves[n].square().sum() for n in names)
    weighted = sum((t * g).sum() for t, g in zip(tensors_of(op.call(**leaves)), upstream, strict=True))
    (weighted + squares if op_first else squares + weighted).backward()
    for name in names:
        expected = alone.grads[name] + 2 * inputs[name]
        assert relative_error(leaves[name].grad, expected) <= 4 * torch.finfo(expected.dtype).eps, name


@pytest.mark.parametrize(CONTRACT, contract_cases(first=True), indirect=["backend"])
def test_residual_connection_gets_the_sum_of_both_gradients(op: Op, case: Case, backend: Any) -> None:
    """X + f(x) hands one gradient tensor to both branches; a backward that reuses it spoils the other."""
    inputs = make(op, case, torch.float32, backend.device)
    name = op.grads[0]
    leaves = with_leaves(op, inputs, names=[name])
    outputs = tensors_of(op.call(**leaves))
    if outputs[0].shape != leaves[name].shape:
        outputs[0] = outputs[0].sum().expand(leaves[name].shape)
    upstream = torch.randn(leaves[name].shape, device=backend.device)
    kept = upstream.clone()
    (both,) = torch.autograd.grad(leaves[name] + outputs[0], leaves[name], upstream, retain_graph=True)
    (alone,) = torch.autograd.grad(outputs[0], leaves[name], upstream)
    assert torch.equal(upstream, kept)
    assert relative_error(both, alone + upstream) <= 4 * torch.finfo(both.dtype).eps


@pytest.mark.parametrize(CONTRACT, contract_cases(first=True), indirect=["backend"])
def test_output_modified_in_place_gives_the_right_gradient_or_is_refused(op: Op, case: Case, backend: Any) -> None:
    """`loss *= 2`, or an in-place dropout behind the op. A view made inside the op would refuse outright; an
    output that is saved for backward (add_rms_norm's sum, attention) must refuse in the backward."""
    inputs = make(op, case, torch.float32, backend.device)
    leaves = with_leaves(op, inputs)
    outputs = tensors_of(op.call(**leaves))
    upstream = upstream_for(outputs)
    for t in outputs:
        t.mul_(2.0)
    wanted = [leaves[n] for n in differentiable(op, leaves)]
    if op.name in ("add_rms_norm", "attention_with_sinks", "shared_prefix_attention"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(outputs, wanted, upstream)
        return
    grads = torch.autograd.grad(outputs, wanted, upstream)
    expected = run(op.call, op, with_leaves(op, inputs), [2.0 * g for g in upstream])
    for name, grad in zip(differentiable(op, leaves), grads, strict=True):
        assert relative_error(grad, expected.grads[name]) <= 4 * torch.finfo(grad.dtype).eps, name


def without_gradients() -> list[Any]:
    """(mode, backend, op, case). What inference mode refuses does not depend on the way through the kernels."""
    once = {torch.no_grad: None, torch.inference_mode: "autograd is off on every way, as in no_grad"}
    return [
        pytest.param(mode, *each.values, id=f"{mode.__name__}-{each.id}", marks=each.marks)
        for mode, why in once.items()
        for each in contract_cases(once=why)
    ]


@pytest.mark.parametrize(("mode", *CONTRACT), without_gradients(), indirect=["backend"])
def test_result_without_gradients_is_the_same_and_saves_nothing(op: Op, case: Case, mode: Any, backend: Any) -> None:
    """The same values, no graph, and nothing saved for a backward that will not come."""
    inputs = with_leaves(op, make(op, case, torch.float32, backend.device))
    expected = tensors_of(op.call(**inputs))
    saved = []
    with mode(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = tensors_of(op.call(**inputs))
    assert not saved
    for got, wanted in zip(outputs, expected, strict=True):
        assert not got.requires_grad and got.grad_fn is None
        assert relative_error(got, wanted.detach()) <= 4 * torch.finfo(got.dtype).eps


@pytest.mark.parametrize(
    CONTRACT,
    contract_cases(once="the interpreter runs a launch's programs in order, on every way"),
    indirect=["backend"],
)
def test_second_run_equals_the_first_bit_for_bit(op: Op, case: Case, backend: Any) -> None:
    """No atomics, no order that depends on timing; bit for bit."""
    inputs = make(op, case, torch.float16, backend.device)
    first = run(op.call, op, with_leaves(op, inputs))
    assert_same(run(op.call, op, with_leaves(op, inputs)), first)


@pytest.mark.parametrize(CONTRACT, contract_cases(first=True), indirect=["backend"])
def test_gradient_seen_by_a_hook_does_not_change_later(op: Op, case: Case, backend: Any) -> None:
    """A hook may keep the gradient: later steps leave it unchanged."""
    leaves = with_leaves(op, make(op, case, torch.float32, backend.device))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    outputs = tensors_of(op.call(**leaves))
    for t in (*outputs, *(leaves[n] for n in differentiable(op, leaves))):
        t.register_hook(lambda g: seen.append((g, g.clone())))
    sum(t.square().sum() for t in outputs).backward()
    assert seen
    assert all(torch.equal(kept, copy) for kept, copy in seen)
