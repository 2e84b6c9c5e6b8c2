"""The operators as PyTorch's machinery sees them: schemas, fakes, torch.compile, autocast, functorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses import FakeTensorMode

from backends import HAS_GPU, kernels_on_the_cpu
from helpers import (
    CONTRACT,
    assert_same,
    contract_cases,
    differentiable,
    first_cases,
    make,
    relative_error,
    run,
    tensors_of,
    upstream_for,
    with_leaves,
)
from tests.ops.cases import cases_of
from tigon.ops import OPS, Case, Op, gradient_sums
from tigon.ops.decode_attention import decode_attention
from tigon.ops.dispatch import Differentiable, Primitive

# Operators of tigon by name.
OPERATORS = sorted(
    {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("tigon::")}
)

# PyTorch's check of a schema compares tensors by arithmetic, which it lacks for FP8.
FP8_OPERATORS = ("fp8_cast", "fp8_linear", "fp8_product")


def _copied(value: Any, keep_requires_grad: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(keep_requires_grad and value.requires_grad)
    return type(value)(_copied(v, keep_requires_grad) for v in value) if isinstance(value, (list, tuple)) else value


@contextmanager
def _recorded(calls: dict[str, list[tuple[Any, ...]]]) -> Iterator[None]:
    """Collect the arguments of every operator that runs."""
    primitive, differentiable_ = Primitive.__call__, Differentiable.__call__

    def record(operator: Primitive | Differentiable, args: tuple[Any, ...], keep_requires_grad: bool) -> None:
        flat = args if operator.signature is None else tuple(operator.signature.flatten(args))
        name = operator._operator._schema.name.split("::")[1]
        calls.setdefault(name, []).append(_copied(flat, keep_requires_grad))

    def of_primitive(self: Primitive, *args: Any) -> Any:
        record(self, args, False)
        return primitive(self, *args)

    def of_differentiable(self: Differentiable, *args: Any) -> Any:
        record(self, args, True)
        return differentiable_(self, *args)

    with patch.object(Primitive, "__call__", of_primitive), patch.object(Differentiable, "__call__", of_differentiable):
        yield


@pytest.fixture(scope="module")
def calls() -> dict[str, list[tuple[Any, ...]]]:
    """Arguments by operator, from small cases on the CPU's reference: as eager code calls it, and as Dynamo does."""
    recorded: dict[str, list[tuple[Any, ...]]] = {}
    for compiling in (False, True):
        with _recorded(recorded), patch("torch.compiler.is_compiling", lambda compiling=compiling: compiling):
            for op in OPS.values():
                for case in cases_of(op):
                    if case.small and max(case.shape) <= 200:
                        run(op.call, op, with_leaves(op, make(op, case, torch.float32)))
    with _recorded(recorded):  # in place only of what was computed
        for up in (torch.randn(4, 32), None):
            gate = torch.randn(4, 32, requires_grad=True) * 1.0
            OPS["swiglu"].call(gate, None if up is None else up.requires_grad_() * 1.0, inplace=True).sum().backward()
    with _recorded(recorded):  # between FP8 layers, which read the largest magnitudes
        x, weight, table = torch.randn(2, 6, 32, requires_grad=True), torch.randn(32, 32), torch.randn(6, 16)
        y, _ = OPS["add_rms_norm"].call(OPS["fp8_linear"].call(x, weight), x, weight[0], find_amax=True)
        q, k = (OPS["fp8_linear"].call(y, weight).view(2, 6, 2, 16).transpose(1, 2) for _ in range(2))
        OPS["swiglu"].call(*OPS["rope"].call(q, k, table, table), find_amax=True).sum().backward()
    with _recorded(recorded):  # the gradient of an embedding, one of whose tokens occurs twice
        gradient_sums.add_rows_(torch.zeros(8, 4), torch.randn(3, 4), torch.tensor([1, 5, 1]), -1)
    with _recorded(recorded):  # decoding, whose operator has no op of its own
        bounds = torch.tensor([[0, 3, 3, 6, 0, 2], [0, 3, 6, 8, 0, 0]], dtype=torch.int32)
        q, k, v = torch.randn(2, 4, 8), torch.randn(2, 12, 8), torch.randn(2, 12, 8)
        decode_attention(q, k, v, bounds, None, 0.3, 0.0, 3, 3, 2)
    with _recorded(recorded):  # frozen heads, which the cases train
        hidden, head = torch.randn(6, 16, requires_grad=True), torch.randn(32, 16)
        logps = OPS["linear_logprobs"].call(hidden, head, torch.arange(6))
        (logps if isinstance(logps, torch.Tensor) else logps[0]).sum().backward()
        OPS["linear_kl"].call(hidden, head, torch.randn(6, 8), torch.randn(32, 8)).sum().backward()
    # With kernels, bf16 has separate operators: the product returns exponentials of the logits.
    op = OPS["linear_cross_entropy"]
    with _recorded(recorded), nullcontext() if HAS_GPU else kernels_on_the_cpu():
        inputs = make(op, op.case, torch.bfloat16, "cuda" if HAS_GPU else "cpu")
        run(op.call, op, with_leaves(op, inputs))
    for name, case in (  # the weights of the records' cases are dense
        ("lora_linears", Case(id="4-bit", shape=(3, 64, 24, 16, 4), options={"nf4": True})),
        ("experts", Case(id="4-bit", shape=(3, 2, 4, 32), options={"inner": 32, "mxfp4": True})),
    ):
        op = OPS[name]
        with _recorded(recorded):
            inputs = make(op, case, torch.float32)
            run(op.call, op, with_leaves(op, inputs))
    return recorded


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_keeps_the_rules_of_torch_library(name: str, calls: dict[str, list[tuple[Any, ...]]]) -> None:
    """Schema (nothing mutated, no output aliases an input), autograd registration, fake against real."""
    assert name in calls, f"no small case of any op reaches tigon::{name}"
    operator = getattr(torch.ops.tigon, name).default
    checks = ("test_autograd_registration", "test_faketensor", *(() if name in FP8_OPERATORS else ("test_schema",)))
    for args in _distinct(calls[name]):
        torch.library.opcheck(operator, args, test_utils=checks)


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_can_be_traced_with_dynamic_shapes(name: str, calls: dict[str, list[tuple[Any, ...]]]) -> None:
    """AOTAutograd, as torch.compile(dynamic=True) uses it, forward and backward."""
    operator = getattr(torch.ops.tigon, name).default
    torch.library.opcheck(operator, calls[name][0], test_utils="test_aot_dispatch_dynamic")


