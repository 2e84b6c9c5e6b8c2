"""Forward and every gradient of every op, against the unfused formula in fp64."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends import HAS_GPU, HAS_TRITON, kernels_on_the_cpu, tens_of_gib
from helpers import (
    CONTRACT,
    assert_result_within,
    cases,
    cast,
    contract_cases,
    differentiable,
    guarded,
    has_a_way_of_its_own,
    make,
    nudged,
    poisoned,
    run,
    runs_here,
    takes_another_way,
    tensors_of,
    truth_and_baseline,
    upstream_for,
    with_leaves,
)
from tests.ops.cases import cases_of
from tigon.ops import OPS, Case, Op

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# The interpreter cuts fp32 off to bf16 instead of rounding it: factors of one product both too small add up.
INTERPRETED_BF16_FACTOR = 3.0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("op", "case"), cases(large=True))
def test_error_is_at_most_twice_the_unfused_ops(op: Op, case: Case, dtype: torch.dtype, backend: Any) -> None:
    """Poisoned outputs, NaN around the inputs, a random upstream gradient."""
    if not runs_here(case, backend.device) or (backend.interpreted and not case.small):
        pytest.skip("this size is for a GPU")
    with nullcontext() if case.small else tens_of_gib():
        _compare_with_fp64(op, case, dtype, backend)


def _compare_with_fp64(op: Op, case: Case, dtype: torch.dtype, backend: Any) -> None:
    known = takes_another_way(op, case) or has_a_way_of_its_own(op, dtype)
    if backend.interpreted and dtype != torch.float32 and not known:
        pytest.skip("the kernel computes in fp32 and its way there is taken by another case in 16 bits")
    if backend.device.type == "cpu" and dtype == torch.float16 and not known:
        pytest.skip("the reference takes the same way as in bf16")
    inputs = make(op, case, dtype, backend.device)
    with poisoned():
        got = run(op.call, op, with_leaves(op, inputs, guarded))
    upstream = upstream_for(got.outputs)
    truth, baseline = truth_and_baseline(op, inputs, upstream, case.product_orders)
    factor = op.factor(dtype)
    if backend.interpreted and dtype == torch.bfloat16:
        factor *= INTERPRETED_BF16_FACTOR
    assert_result_within(got, truth, baseline, factor)


@pytest.mark.parametrize(("op", "case"), cases())
def test_fp64_inputs_are_computed_in_fp64(op: Op, case: Case, backend: Any) -> None:
    """No kernel has fp64, so fp64 inputs take the reference, on every backend."""
    inputs = cast(make(op, case, torch.float64, backend.device), torch.float64)
    with poisoned():
        got = run(op.call, op, with_leaves(op, inputs, guarded))
    truth, baseline = truth_and_baseline(op, inputs, upstream_for(got.outputs))
    assert_result_within(got, truth, baseline, op.factor(torch.float64))


@pytest.mark.parametrize(("op", "case"), [p for p in cases() if not p.values[0].straight_through])
def test_backward_is_the_derivative_of_the_forward(op: Op, case: Case) -> None:
    """Gradcheck of the reference in fp64, against finite differences and not against another formula."""
    inputs = with_leaves(op, cast(make(op, case, torch.float64), torch.float64))
    names = differentiable(op, inputs)

    def call(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensors_of(op.call(**{**inputs, **dict(zip(names, values, strict=True))})))

    # fast_mode compares one random projection of the Jacobian, which an error in any entry changes.
    assert torch.autograd.gradcheck(call, [inputs[n] for n in names], fast_mode=True)


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@st.composite
def _rope_cases(draw: Any) -> Case:
    D = draw(_integers(2, 100))
    options = {
        "kv_heads": draw(_integers(1, 9)),
        "rotary": 2 * draw(_integers(1, D // 2)),
        "interleaved": draw(st.booleans()),
        "unsqueeze_dim": draw(st.sampled_from((1, 2))),
        "in_memory": draw(st.sampled_from(("BTHD", "BHTD"))),
        "arbitrary_table": draw(st.booleans()),
    }
    B = draw(_integers(1, 3))
    options["table_batch"] = draw(st.sampled_from((0, 1, B)))
    return Case(id="drawn", shape=(B, draw(_integers(1, 9)), draw(_integers(1, 20)), D), options=options)


def _same_options(name: str, shapes: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[Case]:
    """A drawn shape with the options of one of the op's own cases."""
    options = [case.options for case in cases_of(OPS[name])]
    return st.builds(lambda shape, o: Case(id="drawn", shape=shape, options=o), shapes, st.sampled_from(options))


