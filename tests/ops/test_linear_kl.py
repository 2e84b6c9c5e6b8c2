"""Promises of `linear_kl` beyond the contract of every op: exact zeros, limits, and rows that stay apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import (
    Result,
    cast,
    differentiable,
    relative_error,
    truth_and_baseline,
    upstream_for,
    with_leaves,
)
from tigon import linear_kl, linear_logprobs
from tigon.errors import OptionError, ShapeError
from tigon.losses import topk_divergence
from tigon.ops import Case
from tigon.ops import products as matrix_products
from tigon.ops.head.divergence import LINEAR_KL, linear_kl_oracle
from tigon.ops.losses import inputs as loss_inputs

N, H, G, V = 6, 8, 12, 40
KINDS: list[dict[str, Any]] = [{"kind": "forward"}, {"kind": "reverse"}, {"kind": "jsd", "beta": 0.3}]
each_kind = pytest.mark.parametrize("options", KINDS, ids=lambda o: o["kind"])
# One token's logits, several blocks of tokens, all kept.
each_size = pytest.mark.parametrize("chunk_bytes", [1, 2 * V * 8, 1 << 20])


def heads(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(3)
    shapes = {"hidden": (N, H), "weight": (V, H), "teacher_hidden": (N, G), "teacher_weight": (V, G)}
    return {name: (0.6 * torch.randn(shape)).to(device, dtype) for name, shape in shapes.items()}


def as_teacher(student: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**student, "teacher_hidden": student["hidden"].clone(), "teacher_weight": student["weight"].clone()}


def gradients(inputs: dict[str, Tensor], upstream: Tensor | float = 1.0, **options: Any) -> dict[str, Tensor]:
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    (linear_kl(**leaves, **options) * upstream).sum().backward()
    return {name: t.grad for name, t in leaves.items() if t.grad is not None}


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_divergence_and_gradients_of_equal_heads_are_exactly_zero(
    options: dict[str, Any], dtype: torch.dtype, backend: Any
) -> None:
    inputs = as_teacher(heads(backend.device, dtype))
    assert not linear_kl(**inputs, **options).any()
    assert not any(g.any() for g in gradients(inputs, 3.0, **options).values())


@each_kind
def test_divergence_of_near_heads_is_not_negative_and_more_precise_than_the_formula(
    options: dict[str, Any], backend: Any
) -> None:
    """The formula's differences of log-softmaxes have an error of 1e-7 where the divergence is 1e-6."""
    inputs = as_teacher(heads(backend.device))
    inputs["teacher_hidden"] += 1e-3 * torch.randn(N, H).to(backend.device)
    exact = linear_kl_oracle(**{n: t.double() for n, t in inputs.items()}, **options)
    got, unfused = linear_kl(**inputs, **options), linear_kl_oracle(**inputs, **options)
    assert (got > 0).all() and exact.max() < 1e-4
    assert relative_error(got, exact) < 0.25 * relative_error(unfused, exact)


def _near_and_peaked(seed: int, grid: float) -> dict[str, Any]:
    """Each token's probability is near 1 in one column, and the teacher is near."""
    torch.manual_seed(seed)
    case = Case(id="drawn", shape=(21, 24, 100), options={"near": 0.1, "peaked": 8.0, "grid": grid})
    return LINEAR_KL.make(case, torch.float32, torch.device("cpu"))


def _root_mean_square_errors(
    inputs: Iterable[dict[str, Any]], backend: Any, between: Callable[[], None] | None = None, **options: Any
) -> dict[str, tuple[float, float]]:
    """(the op's error, the unfused op's) of each result. `between` is called after the op's forward."""
    squares: dict[str, list[list[float]]] = {}
    for drawn in inputs:
        call = {**drawn, **options}
        leaves = with_leaves(LINEAR_KL, cast(call, torch.float32, backend.device))
        value = linear_kl(**leaves)
        upstream = upstream_for([value])
        if between is not None:
            between()
        names = differentiable(LINEAR_KL, leaves)
        grads = torch.autograd.grad([value], [leaves[n] for n in names], upstream)
        got = Result([value], dict(zip(names, grads, strict=True)))
        truth, baseline = truth_and_baseline(LINEAR_KL, call, [g.cpu() for g in upstream])
        exact, unfused = truth.named(), baseline.named()
        for name, result in got.named().items():
            errors = [relative_error(result.cpu(), exact[name]), relative_error(unfused[name], exact[name])]
            squares.setdefault(name, []).append([e * e for e in errors])
    return {name: tuple(torch.tensor(s).double().mean(0).sqrt().tolist()) for name, s in squares.items()}


