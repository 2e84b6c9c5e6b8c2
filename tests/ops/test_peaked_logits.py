"""Heads whose logits are peaked: with 16-bit inputs too, the errors are those of fp32 logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peaked_logits import FACTOR, of_fp32_logits, peaked
from torch import Tensor

from backends import HAS_GPU, tens_of_gib
from helpers import (
    assert_result_within,
    cast,
    nudged,
    relative_error,
    run,
    runs_here,
    truth_and_baseline,
    upstream_for,
    with_leaves,
    worse_of,
)
from tests.ops.cases import cases_of
from tigon import cross_entropy, linear_cross_entropy, linear_kl, linear_logprobs
from tigon.ops import OPS, Case, Op, logprobs, products

HEADS = ("linear_cross_entropy", "linear_logprobs", "linear_kl", "multi_head_linear_cross_entropy")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
INTERPRETED_BF16_FACTOR = 3.0  # as in test_accuracy.py


def head_cases() -> Iterator[Any]:
    """Cases whose logits follow from the inputs by one product.

    Residual blocks and adapters compute 16-bit hidden states first, and the product passes their rounding on.
    """
    for op in (OPS[name] for name in HEADS):
        for case in cases_of(op):
            if not {"blocks", "rank"} & set(case.options) and (case.small or HAS_GPU):
                yield pytest.param(op, case, id=f"{op.name}-{case.id}")


@pytest.mark.parametrize("deviation", [10.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("op", "case"), head_cases())
def test_error_is_at_most_three_times_that_of_fp32_logits(
    op: Op, case: Case, dtype: torch.dtype, deviation: float, backend: Any
) -> None:
    if not runs_here(case, backend.device):
        pytest.skip("this size is for a GPU")
    if backend.interpreted and (deviation < 30.0 or dtype != torch.bfloat16 or case is not op.case):
        pytest.skip("the kernels compute in fp32, and their ways are taken by test_accuracy.py")
    with nullcontext() if case.small else tens_of_gib():
        compare_with_fp64(op, case, dtype, deviation, backend)


def compare_with_fp64(op: Op, case: Case, dtype: torch.dtype, deviation: float, backend: Any) -> None:
    inputs = peaked(op, case, dtype, backend.device, deviation)
    got = run(op.call, op, with_leaves(op, inputs))
    upstream = upstream_for(got.outputs)
    truth, _ = truth_and_baseline(op, inputs, upstream)
    factor = FACTOR * (INTERPRETED_BF16_FACTOR if backend.interpreted and dtype == torch.bfloat16 else 1.0)
    # A single loss may be exact by luck, so the inputs' rounding to fp32 is allowed too: the worst of eight.
    exact = cast(inputs, torch.float64)
    beside = run(op.oracle, op, with_leaves(op, nudged(exact)), upstream)
    for seed in range(1, 8):
        other = run(op.oracle, op, with_leaves(op, nudged(exact, seed)), upstream)
        beside = worse_of(beside, other, truth)
    assert_result_within(got, truth, of_fp32_logits(op, inputs, upstream), factor, beside)


def of_student(call: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """dX and dW of the sum of a call's results."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    return torch.autograd.grad(call(x, w).sum(), (x, w))


N, H, V = 32, 32, 1500


def head(device: torch.device, deviation: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(41)
    x, w = torch.randn(N, H), torch.randn(V, H) * (deviation / H**0.5)
    return x.to(device, torch.bfloat16), w.to(device, torch.bfloat16)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("chunk_bytes", [1 << 24, 1 << 16], ids=["kept", "blocks"])
def test_gradients_of_a_student_near_its_teacher_are_below_0_7_percent_off(
    kind: str, chunk_bytes: int, backend: Any
) -> None:
    """With 16-bit logits they are off by a quarter: the gradient is the difference of two near distributions."""
    x, w = head(backend.device, 30.0)
    near_x, near_w = ((t.float() + 0.02 * torch.randn(t.shape).to(t.device) * t.std()).bfloat16() for t in (x, w))

    def call(x: Tensor, w: Tensor) -> Tensor:
        teacher = near_x.to(x.dtype), near_w.to(w.dtype)
        return linear_kl(x, w, *teacher, kind=kind, chunk_bytes=chunk_bytes)

    exact = of_student(call, x.double(), w.double())
    limit = 7e-3 * (INTERPRETED_BF16_FACTOR if backend.interpreted else 1.0)
    assert all(relative_error(g, e) < limit for g, e in zip(of_student(call, x, w), exact, strict=True))
    with patch.object(products, "logits_dtype", lambda dtype: dtype):
        assert all(relative_error(g, e) > 0.1 for g, e in zip(of_student(call, x, w), exact, strict=True))


@pytest.mark.parametrize("chunk_bytes", [1 << 24, 1 << 16], ids=["kept", "blocks"])
@pytest.mark.parametrize("result", ["logprob", "entropy", "loss", "loss beside entropy"])
def test_gradients_of_log_probabilities_are_below_0_7_percent_off(
    result: str, chunk_bytes: int, backend: Any
) -> None:  # fmt: skip
    x, w = head(backend.device, 30.0)
    ids = torch.multinomial((x.double() @ w.double().t()).softmax(-1), 1).squeeze(1)

    def call(x: Tensor, w: Tensor) -> Tensor:
        if result.startswith("loss"):
            outputs = ("entropy",) if "entropy" in result else ()
            found = linear_cross_entropy(x, w, ids, outputs=outputs, chunk_bytes=chunk_bytes)
            return found.loss if outputs else found
        return getattr(linear_logprobs(x, w, ids, outputs=("entropy",), chunk_bytes=chunk_bytes), result)

    exact = of_student(call, x.double(), w.double())
    limit = 7e-3 * (INTERPRETED_BF16_FACTOR if backend.interpreted else 1.0)
    assert all(relative_error(g, e) < limit for g, e in zip(of_student(call, x, w), exact, strict=True))


@pytest.mark.parametrize("call", [cross_entropy, logprobs], ids=["cross_entropy", "logprobs"])
def test_scaled_logits_of_confident_tokens_keep_their_loss_and_gradient(call: Any, backend: Any) -> None:
    """1 - p is 1e-5 to 1e-3 beside logits of 100. A compiler must not fuse the scale with one subtraction alone.

    Only a compiled kernel can fail: the interpreter fuses nothing.
    """
    torch.manual_seed(0)
    logits, rows, scale = torch.randn(64, 1000) * 20, torch.arange(64), 1 / 0.7
    target = logits.argmax(-1)
    logits[rows, target] = logits.topk(2).values[:, 1] + torch.empty(64).uniform_(5.0, 8.0)
    logits, target = logits.to(backend.device), target.to(backend.device)

    def values(function: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = logits.to(dtype).requires_grad_()
        loss = function(x)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        return loss.detach().double(), gradient[rows, target].double()

    def unfused(x: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x * scale, target, reduction="none")

    def fused(x: Tensor) -> Tensor:
        if call is logprobs:
            return -logprobs(x, target, logit_scale=scale)
        return cross_entropy(x, target, logit_scale=scale, reduction="none")

    truth = values(unfused, torch.float64)
    beside, got = values(unfused, torch.float32), values(fused, torch.float32)
    for exact, near, mine in zip(truth, beside, got, strict=True):
        assert ((mine - exact).abs() / exact.abs()).median() <= 4 * ((near - exact).abs() / exact.abs()).median()