def _distinct(calls: list[tuple[Any, ...]], limit: int = 6) -> list[tuple[Any, ...]]:
    """Calls that differ in which optional arguments are there and in their flags."""
    kinds = {}
    for args in calls:
        kind = tuple((a.ndim, a.requires_grad) if isinstance(a, torch.Tensor) else type(a) for a in args)
        flags = tuple(a for a in args if isinstance(a, (bool, str)))
        kinds.setdefault((kind, flags), args)
    chosen = list(kinds.values())
    step = max(1, len(chosen) // limit)
    return chosen[::step]


def _more_tokens(op: Op, case: Case, tokens: int) -> Case:
    shape = list(case.shape)
    place = {
        "attention_with_sinks": 2,
        "rope": 2,
        "experts": 0,
        "topk_sigmoid": 0,
        "topk_softmax": 0,
        "load_balancing_loss": 0,
    }
    shape[place.get(op.name, 1)] = tokens
    return dataclasses.replace(case, shape=tuple(shape))


COMPILED = [each for each in first_cases() if "shared_prefix_attention" not in str(each.id)]
"""A row of sequences is a Python object, so `shared_prefix_attention` runs between two graphs."""


@pytest.mark.parametrize(("op", "case"), COMPILED)
def test_compiled_op_is_one_graph_for_all_token_counts_and_equals_eager(op: Op, case: Case) -> None:
    """One graph without breaks for every token count, forward and backward, equal to eager."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.reset()
    compiled = torch.compile(op.call, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, tokens in enumerate((9, 12, 30)):
        inputs = make(op, _more_tokens(op, case, tokens), torch.float32, device)
        expected = run(op.call, op, with_leaves(op, inputs))
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            assert_same(run(compiled, op, with_leaves(op, inputs)), expected, ulps=8.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), COMPILED)
def test_inductor_equals_eager_without_recompiling(op: Op, case: Case) -> None:
    """The same through the default backend, twenty token counts."""
    torch._dynamo.reset()
    compiled = torch.compile(op.call, fullgraph=True, dynamic=True)
    for tokens in range(9, 29):
        inputs = make(op, _more_tokens(op, case, tokens), torch.float32, "cuda")
        expected = run(op.call, op, with_leaves(op, inputs))
        with torch._dynamo.config.patch(error_on_recompile=tokens > 9):
            assert_same(run(compiled, op, with_leaves(op, inputs)), expected, ulps=8.0)


@pytest.mark.parametrize(CONTRACT, contract_cases(), indirect=["backend"])
def test_fake_and_meta_tensors_get_the_real_shapes_and_dtypes(op: Op, case: Case, backend: Any) -> None:
    """The planner traces models whose tensors have shapes and dtypes but no data."""
    inputs = make(op, case, torch.float32, backend.device)
    real = run(op.call, op, with_leaves(op, inputs))
    expected = {name: (t.shape, t.dtype, t.stride()) for name, t in real.named().items()}
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in inputs.items()}
        got = run(op.call, op, with_leaves(op, fakes))
    assert {name: (t.shape, t.dtype, t.stride()) for name, t in got.named().items()} == expected
    metas = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in inputs.items()}
    got = run(op.call, op, with_leaves(op, metas))
    for name, t in got.named().items():
        assert t.is_meta
        assert (t.shape, t.dtype) == expected[name][:2], name


@pytest.mark.parametrize(CONTRACT, contract_cases(first=True), indirect=["backend"])
def test_functorch_gets_the_right_gradient_or_a_clear_error(op: Op, case: Case, backend: Any) -> None:
    """Vmap and func.grad work, or say that they do not."""
    inputs = make(op, case, torch.float32, backend.device)
    name = op.grads[0]

    def total(t: torch.Tensor) -> torch.Tensor:
        return sum(o.square().sum() for o in tensors_of(op.call(**{**inputs, name: t})))  # type: ignore[return-value]

    leaf = inputs[name].clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(leaf), leaf)
    for transformed in (lambda: torch.func.grad(total)(inputs[name]), lambda: torch.vmap(total)(inputs[name][None])[0]):
        try:
            got = transformed()
        except RuntimeError as error:
            assert "setup_context" in str(error) or "vmap" in str(error), f"unclear: {error}"
            continue
        assert relative_error(got, expected if got.ndim else total(inputs[name])) <= 1e-5


# Under autocast these inputs are cast to 16 bits; the others keep their dtype, as their PyTorch formulas keep fp32.
AUTOCAST_TO_16_BITS = {
    "experts": ("hidden", "gate_up", "down", "gate_up_bias", "down_bias"),
    "fp8_linear": ("x", "weight", "bias"),
    "linear_cross_entropy": ("hidden", "weight", "bias"),
    "linear_kl": ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias"),
    "linear_logprobs": ("hidden", "weight", "bias"),
    "lora_linear": ("x", "weight", "bias", "adapter_x"),
    "lora_linears": ("x", "weight_0", "weight_1", "bias_1"),
    "multi_head_linear_cross_entropy": tuple(f"{n}_{k}" for n in ("hidden", "weight") for k in range(3)),
}


@pytest.mark.parametrize(CONTRACT, contract_cases(first=True), indirect=["backend"])
def test_autocast_changes_matrix_products_alone(op: Op, case: Case, backend: Any) -> None:
    """Gradients keep their parameter's dtype; products run in autocast's, everything else as without it."""
    inputs = make(op, case, torch.float32, backend.device)
    narrow = {
        n: t.bfloat16() if n in AUTOCAST_TO_16_BITS.get(op.name, ()) and isinstance(t, torch.Tensor) else t
        for n, t in inputs.items()
    }
    expected = run(op.call, op, with_leaves(op, narrow))
    with torch.autocast(backend.device.type, dtype=torch.bfloat16):
        got = run(op.call, op, with_leaves(op, inputs))
    for name, t in got.named().items():
        assert relative_error(t, expected.named()[name].to(t.dtype)) == 0.0, name
    for name, t in got.grads.items():
        assert t.dtype == inputs[name].dtype


@pytest.mark.parametrize(CONTRACT, contract_cases(first=True), indirect=["backend"])
def test_backward_under_autocast_equals_backward_outside(op: Op, case: Case, backend: Any) -> None:
    """A loss.backward() inside the autocast block is common and must not round the gradients' products."""
    inputs = make(op, case, torch.float16, backend.device)
    expected = run(op.call, op, with_leaves(op, inputs))
    leaves = with_leaves(op, inputs)
    outputs = tensors_of(op.call(**leaves))
    names = differentiable(op, leaves)
    with torch.autocast(backend.device.type, dtype=torch.bfloat16):
        grads = torch.autograd.grad(outputs, [leaves[n] for n in names], upstream_for(outputs))
    for name, grad in zip(names, grads, strict=True):
        assert torch.equal(grad, expected.grads[name]), name


@pytest.mark.parametrize(CONTRACT, contract_cases(first=True), indirect=["backend"])
def test_checkpointed_gradient_equals_the_plain_gradient(op: Op, case: Case, backend: Any) -> None:
    """Activation checkpointing runs the forward again inside the backward."""
    inputs = make(op, case, torch.float32, backend.device)
    expected = run(op.call, op, with_leaves(op, inputs))

    def checkpointed(**leaves: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(lambda: op.call(**leaves), use_reentrant=False)

    assert_same(run(checkpointed, op, with_leaves(op, inputs)), expected)