@each_kind
def test_error_of_peaked_near_heads_is_the_unfused_ops_if_the_products_are_exact(
    options: dict[str, Any], backend: Any
) -> None:
    """Neither then has the logits' rounding, which differs with the order of summation. Mean over several inputs.

    1e-6 is far below the rounding of a log-sum-exp over the distance of a probability to 1.
    """
    inputs = [_near_and_peaked(seed, grid=1 / 64) for seed in range(3 if backend.interpreted else 20)]
    for name, (error, unfused) in _root_mean_square_errors(inputs, backend, **options).items():
        assert error <= min(1.3 * unfused + 1e-7, 1e-6), (name, error, unfused)


@each_kind
def test_backward_whose_products_sum_in_another_order_is_as_precise(
    options: dict[str, Any], backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward's blocks have another shape than the forward's, for which cuBLAS may choose another kernel.

    A probability near 1 has a gradient of the size of its distance to 1, which the logit's rounding would exceed.
    """
    product_into, generator, H = matrix_products._product_into, torch.Generator(), 24

    def in_another_order(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
        if a.shape[1] == H:  # logits
            order = torch.randperm(H, generator=generator).to(a.device)
            a, b = a[:, order], b[order]
        product_into(a, b, out, accumulate)

    monkeypatch.setattr(matrix_products, "_product_into", in_another_order)
    inputs = [_near_and_peaked(seed, grid=0.0) for seed in range(3 if backend.interpreted else 20)]
    errors = _root_mean_square_errors(
        inputs, backend, lambda: generator.manual_seed(1), chunk_bytes=21 * 240, **options
    )  # fmt: skip
    for name, (error, unfused) in errors.items():
        assert error <= 2.0 * unfused, (name, error, unfused)


@pytest.mark.parametrize("far", [50.0, 1e3, 1e4])
@each_kind
def test_distant_logits_give_what_the_formula_gives(options: dict[str, Any], far: float, backend: Any) -> None:
    """One side's logits are shifted and the other's are `far / 10` times as large."""
    inputs = heads(backend.device)
    inputs["hidden"] *= far / 10
    bias = torch.full((V,), far, device=backend.device)
    got = linear_kl(**inputs, teacher_bias=bias, **options)
    exact = {n: t.double() for n, t in inputs.items()}
    want = linear_kl_oracle(**exact, teacher_bias=bias.double(), **options)
    unfused = linear_kl_oracle(**inputs, teacher_bias=bias, **options)
    assert got.isfinite().all()
    assert relative_error(got, want) <= 2 * max(relative_error(unfused, want), torch.finfo(torch.float32).eps)


@each_kind
def test_logit_far_above_the_first_tile_keeps_its_precision(options: dict[str, Any], backend: Any) -> None:
    """exp(logit - the first tile's maximum) overflows, so the kernel reads the row again."""
    wide = 4500
    torch.manual_seed(4)
    inputs = {n: torch.randn(wide if n.endswith("weight") else 2, 3).to(backend.device)
              for n in ("hidden", "weight", "teacher_hidden", "teacher_weight")}  # fmt: skip
    bias, teacher_bias = (torch.zeros(wide, device=backend.device) for _ in range(2))
    bias[4400], teacher_bias[4300:4310] = 120.0, 118.0
    got = linear_kl(**inputs, bias=bias, teacher_bias=teacher_bias, **options)
    want = linear_kl_oracle(**inputs, bias=bias, teacher_bias=teacher_bias, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_jsd_of_one_half_is_symmetric() -> None:
    inputs = heads()
    swapped = dict(zip(inputs, [inputs[n] for n in ("teacher_hidden", "teacher_weight", "hidden", "weight")],
                       strict=True))  # fmt: skip
    torch.testing.assert_close(linear_kl(**inputs, kind="jsd"), linear_kl(**swapped, kind="jsd"), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("beta", "kind"), [(0, "forward"), (1, "reverse")])
def test_jsd_at_the_ends_of_beta_is_a_kl_divergence(beta: int, kind: str) -> None:
    """Near an end, jsd divided by the distance to it is close to that divergence."""
    inputs = {n: t.double() for n, t in heads().items()}
    kl = linear_kl(**inputs, kind=kind)
    assert torch.equal(linear_kl(**inputs, kind="jsd", beta=beta), kl)
    near = linear_kl(**inputs, kind="jsd", beta=abs(beta - 1e-6))
    torch.testing.assert_close(near / 1e-6, kl, rtol=1e-3, atol=0)


def test_jsd_is_at_most_log_2() -> None:
    inputs = heads()
    inputs["hidden"] *= 1e4
    value = linear_kl(**inputs, kind="jsd")
    assert (value <= math.log(2) + 1e-6).all() and value.max() > 0.6


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the products' results."""
    seen: list[tuple[int, ...]] = []
    product_into = matrix_products._product_into

    def counted(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
        seen.append(tuple(out.shape))
        product_into(a, b, out, accumulate)

    monkeypatch.setattr(matrix_products, "_product_into", counted)
    return seen


@each_kind
@each_size
def test_frozen_teacher_costs_no_product_of_its_gradients(
    options: dict[str, Any], chunk_bytes: int, products: list[tuple[int, ...]]
) -> None:
    inputs = heads()
    counts = {}
    for frozen in (True, False):
        leaves = {n: t.clone().requires_grad_(not (frozen and n.startswith("teacher"))) for n, t in inputs.items()}
        value = linear_kl(**leaves, **options, chunk_bytes=chunk_bytes)
        products.clear()
        value.sum().backward()
        counts[frozen] = len(products)
        if frozen:
            assert leaves["teacher_hidden"].grad is None and leaves["teacher_weight"].grad is None
        else:
            assert all(t.grad is not None for t in leaves.values())
    # With kept logits two products per head; otherwise two more for the logits of each block.
    assert counts[True] / counts[False] == (0.5 if chunk_bytes == 1 << 20 else 2 / 3)


@each_kind
@each_size
def test_second_backward_of_a_retained_graph_equals_the_first(options: dict[str, Any], chunk_bytes: int) -> None:
    leaves = {n: t.requires_grad_() for n, t in heads().items()}
    value = linear_kl(**leaves, **options, chunk_bytes=chunk_bytes)
    upstream = torch.randn(N)
    first = torch.autograd.grad(value, [*leaves.values()], upstream, retain_graph=True)
    second = torch.autograd.grad(value, [*leaves.values()], upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_masked_tokens_cost_no_rows_of_the_products(products: list[tuple[int, ...]]) -> None:
    linear_kl(**heads(), chunk_bytes=1 << 20)
    assert products == [(6, V), (6, V)]
    products.clear()
    linear_kl(**heads(), mask=torch.tensor([True, False, False, True, True, False]), chunk_bytes=1 << 20)
    assert products == [(3, V), (3, V)]


@each_kind
@each_size
def test_masked_tokens_get_zero_and_change_no_other(options: dict[str, Any], chunk_bytes: int, backend: Any) -> None:
    """NaN in their hidden states reaches neither a result nor a gradient."""
    inputs, options = heads(backend.device), {**options, "chunk_bytes": chunk_bytes}
    mask = torch.tensor([True, False, False, True, True, False], device=backend.device)
    kept = {n: t[mask] if n.endswith("hidden") else t for n, t in inputs.items()}
    upstream = torch.arange(1.0, 7.0, device=backend.device)
    expected, want = linear_kl(**kept, **options), gradients(kept, upstream[mask], **options)
    for name in ("hidden", "teacher_hidden"):
        inputs[name][~mask] = float("nan")
    got = linear_kl(**inputs, mask=mask, **options)
    assert not got[~mask].any()
    torch.testing.assert_close(got[mask], expected)
    for name, g in gradients(inputs, upstream, mask=mask, **options).items():
        if name.endswith("hidden"):
            assert not g[~mask].any()
            g = g[mask]
        assert relative_error(g, want[name]) <= 1e-5, name


@each_kind
def test_mask_that_cannot_be_read_is_applied_in_the_kernels(
    options: dict[str, Any], backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a compiler or a CUDA graph, where the host knows no number of tokens."""
    inputs = heads(backend.device)
    mask = torch.tensor([True, False, False, True, True, False], device=backend.device)
    expected, want = linear_kl(**inputs, mask=mask, **options), gradients(inputs, 2.0, mask=mask, **options)
    monkeypatch.setattr(loss_inputs, "may_wait", lambda mask: False)
    torch.testing.assert_close(linear_kl(**inputs, mask=mask, **options), expected)
    for name, g in gradients(inputs, 2.0, mask=mask, **options).items():
        assert relative_error(g, want[name]) <= 1e-5, name


@each_kind
def test_first_tile_of_excluded_columns_keeps_logits_that_are_far_below_zero(
    options: dict[str, Any], backend: Any
) -> None:
    """A first tile of -inf alone gives no shift; exp(-200) underflows without one."""
    columns, excluded = 2100, 2060
    torch.manual_seed(5)
    bias = torch.full((columns,), -200.0)
    bias[:excluded] = -math.inf
    inputs = {
        "hidden": torch.randn(3, H), "weight": 0.3 * torch.randn(columns, H), "bias": bias,
        "teacher_hidden": torch.randn(3, H), "teacher_weight": 0.3 * torch.randn(columns, H), "teacher_bias": bias,
    }  # fmt: skip
    got = linear_kl(**{name: t.to(backend.device) for name, t in inputs.items()}, **options)
    included = {name: t if name.endswith("hidden") else t[excluded:] for name, t in inputs.items()}
    exact = linear_kl_oracle(**{name: t.double() for name, t in included.items()}, **options)
    assert relative_error(got.cpu(), exact) < 1e-4


@each_kind
def test_columns_that_both_heads_exclude_add_nothing(options: dict[str, Any], backend: Any) -> None:
    """A bias of -inf pads a vocabulary. The result is that of the columns without it."""
    inputs = heads(backend.device)
    bias = torch.zeros(V, device=backend.device)
    bias[V - 7 :] = -math.inf
    whole = {n: t[: V - 7] if n.endswith("weight") else t for n, t in inputs.items()}
    torch.testing.assert_close(
        linear_kl(**inputs, bias=bias, teacher_bias=bias, **options), linear_kl(**whole, **options)
    )
    want = gradients(whole, 2.0, **options)
    for name, g in gradients(inputs, 2.0, bias=bias, teacher_bias=bias, **options).items():
        if name.endswith("weight"):
            assert not g[V - 7 :].any()
            g = g[: V - 7]
        assert relative_error(g, want[name]) <= 1e-5, name


def test_column_that_the_student_alone_excludes_makes_the_forward_kl_infinite(backend: Any) -> None:
    inputs = heads(backend.device)
    bias = torch.zeros(V, device=backend.device)
    bias[3] = -math.inf
    assert (linear_kl(**inputs, bias=bias) == math.inf).all()
    log_s = (inputs["hidden"] @ inputs["weight"].t() + bias).log_softmax(-1)
    log_t = (inputs["teacher_hidden"] @ inputs["teacher_weight"].t()).log_softmax(-1)
    others = torch.arange(V, device=backend.device) != 3
    reverse = (log_s.exp() * (log_s - log_t))[:, others].sum(-1)
    torch.testing.assert_close(linear_kl(**inputs, bias=bias, kind="reverse"), reverse)


@each_kind
@pytest.mark.parametrize("side", ["hidden", "teacher_hidden"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_stay_in_their_row(options: dict[str, Any], side: str, value: float, backend: Any) -> None:
    inputs = heads(backend.device)
    expected = linear_kl(**inputs, **options)
    inputs[side][2] = value
    got = linear_kl(**inputs, **options)
    assert got[2].isnan()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[others], expected[others])
    leaf = inputs["hidden"].clone().requires_grad_()
    linear_kl(**{**inputs, "hidden": leaf}, **options).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad[2].isnan().all() and leaf.grad[others].isfinite().all()


@each_kind
@pytest.mark.parametrize(("tokens", "vocab"), [(131072, 24), (3, 262144)], ids=["long-sequence", "wide-vocabulary"])
def test_long_sequences_and_wide_vocabularies_are_as_accurate_as_the_oracle(
    options: dict[str, Any], tokens: int, vocab: int
) -> None:
    """fp32 on the CPU in blocks of 1 MiB against fp64, at most twice the unfused op's error."""
    torch.manual_seed(28)
    shapes = {"hidden": (tokens, 4), "weight": (vocab, 4), "teacher_hidden": (tokens, 6), "teacher_weight": (vocab, 6)}
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}

    def results(call: Callable[..., Tensor], dtype: torch.dtype, **more: Any) -> list[Tensor]:
        leaves = {name: t.to(dtype).requires_grad_() for name, t in inputs.items()}
        found = call(**leaves, **options, **more)
        return [found, *torch.autograd.grad(found.sum(), list(leaves.values()))]

    truth = results(linear_kl_oracle, torch.float64)
    unfused = results(linear_kl_oracle, torch.float32)
    mine = results(linear_kl, torch.float32, chunk_bytes=1 << 20)
    for got, other, want in zip(mine, unfused, truth, strict=True):
        assert relative_error(got, want) <= 2 * relative_error(other, want) + 2e-7


@each_kind
def test_hidden_states_of_any_strides_give_the_same_result(options: dict[str, Any]) -> None:
    inputs = heads()
    expected, want = linear_kl(**inputs, **options), gradients(inputs, **options)
    strided = {n: t.t().contiguous().t() for n, t in inputs.items()}
    assert not strided["hidden"].is_contiguous()
    torch.testing.assert_close(linear_kl(**strided, **options), expected)
    for name, g in gradients(strided, **options).items():
        assert relative_error(g, want[name]) <= 1e-5, name


@each_kind
def test_heads_of_two_dtypes_are_compared_in_the_wider_one(options: dict[str, Any], backend: Any) -> None:
    """Products and gradients of each head have that head's dtype."""
    inputs = heads(backend.device)
    inputs |= {n: inputs[n].bfloat16() for n in ("teacher_hidden", "teacher_weight")}
    leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
    got = linear_kl(**leaves, **options)
    got.sum().backward()
    assert got.dtype == torch.float32
    assert {n: t.grad.dtype for n, t in leaves.items()} == {n: t.dtype for n, t in inputs.items()}
    exact = linear_kl_oracle(**{n: t.float() for n, t in inputs.items()}, **options)
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-6)


@each_kind
def test_one_head_may_be_student_and_teacher(options: dict[str, Any]) -> None:
    """Self-distillation: two hidden states under one weight, whose gradient is the sum of both."""
    exact = {n: t.double() for n, t in heads().items()}
    x, y, w = exact["hidden"], exact["hidden"].flip(0) * 0.7, exact["weight"].requires_grad_()
    (got,) = torch.autograd.grad(linear_kl(x, w, y, w, **options).sum(), w)
    (want,) = torch.autograd.grad(linear_kl_oracle(x, w, y, w, **options).sum(), w)
    torch.testing.assert_close(got, want)


@each_kind
def test_empty_batch_gives_an_empty_result_and_zero_gradients(options: dict[str, Any]) -> None:
    inputs = {n: t[:0] if n.endswith("hidden") else t for n, t in heads().items()}
    assert linear_kl(**inputs, **options).shape == (0,)
    assert all(not g.any() for g in gradients(inputs, **options).values())


@each_kind
def test_mask_of_no_token_gives_zeros(options: dict[str, Any]) -> None:
    mask = torch.zeros(N, dtype=torch.bool)
    assert not linear_kl(**heads(), mask=mask, **options).any()
    assert all(not g.any() for g in gradients(heads(), mask=mask, **options).values())


@each_kind
def test_compiled_call_gives_the_eager_result(options: dict[str, Any]) -> None:
    inputs = heads()
    mask = torch.tensor([True, False, True, True, True, False])
    compiled = torch.compile(lambda **t: linear_kl(**t, mask=mask, **options), backend="aot_eager", fullgraph=True)
    leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
    got = compiled(**leaves)
    got.sum().backward()
    torch.testing.assert_close(got, linear_kl(**inputs, mask=mask, **options))
    want = gradients(inputs, mask=mask, **options)
    for name, leaf in leaves.items():
        assert relative_error(leaf.grad, want[name]) <= 1e-5, name


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"kind": "kl"}, OptionError, "kind='kl' is unknown; choose from forward, reverse, jsd"),
        ({"beta": 1.5}, OptionError, r"beta=1.5 is outside \[0, 1\]"),
        ({"beta": "half"}, OptionError, "beta='half'"),
        ({"temperature": 0.0}, OptionError, "temperature=0.0"),
        ({"teacher_softcap": -1.0}, OptionError, "teacher_softcap=-1.0"),
        ({"teacher_logit_scale": 0.0}, OptionError, "teacher_logit_scale=0.0"),
        ({"teacher_hidden": torch.randn(N + 1, G)}, ShapeError, "must agree"),
        ({"teacher_hidden": torch.randn(N, G + 1)}, ShapeError, "teacher_hidden is"),
        ({"teacher_weight": torch.randn(V + 8, G)}, ShapeError, "pass its first rows"),
        ({"teacher_bias": torch.randn(V + 1)}, ShapeError, "teacher_bias is"),
        ({"mask": torch.ones(N)}, ShapeError, "mask is"),
    ],
)
def test_invalid_arguments_are_refused_by_name(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        linear_kl(**{**heads(), **change})


@each_kind
def test_divergence_from_a_teachers_top_k_needs_no_logits(options: dict[str, Any], backend: Any) -> None:
    """`linear_logprobs` of K ids and `topk_divergence` are this op: value and gradients in fp64's, masked tokens 0."""
    inputs, K = heads(backend.device), 5
    teacher = (inputs["teacher_hidden"] @ inputs["teacher_weight"].t() / 1.5).log_softmax(-1)
    topk, ids = teacher.topk(K, -1)
    mask = torch.tensor([True, False, True, True, True, False], device=backend.device)
    kind, beta = options["kind"], options.get("beta", 0.5)
    x, w = (inputs[n].clone().requires_grad_() for n in ("hidden", "weight"))
    logprobs = linear_logprobs(x, w, ids.int(), temperature=1.5, mask=mask)
    got = topk_divergence(logprobs, topk, kind=kind, beta=beta).masked_fill(~mask, 0.0)
    exact_x, exact_w = (inputs[n].double().requires_grad_() for n in ("hidden", "weight"))
    log_s = (exact_x @ exact_w.t() / 1.5).log_softmax(-1).gather(-1, ids)
    log_t = topk.double()
    log_s, log_t = (torch.cat([t, (1 - t.exp().sum(-1, keepdim=True)).log()], -1) for t in (log_s, log_t))
    share = beta if kind == "jsd" else 0.0
    log_m = ((1 - share) * log_s.exp() + share * log_t.exp()).log()
    value = {
        "forward": lambda: (log_t.exp() * (log_t - log_s)).sum(-1),
        "reverse": lambda: (log_s.exp() * (log_s - log_t)).sum(-1),
        "jsd": lambda: (
            share * (log_t.exp() * (log_t - log_m)).sum(-1) + (1 - share) * (log_s.exp() * (log_s - log_m)).sum(-1)
        ),
    }[kind]()
    want = value.masked_fill(~mask, 0.0)
    assert relative_error(got, want) <= 1e-5
    upstream = torch.arange(1.0, 7.0, device=backend.device)
    gradients_ = torch.autograd.grad(got, (x, w), upstream.to(got.dtype))
    expected = torch.autograd.grad(want, (exact_x, exact_w), upstream.double())
    assert not gradients_[0][~mask].any()
    for g, e in zip(gradients_, expected, strict=True):
        assert relative_error(g, e) <= 1e-5
