"""Frozen heads: the gradient of hidden from one pass over the logits, for any upstream gradient per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import relative_error
from tigon.ops import linear_cross_entropy, linear_kl, linear_logprobs
from tigon.ops.head import blocks, divergence, frozen, logprobs
from tigon.ops.head.divergence import linear_kl_oracle
from tigon.ops.head.logprobs import linear_logprobs_oracle
from tigon.ops.head.plan import LogitBytes, plan_whole_rows

N, H, V = 13, 8, 37
LEFT_OUT = 3
SEVERAL_BLOCKS = 4 * V * 8
CHUNKS = pytest.mark.parametrize("chunk_bytes", [None, SEVERAL_BLOCKS], ids=["one block", "several blocks"])
LOGIT_MAP = {"softcap": 4.0, "logit_scale": 1.5}
Heads = dict[str, Tensor]


def heads(device: Any, dtype: torch.dtype = torch.float32) -> Heads:
    """A student whose hidden states are trained, a teacher, ids of which one is left out, and an upstream gradient."""
    torch.manual_seed(31)
    made = {
        "hidden": torch.randn(N, H),
        "weight": torch.randn(V, H),
        "teacher_hidden": torch.randn(N, H),
        "teacher_weight": torch.randn(V, H),
    }
    made = {name: tensor.to(device, dtype) for name, tensor in made.items()}
    ids = torch.randint(0, V, (N,), device=device)
    ids[LEFT_OUT] = -100
    made["hidden"].requires_grad_()
    return {**made, "ids": ids, "upstream": torch.randn(N, device=device)}


def of_logprobs(call: Callable[..., Any], given: Heads, **options: Any) -> Any:
    return call(given["hidden"], given["weight"], given["ids"], temperature=0.7, **LOGIT_MAP, **options)


def per_token(op: str, given: Heads, **options: Any) -> Tensor:
    """The op's value per token; the token that is left out has 0."""
    if op == "logprobs":
        return of_logprobs(linear_logprobs, given, **options)
    if op == "loss":
        loss: Any = linear_cross_entropy(
            given["hidden"], given["weight"], given["ids"], reduction="none", **LOGIT_MAP, **options
        )
        return loss
    mask = given["ids"] != -100
    sides = (given[name] for name in ("hidden", "weight", "teacher_hidden", "teacher_weight"))
    return linear_kl(*sides, kind=op, mask=mask, temperature=1.3, **options)


def exact(op: str, given: Heads) -> tuple[Tensor, Tensor]:
    """(value, gradient of hidden) in fp64, without an upstream gradient for the token that is left out."""
    double = {name: t.detach().double() if t.is_floating_point() else t for name, t in given.items()}
    double["hidden"].requires_grad_()
    if op == "logprobs":
        value = of_logprobs(linear_logprobs_oracle, double)
    elif op == "loss":
        value = -linear_logprobs_oracle(double["hidden"], double["weight"], double["ids"], **LOGIT_MAP)
    else:
        sides = (double[name] for name in ("hidden", "weight", "teacher_hidden", "teacher_weight"))
        value = linear_kl_oracle(*sides, kind=op, mask=given["ids"] != -100, temperature=1.3)
    upstream = double["upstream"].clone()
    upstream[LEFT_OUT] = 0.0
    return value.detach(), torch.autograd.grad(value, double["hidden"], upstream)[0]


OPS = pytest.mark.parametrize("op", ["logprobs", "loss", "forward", "reverse", "jsd"])


@OPS
@CHUNKS
def test_value_and_gradient_equal_the_fp64_formula(op: str, chunk_bytes: int | None, backend: Any) -> None:
    given = heads(backend.device)
    value = per_token(op, given, chunk_bytes=chunk_bytes)
    (got,) = torch.autograd.grad(value, given["hidden"], given["upstream"])
    want_value, want = exact(op, given)
    assert relative_error(value, want_value) < 2e-6 and relative_error(got, want) < 4e-6


@OPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_in_16_bits_is_at_most_twice_that_of_a_trained_head(op: str, dtype: torch.dtype, backend: Any) -> None:
    given, errors = heads(backend.device, dtype), []
    want = exact(op, given)[1]
    for _ in range(2):
        value = per_token(op, given)
        (got,) = torch.autograd.grad(value, given["hidden"], given["upstream"].to(value.dtype))
        assert got.dtype == dtype
        errors.append(relative_error(got, want))
        given["weight"].requires_grad_()
    frozen_error, trained_error = errors
    # Triton's interpreter cuts bf16 off instead of rounding it. These errors have one sign, so that two of them add up.
    most = 4 if backend.interpreted and dtype == torch.bfloat16 else 2
    assert frozen_error <= most * trained_error < (2e-2 if dtype == torch.bfloat16 else 2e-3)