# Two columns and two classes at least: the gradient of one is the little that 1 - 1 leaves, which is all rounding.
_ROWS = st.tuples(_integers(1, 40), _integers(2, 300))
_CLASSES = _integers(2, 60)
DRAWN = {
    "rms_norm": _same_options("rms_norm", _ROWS),
    "add_rms_norm": _same_options("add_rms_norm", _ROWS),
    "layer_norm": _same_options("layer_norm", _ROWS),
    # A case has three groups.
    "gated_rms_norm": _same_options(
        "gated_rms_norm", st.tuples(_integers(1, 40), _integers(2, 100).map(lambda n: 3 * n))
    ),
    "causal_conv1d": _same_options("causal_conv1d", st.tuples(_integers(1, 3), _integers(1, 70), _integers(1, 150))),
    # One head of k and two of v fit every case that has no documents.
    "gated_delta_rule": st.builds(
        lambda shape, state: Case(
            id="drawn",
            shape=(*shape[:2], 1, 2, shape[2]),
            options={"values": shape[3], "state": state, "output_final_state": True},
        ),
        st.tuples(_integers(1, 2), _integers(1, 140), _integers(1, 40), _integers(1, 40)),
        st.booleans(),
    ),
    "rope": _rope_cases(),
    # Eight heads, because a case shares each key head among eight.
    "attention_with_sinks": _same_options(
        "attention_with_sinks", st.tuples(_integers(1, 2), st.just(8), _integers(3, 40), _integers(2, 20))
    ),
    "shared_prefix_attention": _same_options(
        "shared_prefix_attention", st.tuples(st.just(1), st.just(8), _integers(3, 60), _integers(2, 20))
    ),
    "swiglu": _same_options("swiglu", st.tuples(_integers(1, 40), _integers(1, 150).map(lambda n: 2 * n))),
    "geglu": _same_options("geglu", st.tuples(_integers(1, 40), _integers(1, 150).map(lambda n: 2 * n))),
    "cross_entropy": _same_options("cross_entropy", _ROWS),
    "linear_cross_entropy": _same_options(
        "linear_cross_entropy", st.tuples(_integers(1, 20), _integers(1, 20), _CLASSES)
    ),
    "linear_logprobs": _same_options("linear_logprobs", st.tuples(_integers(1, 20), _integers(1, 20), _CLASSES)),
    "linear_kl": _same_options("linear_kl", st.tuples(_integers(1, 20), _integers(1, 20), _CLASSES)),
    "logprobs": _same_options("logprobs", _ROWS),
    "experts": _same_options("experts", st.tuples(*[_integers(1, limit) for limit in (20, 3, 5, 20)])),
    "fp8_linear": _same_options("fp8_linear", st.tuples(*[_integers(1, 40)] * 3)),
    "lora_linear": _same_options("lora_linear", st.tuples(*[_integers(1, 20)] * 3, _integers(1, 8))),
    "lora_linears": st.builds(
        lambda shape, o: Case(id="drawn", shape=shape, options=o),
        st.tuples(*[_integers(1, 20)] * 4, _integers(1, 8)),
        st.sampled_from([case.options for case in cases_of(OPS["lora_linears"]) if "nf4" not in case.options]),
    ),
    "load_balancing_loss": _same_options("load_balancing_loss", st.tuples(_integers(3, 40), _integers(6, 300))),
    # Twelve experts per group: a case has three groups, another one four.
    "topk_sigmoid": _same_options("topk_sigmoid", st.tuples(_integers(1, 40), _integers(1, 20).map(lambda n: 12 * n))),
    # Six experts at least, because a case chooses six.
    "topk_softmax": _same_options("topk_softmax", st.tuples(_integers(1, 40), _integers(6, 300))),
    "multi_head_linear_cross_entropy": _same_options(
        "multi_head_linear_cross_entropy",
        st.tuples(_integers(1, 2), _integers(1, 5), _integers(1, 20), _CLASSES),
    ),
}
EXAMPLES = 200 if torch.cuda.is_available() else 5