@OPS
def test_token_that_is_left_out_has_no_gradient_although_its_upstream_gradient_is_nan(op: str, backend: Any) -> None:
    given = heads(backend.device)
    given["upstream"][LEFT_OUT] = torch.nan
    value = per_token(op, given)
    (got,) = torch.autograd.grad(value, given["hidden"], given["upstream"])
    assert not got[LEFT_OUT].any() and bool(got.isfinite().all())


@OPS
def test_second_backward_equals_the_first_and_writes_to_no_upstream_gradient(op: str, backend: Any) -> None:
    given = heads(backend.device)
    value = per_token(op, given)
    before = given["upstream"].clone()
    (first,) = torch.autograd.grad(value, given["hidden"], given["upstream"], retain_graph=True)
    kept = first.clone()
    (doubled,) = torch.autograd.grad(value, given["hidden"], 2 * given["upstream"], retain_graph=True)
    (last,) = torch.autograd.grad(value, given["hidden"], given["upstream"])
    assert torch.equal(first, kept) and torch.equal(last, kept) and relative_error(doubled, 2 * kept) < 1e-6
    assert torch.equal(before, given["upstream"])


@OPS
def test_trained_weight_gets_the_same_gradient_of_hidden_from_two_passes(op: str, backend: Any) -> None:
    given = heads(backend.device)
    (once,) = torch.autograd.grad(per_token(op, given), given["hidden"], given["upstream"])
    given["weight"].requires_grad_()
    (twice,) = torch.autograd.grad(per_token(op, given), given["hidden"], given["upstream"])
    assert relative_error(once, twice) < 2e-6


@pytest.mark.parametrize("upstream_of", ["entropy", "lse", "both"])
def test_gradients_of_entropy_and_log_sum_exp_equal_the_fp64_formula(upstream_of: str, backend: Any) -> None:
    """They are not multiples of the gradient that the forward computes."""
    given = heads(backend.device)
    found = of_logprobs(linear_logprobs, given, outputs=("entropy", "lse"))
    double = {name: t.detach().double() if t.is_floating_point() else t for name, t in given.items()}
    double["hidden"].requires_grad_()
    want = of_logprobs(linear_logprobs_oracle, double, outputs=("entropy", "lse"))
    totals = []
    for result in (found, want):
        parts = {"entropy": result.entropy.sum(), "lse": result.lse.square().sum()}
        parts["both"] = parts["entropy"] + (result.logprob * 0.3).sum()
        totals.append(parts[upstream_of])
    got, expected = (
        torch.autograd.grad(total, one["hidden"])[0] for total, one in zip(totals, (given, double), strict=True)
    )
    assert relative_error(got, expected) < 4e-6


@pytest.mark.parametrize(
    ("op", "operators"),
    [("logprobs", ("linear_logprobs_fwd", "linear_logprobs_bwd")), ("forward", ("linear_kl_fwd", "linear_kl_bwd"))],
)
def test_logits_of_a_frozen_head_are_computed_once(
    op: str, operators: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a frozen head ran an operator whose backward computes the logits again")

    given = heads(backend.device)
    for name in operators:
        module = logprobs if op == "logprobs" else divergence
        monkeypatch.setattr(module, name, never)
    torch.autograd.grad(per_token(op, given), given["hidden"], given["upstream"])
    with pytest.raises(AssertionError, match="frozen"):
        given["weight"].requires_grad_()
        per_token(op, given).sum().backward()


def test_hidden_states_are_not_kept_if_only_the_log_probability_has_a_gradient(backend: Any) -> None:
    given = heads(backend.device)
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_logprobs(given["hidden"], given["weight"], given["ids"])
    assert (V, H) not in kept and sum(shape[-1:] == (H,) for shape in kept) == 1


@pytest.mark.parametrize(("tokens", "vocab"), [(8192, 128256), (8192, 151936), (100, 128256), (5000, 32000)])
def test_blocks_of_whole_rows_are_whole_tiles_within_the_bytes(tokens: int, vocab: int) -> None:
    size, limit = LogitBytes(logits=4, gradients=2), 512 << 20
    plan = plan_whole_rows(tokens, vocab, size, limit)
    assert plan.columns == vocab
    assert vocab * (plan.logit_tokens * size.logits + plan.tokens * size.gradients) <= limit
    assert plan.tokens == tokens or plan.tokens % 128 == 0
    assert plan.logit_tokens == plan.tokens or plan.logit_tokens % 128 == 0


def test_operators_of_trained_heads_are_not_those_of_frozen_ones() -> None:
    """The modules that `test_logits_of_a_frozen_head_are_computed_once` changes hold these operators."""
    assert logprobs.linear_logprobs_fwd is blocks.linear_logprobs_fwd
    assert divergence.linear_kl_fwd is blocks.linear_kl_fwd
    assert logprobs.linear_logprobs_frozen is frozen.linear_logprobs_frozen