@pytest.mark.parametrize("name", OPS)
def test_kernel_agrees_with_the_reference_on_drawn_shapes(name: str, request: pytest.FixtureRequest) -> None:
    """The kernel's fp32 error is bounded by the reference's, for shapes nobody chose."""
    if not HAS_TRITON:
        pytest.skip("triton is not installed: there are no kernels on this platform")
    op, device = OPS[name], torch.device("cuda" if HAS_GPU else "cpu")

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(DRAWN[name])
    def compare(case: Case) -> None:
        inputs = make(op, case, torch.float32)
        reference = run(op.call, op, with_leaves(op, inputs))
        if not all(t.isfinite().all() for t in reference.named().values()):
            # A mean over class weights of 0 is 0 / 0; test_unfit_arguments.py tests it.
            return
        upstream = upstream_for(reference.outputs)
        exact = cast(inputs, torch.float64)
        truth = run(op.call, op, with_leaves(op, exact), upstream)
        # For one element, or a probability of 1e-30, four times the unfused op's error may be too small by luck.
        beside = run(op.call, op, with_leaves(op, nudged(exact)), upstream)
        if name == "cross_entropy":  # p - 1 of a label that is all but certain has the rounding of p
            half_step = torch.finfo(torch.float32).eps / 2 * float(upstream[0].abs().max())
            beside.grads["logits"] = truth.grads["logits"] + half_step / truth.grads["logits"].numel() ** 0.5
        on_device = with_leaves(op, cast_to(inputs, device))
        if HAS_GPU:
            got = run(op.call, op, on_device, [g.to(device) for g in upstream])
        else:
            with kernels_on_the_cpu(), poisoned():
                got = run(op.call, op, on_device, upstream)
        assert_result_within(got, truth, reference, 4.0, beside)

    compare()


def cast_to(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}


@pytest.mark.parametrize(CONTRACT, contract_cases(first=True), indirect=["backend"])
@pytest.mark.parametrize("value", [0.0, -3.0, 65536.0])
def test_gradient_is_linear_in_the_upstream_gradient(op: Op, case: Case, value: float, backend: Any) -> None:
    """Gradients made before the upstream gradient is known are wrong for every value but 1."""
    inputs = make(op, case, torch.float32, backend.device)
    one = run(op.call, op, with_leaves(op, inputs))
    upstream = upstream_for(one.outputs)
    scaled = run(op.call, op, with_leaves(op, inputs), [g * value for g in upstream])
    upstream = [g * value for g in upstream]
    truth, baseline = truth_and_baseline(op, inputs, upstream, case.product_orders)
    # The largest error of a few hundred sums is a matter of luck, so the inputs' own rounding is allowed too.
    beside = run(op.oracle, op, with_leaves(op, nudged(cast(inputs, torch.float64))), upstream)
    assert_result_within(scaled, truth, baseline, op.factor(torch.float32), beside)
    if value == 0.0:
        assert all(not t.any() for t in scaled.grads.values() if t is not None)
    assert math.isfinite(sum(float(t.sum()) for t in scaled.named().values()))
