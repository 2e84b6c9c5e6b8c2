"""Ids, outputs, blocks, masks and gradients of `linear_logprobs` and `logprobs` beyond the checks that every op has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import relative_error
from second_proofs import proved_by
from tigon.errors import DoubleBackwardError, DtypeError, LabelError, OptionError, ShapeError
from tigon.ops import linear_cross_entropy, linear_logprobs, logprobs
from tigon.ops import products as matrix_products
from tigon.ops.head import block_loop, blocks
from tigon.ops.head import logprobs as op_module
from tigon.ops.head import plan as sizes
from tigon.ops.head.block_loop import BlockPlan
from tigon.ops.head.logprobs import linear_logprobs_oracle
from tigon.ops.head.plan import LogitBytes, keeps_logits, plan_blocks, plan_kept, plan_whole_rows
from tigon.ops.losses.logprobs import logprobs_oracle

N, H, V = 10, 8, 37
ALL = ("lse", "entropy", "predicted")
KEPT, BLOCKS = 1 << 20, N * 12 * 4
"""chunk_bytes that keep all logits, and that give several blocks of tokens and of columns."""
CHUNKS = [pytest.param(KEPT, id="kept"), pytest.param(BLOCKS, id="blocks"), pytest.param(BLOCKS // 2, id="both-split")]
FIELDS = ("logprob", "lse", "entropy", "topk_logprob")


@pytest.fixture(autouse=True)
def short_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens too are split at these sizes, where a block of few columns would otherwise take all of them."""
    monkeypatch.setattr(sizes, "_FEWEST_COLUMNS", 12)
    monkeypatch.setattr(sizes, "_BLOCK_LOGIT_TOKENS", 4)


def head(device: Any = "cpu", dtype: torch.dtype = torch.float32, tokens: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and a weight that require gradients, and ids."""
    torch.manual_seed(25)
    hidden = torch.randn(tokens, H).to(device, dtype).requires_grad_()
    weight = torch.randn(V, H).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (tokens,)).to(device)


def flat(result: Any) -> dict[str, Tensor]:
    """The differentiable results by name."""
    if isinstance(result, Tensor):
        return {"logprob": result}
    return {name: value for name in FIELDS if (value := getattr(result, name)) is not None}


def upstreams(result: Any) -> list[Tensor]:
    torch.manual_seed(26)
    return [torch.randn(t.shape).to(t.device, t.dtype) for t in flat(result).values()]


def gradients(result: Any, leaves: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(list(flat(result).values()), leaves, upstreams(result), **options)


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def assert_like_oracle(hidden: Tensor, weight: Tensor, ids: Tensor, at_most: float = 2e-6, **options: Any) -> Any:
    """Values and gradients of `linear_logprobs` against the oracle in fp64; returns the op's result."""
    own = {name: options.pop(name) for name in ("chunk_bytes",) if name in options}
    found = linear_logprobs(hidden, weight, ids, **options, **own)
    exact_leaves = doubles(hidden, weight)
    exact = linear_logprobs_oracle(*exact_leaves, ids, **{**options, **_double_bias(options)})
    for name, value in flat(found).items():
        want = flat(exact)[name]
        # Blocks may round differently. The infinities must be the same.
        assert torch.equal(value.isinf(), want.isinf()), name
        at = want.isfinite()
        assert relative_error(value[at], want[at]) < at_most, name
    got = gradients(found, [hidden, weight])
    for name, mine, want in zip(("dX", "dW"), got, gradients(exact, exact_leaves), strict=True):
        assert relative_error(mine, want) < 2 * at_most, name
    return found, exact


def _double_bias(options: dict[str, Any]) -> dict[str, Any]:
    return {"bias": options["bias"].double()} if options.get("bias") is not None else {}


# --- the largest logits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize(
    "logit_scale", proved_by([-0.5], [1.0, -0.5], "a factor of 1 keeps the order that a negative one turns round")
)
@pytest.mark.parametrize("top_k", [1, 20, V], ids=str)
def test_largest_logits_and_their_gradients_equal_the_oracles(
    top_k: int, logit_scale: float, chunk_bytes: int, backend: Any
) -> None:
    """20 of 37 span every block, and a block of 12 columns has fewer than that."""
    hidden, weight, ids = head(backend.device)
    options = {"top_k": top_k, "logit_scale": logit_scale, "softcap": 6.0, "temperature": 0.8, "outputs": ALL}
    found, exact = assert_like_oracle(hidden, weight, ids, chunk_bytes=chunk_bytes, **options)
    assert torch.equal(found.topk_ids, exact.topk_ids) and found.topk_ids.dtype == torch.int64
    assert torch.equal(found.predicted, found.topk_ids[:, 0])
    of_logits = logprobs((hidden @ weight.t()).detach(), ids, **options)
    assert torch.equal(of_logits.topk_ids, exact.topk_ids)
    torch.testing.assert_close(of_logits.topk_logprob, found.topk_logprob.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_largest_logits_name_every_id_once_if_most_logits_are_minus_infinity(chunk_bytes: int, backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    bias = torch.full((V,), -torch.inf, device=backend.device)
    bias[[4, 30]] = 0.0
    found = linear_logprobs(hidden, weight, ids, bias=bias, top_k=V, chunk_bytes=chunk_bytes)
    every_id = torch.arange(V, device=backend.device).expand(N, V)
    assert torch.equal(found.topk_ids.sort(1).values, every_id)
    assert set(found.topk_ids[:, :2].unique().tolist()) == {4, 30}
    assert bool((found.topk_logprob[:, 2:] == -torch.inf).all())


def test_masked_token_has_no_largest_logits(backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    mask = torch.arange(N, device=backend.device) % 2 == 0
    found = linear_logprobs(hidden, weight, ids, mask=mask, top_k=3, outputs=ALL, ignore_index=-7)
    assert bool((found.topk_ids[~mask] == -7).all()) and bool((found.predicted[~mask] == -7).all())
    for values in flat(found).values():
        assert not values[~mask].any() and bool((values[mask] != 0).all())


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_that_repeat_or_are_ignored_get_their_own_upstream_gradient(
    dtype: torch.dtype, chunk_bytes: int, backend: Any
) -> None:
    hidden, weight, ids = head(backend.device)
    repeated = torch.stack([ids, ids, ids.flip(0), torch.full_like(ids, -100), ids], 1).to(dtype)
    repeated[3] = -100
    options = {"outputs": ("lse", "entropy")}
    found, _ = assert_like_oracle(hidden, weight, repeated, chunk_bytes=chunk_bytes, **options)
    assert found.logprob.shape == (N, 5)
    assert not found.logprob[3].any() and not found.lse[3].any() and not found.entropy[3].any()
    assert torch.equal(found.logprob[:, 0], found.logprob[:, 4]) and not found.logprob[:, 3].any()
    of_logits = logprobs((hidden @ weight.t()).detach(), repeated, **options)
    torch.testing.assert_close(of_logits.logprob, found.logprob.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_predicted_is_the_lowest_of_equal_logits_in_all_blocks(chunk_bytes: int, backend: Any) -> None:
    hidden = torch.ones(N, H, device=backend.device)
    weight = torch.zeros(V, H, device=backend.device)
    weight[[7, 20, 36]] = 1.0
    ids = torch.zeros(N, dtype=torch.int64, device=backend.device)
    for scale, lowest in ((1.0, 7), (-1.0, 0)):
        found = linear_logprobs(
            hidden, weight, ids, logit_scale=scale, outputs=("predicted",), chunk_bytes=chunk_bytes
        )  # fmt: skip
        assert found.predicted.tolist() == [lowest] * N
        assert logprobs(hidden @ weight.t(), ids, logit_scale=scale, outputs=("predicted",)).predicted[0] == lowest


@pytest.mark.parametrize("bad", [V, -3])
def test_id_outside_the_vocabulary_is_an_error_or_nan_in_its_row(bad: int, backend: Any) -> None:
    """The error names the caller's position although tokens before it are dropped."""
    hidden, weight, ids = head(backend.device)
    mask = torch.arange(N, device=backend.device) % 2 == 1
    ids[0], ids[5] = bad, bad  # the first is masked
    for call, first in ((linear_logprobs, (hidden, weight)), (logprobs, ((hidden @ weight.t()).detach(),))):
        if backend.name == "reference":
            with pytest.raises(LabelError, match=rf"label {bad} at position 5 "):
                call(*first, ids, mask=mask)
            continue
        found = call(*first, ids, mask=mask)
        assert found.isnan().nonzero().flatten().tolist() == [5]
    if backend.name == "kernel":
        for chunk_bytes in (KEPT, BLOCKS):
            found = linear_logprobs(hidden, weight, ids, mask=mask, chunk_bytes=chunk_bytes)
            (dx,) = torch.autograd.grad(found.nansum(), hidden)
            assert dx.isnan().any(1).nonzero().flatten().tolist() in ([], [5])
            assert found.isnan().nonzero().flatten().tolist() == [5]


def test_one_token_without_a_dimension_of_tokens(backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    found = linear_logprobs(hidden[0], weight, ids[0], outputs=ALL, top_k=2)
    rows = linear_logprobs(hidden[:1], weight, ids[:1], outputs=ALL, top_k=2)
    for one, of_rows in zip(found, rows, strict=True):
        assert one.shape == of_rows.shape[1:] and torch.equal(one, of_rows[0])
    assert linear_logprobs(hidden[0], weight, ids[:3]).shape == (3,)


# --- blocks, kept logits, long rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 4.0, "temperature": 0.5, "logit_scale": 2.0}], ids=["plain", "all"]
)
def test_result_does_not_depend_on_the_blocks(options: Any, backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    results = []
    for chunk_bytes in (KEPT, N * V * 4 - 1, BLOCKS, BLOCKS // 2, *(() if backend.interpreted else (84, 1))):
        found = linear_logprobs(hidden, weight, ids, outputs=ALL, chunk_bytes=chunk_bytes, **options)
        results.append([*flat(found).values(), *gradients(found, [hidden, weight])])
        assert torch.equal(found.predicted, linear_logprobs_oracle(hidden, weight, ids, outputs=ALL).predicted)
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert relative_error(got, want) < 2e-6


@pytest.mark.parametrize(
    "first_finite", proved_by([30], [5, 30], "30 words fill two blocks of 12 and a part of one, and 5 words a part")
)
@pytest.mark.parametrize("level", [0.0, -55.0, -300.0, 300.0])
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_vocabulary_masked_by_a_bias_of_minus_infinity_equals_a_smaller_vocabulary(
    chunk_bytes: int, level: float, first_finite: int, backend: Any
) -> None:
    """Whole blocks without a finite logit come first."""
    hidden, weight, ids = head(backend.device)
    bias = torch.full((V,), level, device=backend.device)
    bias[:first_finite] = -torch.inf
    ids = first_finite + ids % (V - first_finite)
    options = {"outputs": ("lse", "entropy")}
    found = linear_logprobs(hidden, weight, ids, bias=bias, chunk_bytes=chunk_bytes, **options)
    got = gradients(found, [hidden, weight])
    small = weight.detach()[first_finite:].requires_grad_()
    exact_leaves = doubles(hidden, small)
    exact = linear_logprobs_oracle(*exact_leaves, ids - first_finite, bias=bias[first_finite:].double(), **options)
    # Logits near `level` are multiples of its rounding step.
    at_most = 2e-6 if level == 0.0 else 1e-4
    for name, value in flat(found).items():
        assert relative_error(value, flat(exact)[name]) < at_most, name
    dx, dw = gradients(exact, exact_leaves)
    assert relative_error(got[0], dx) < at_most and relative_error(got[1][first_finite:], dw) < at_most
    assert not got[1][:first_finite].any()


def test_log_probability_of_a_masked_word_is_minus_infinity(backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    bias = torch.zeros(V, device=backend.device)
    bias[3] = -torch.inf
    ids[:] = 3
    for chunk_bytes in (KEPT, BLOCKS):
        found = linear_logprobs(hidden, weight, ids, bias=bias, chunk_bytes=chunk_bytes)
        assert bool((found == -torch.inf).all())


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_nan_stays_in_its_row(chunk_bytes: int, backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    broken = hidden.detach().clone()
    broken[4, 2] = torch.nan
    broken.requires_grad_()
    found = linear_logprobs(broken, weight, ids, outputs=("lse", "entropy"), chunk_bytes=chunk_bytes)
    clean = linear_logprobs(hidden, weight, ids, outputs=("lse", "entropy"), chunk_bytes=chunk_bytes)
    others = torch.arange(N, device=backend.device) != 4
    for got, want in zip(flat(found).values(), flat(clean).values(), strict=True):
        assert bool(got[4].isnan()) and relative_error(got[others], want[others]) < 1e-6
    dx, dx_clean = gradients(found, [broken])[0], gradients(clean, [hidden])[0]
    assert bool(dx[4].isnan().all()) and relative_error(dx[others], dx_clean[others]) < 1e-6


@pytest.mark.parametrize("tokens, masked", [(N, N // 2), (65, 1)], ids=["half", "too few to drop"])
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_nan_in_a_masked_row_reaches_no_gradient(tokens: int, masked: int, chunk_bytes: int, backend: Any) -> None:
    hidden, weight, ids = head(backend.device, tokens=tokens)
    broken = hidden.detach().clone()
    mask = torch.arange(tokens, device=backend.device) >= masked
    broken[~mask] = torch.nan
    broken.requires_grad_()
    found = linear_logprobs(broken, weight, ids, mask=mask, chunk_bytes=chunk_bytes)
    for gradient in torch.autograd.grad(found.sum(), (broken, weight)):
        assert bool(gradient.isfinite().all())


def test_second_backward_of_kept_logits_equals_the_first(backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    found = linear_logprobs(hidden, weight, ids, outputs=("entropy",), top_k=2, chunk_bytes=KEPT)
    first = gradients(found, [hidden, weight], retain_graph=True)
    second = gradients(found, [hidden, weight], retain_graph=True)
    last = gradients(found, [hidden, weight])
    for a, b, c in zip(first, second, last, strict=True):
        assert torch.equal(a, b) and relative_error(c, a) < 1e-6
    with pytest.raises(RuntimeError, match="second time"):
        gradients(found, [hidden, weight])


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_no_input_output_or_upstream_gradient_is_written_to(chunk_bytes: int, backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    bias, mask = torch.zeros(V, device=backend.device, requires_grad=True), ids >= 0
    found = linear_logprobs(
        hidden, weight, ids, bias=bias, mask=mask, outputs=ALL, top_k=3, chunk_bytes=chunk_bytes
    )  # fmt: skip
    given = upstreams(found)
    watched = [hidden, weight, ids, bias, mask, *found, *given]
    before = [(t.detach().clone(), t._version) for t in watched]
    torch.autograd.grad(list(flat(found).values()), (hidden, weight, bias), given)
    for t, (value, version) in zip(watched, before, strict=True):
        assert torch.equal(t, value) and t._version == version


@pytest.mark.parametrize("call", ["linear", "logits"])
@pytest.mark.parametrize("only", FIELDS)
def test_one_result_alone_has_its_gradient(only: str, call: str, backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    options = {"outputs": ("lse", "entropy"), "top_k": 3}
    exact_leaves = doubles(hidden, weight)
    exact = flat(linear_logprobs_oracle(*exact_leaves, ids, **options))[only]
    upstream = torch.linspace(-1, 2, exact.numel()).view(exact.shape)
    want = torch.autograd.grad(exact, exact_leaves, upstream.double().to(backend.device))
    for chunk_bytes in (KEPT, BLOCKS):
        if call == "linear":
            found = linear_logprobs(hidden, weight, ids, chunk_bytes=chunk_bytes, **options)
        else:
            found = logprobs(hidden @ weight.t(), ids, **options)
        got = torch.autograd.grad(flat(found)[only], (hidden, weight), upstream.to(backend.device))
        for mine, theirs in zip(got, want, strict=True):
            assert relative_error(mine, theirs) < 2e-6


IN_BF16 = LogitBytes(logits=4, gradients=2)


@pytest.mark.parametrize("size", [IN_BF16, LogitBytes(4, 4), LogitBytes(8, 2), LogitBytes(8, 4)])
@pytest.mark.parametrize(("tokens", "vocab"), [(4096, 128256), (131072, 128256), (1000, 50257), (64, 300)])
@pytest.mark.parametrize("block_bytes", [1 << 20, 64 << 20, 512 << 20])
def test_logits_of_a_block_and_their_gradient_fit_into_the_bytes(
    size: LogitBytes, tokens: int, vocab: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the sizes of a model
    plan = plan_blocks(tokens, vocab, size, block_bytes)
    assert 0 < plan.logit_tokens <= plan.tokens
    assert plan.columns * (plan.logit_tokens * size.logits + plan.tokens * size.gradients) <= block_bytes
    if keeps_logits(tokens, vocab, size, block_bytes):
        kept = plan_kept(tokens, vocab, size, block_bytes)
        assert kept.tokens == tokens
        assert tokens * (vocab * size.logits + kept.columns * size.gradients) <= block_bytes


def test_plan_takes_all_tokens_first_and_keeps_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert plan_blocks(4096, 128256, IN_BF16, 512 << 20).tokens == 4096
    assert plan_blocks(131072, 128256, IN_BF16, 512 << 20).tokens <= sizes._MOST_TOKENS
    assert plan_blocks(1, 5, IN_BF16, 1) == BlockPlan(1, 1, 1)
    assert keeps_logits(1900, 128256, IN_BF16, 1 << 30) and not keeps_logits(2048, 128256, IN_BF16, 1 << 30)


@pytest.mark.parametrize(
    ("tokens", "hidden_size", "vocab", "chunk_bytes"),
    [(131072, 4, 24, 1 << 20), (131072, 4, 24, 1 << 30), (3, 16, 262144, 1 << 20)],
    ids=["long-sequence", "long-sequence-kept", "wide-vocabulary"],
)  # fmt: skip
def test_long_sequences_and_wide_vocabularies_are_as_accurate_as_the_oracle(
    tokens: int, hidden_size: int, vocab: int, chunk_bytes: int
) -> None:
    """fp32 on the CPU against fp64, at most twice the oracle's error."""
    torch.manual_seed(27)
    hidden = torch.randn(tokens, hidden_size).requires_grad_()
    weight = torch.randn(vocab, hidden_size).requires_grad_()
    ids = torch.randint(0, vocab, (tokens,))
    options = {"outputs": ("lse", "entropy")}
    exact_leaves = doubles(hidden, weight)
    exact = linear_logprobs_oracle(*exact_leaves, ids, **options)
    unfused = linear_logprobs_oracle(hidden, weight, ids, **options)
    found = linear_logprobs(hidden, weight, ids, chunk_bytes=chunk_bytes, **options)
    truth = [*flat(exact).values(), *gradients(exact, exact_leaves)]
    theirs = [*flat(unfused).values(), *gradients(unfused, [hidden, weight])]
    mine = [*flat(found).values(), *gradients(found, [hidden, weight])]
    for got, other, want in zip(mine, theirs, truth, strict=True):
        assert relative_error(got, want) <= 2 * relative_error(other, want) + 2e-7


# --- tokens and products that are left out ----------------------------------------------------------------------------


class Products:
    """Records the rows whose logits are computed, and the matrix products."""

    def __init__(self, monkeypatch: Any) -> None:
        self.rows: list[int] = []
        self.products: list[tuple[int, ...]] = []
        add_block, product_into = blocks.add_block, block_loop.product_into
        logits_into = matrix_products.logits_into

        def added(block: Any, *args: Any) -> None:
            self.rows.append(block.logits_NC.shape[0])
            add_block(block, *args)

        def product(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
            self.products.append((a.shape[0], a.shape[1], b.shape[1]))
            product_into(a, b, out, accumulate)

        def logits(x: Tensor, weight: Tensor, bias: Any, out: Tensor) -> None:
            self.products.append((*x.shape, weight.shape[0]))
            logits_into(x, weight, bias, out)

        monkeypatch.setattr(blocks, "add_block", added)
        monkeypatch.setattr(block_loop, "product_into", product)
        monkeypatch.setattr(matrix_products, "logits_into", logits)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    monkeypatch.setattr(op_module, "WORTH_A_WAIT_FLOPS", {"mask": 0, "ids": 0})
    return Products(monkeypatch)


@pytest.mark.parametrize("by", ["mask", "ids"])
def test_masked_tokens_are_left_out_of_every_product(by: str, products: Products, backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    mask = torch.arange(N, device=backend.device) % 3 == 0
    options = {"mask": mask} if by == "mask" else {}
    found = linear_logprobs(
        hidden, weight, ids if by == "mask" else ids.where(mask, -100), chunk_bytes=BLOCKS, outputs=ALL, **options
    )  # fmt: skip
    gradients(found, [hidden, weight])
    assert set(products.rows) == {4} and all(N not in product for product in products.products)
    (dx,) = torch.autograd.grad(linear_logprobs(hidden, weight, ids, mask=mask).sum(), hidden)
    assert not dx[~mask].any() and bool((dx[mask] != 0).any(1).all())


@pytest.mark.parametrize("tokens", [0, N])
def test_no_token_or_none_that_counts_computes_nothing(tokens: int, products: Products, backend: Any) -> None:
    hidden, weight, ids = head(backend.device, tokens=tokens)
    bias = torch.zeros(V, device=backend.device, requires_grad=True)
    mask = torch.zeros(tokens, dtype=torch.bool, device=backend.device)
    found = linear_logprobs(hidden, weight, ids, bias=bias, mask=mask, outputs=ALL, top_k=2)
    assert sum(products.rows) == 0
    assert found.topk_ids.shape == (tokens, 2) and not found.logprob.any() and bool((found.predicted == -100).all())
    for gradient, leaf in zip(gradients(found, [hidden, weight, bias]), (hidden, weight, bias), strict=True):
        assert gradient.shape == leaf.shape and not gradient.any()
    logits = torch.empty(tokens, V, device=backend.device).requires_grad_()
    of_logits = logprobs(logits, ids, mask=mask, outputs=ALL, top_k=2)
    assert not of_logits.logprob.any() and bool((of_logits.predicted == -100).all())
    (gradient,) = gradients(of_logits, [logits])
    assert gradient.shape == logits.shape and not gradient.any()


def test_frozen_half_and_no_grad_skip_their_products(products: Products, backend: Any) -> None:
    hidden, weight, ids = head(backend.device)

    def count(x: Tensor, w: Tensor, chunk_bytes: int, *, grad: bool = True) -> int:
        products.products.clear()
        with torch.set_grad_enabled(grad):
            found = linear_logprobs(x, w, ids, chunk_bytes=chunk_bytes)
        if found.requires_grad:
            found.sum().backward()
        return len(products.products)

    parts = -(-N // sizes._BLOCK_LOGIT_TOKENS)
    assert count(hidden, weight, KEPT) == 1 + 2
    assert count(hidden, weight.detach(), KEPT) == parts + 1
    assert count(hidden.detach(), weight, KEPT) == 1 + 1
    assert count(hidden.detach(), weight.detach(), KEPT) == parts
    assert count(hidden, weight, KEPT, grad=False) == parts
    # Kept logits beside an eighth of their gradient.
    assert count(hidden, weight, N * (V + 5) * 4) == 1 + 8 * 2
    # Blocks of tokens and columns, whose logits are computed again in the backward.
    plan = plan_blocks(N, V, LogitBytes(4, 4), BLOCKS)
    columns = len(plan.column_slices(V))
    gradients = columns * len(plan.token_slices(N))
    logits = columns * sum(len(plan.logit_slices(rows)) for rows in plan.token_slices(N))
    assert logits > gradients > columns > 1
    assert count(hidden, weight, BLOCKS) == 2 * logits + 2 * gradients
    once = plan_whole_rows(N, V, LogitBytes(4, 4), BLOCKS)
    parts_once = sum(len(once.logit_slices(rows)) for rows in once.token_slices(N))
    assert count(hidden, weight.detach(), BLOCKS) == parts_once + len(once.token_slices(N))
    assert count(hidden, weight, BLOCKS, grad=False) == logits


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_mode_saves_nothing(mode: Any, backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    saved: list[Tensor] = []
    with mode(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = linear_logprobs(hidden, weight, ids, outputs=ALL, top_k=2)
        of_logits = logprobs(hidden @ weight.t(), ids, outputs=ALL, top_k=2)
    assert not saved and not found.logprob.requires_grad and not of_logits.logprob.requires_grad


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_second_derivative_is_refused(chunk_bytes: int) -> None:
    hidden, weight, ids = head()
    with pytest.raises(DoubleBackwardError, match="create_graph"):
        torch.autograd.grad(
            linear_logprobs(hidden, weight, ids, chunk_bytes=chunk_bytes).sum(), hidden, create_graph=True
        )
    with pytest.raises(DoubleBackwardError, match="create_graph"):
        torch.autograd.grad(logprobs(hidden @ weight.t(), ids).sum(), hidden, create_graph=True)


# --- strides, dtypes, compilers ---------------------------------------------------------------------------------------


def test_strided_hidden_weight_ids_and_mask_give_the_same_result(backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    ids_NK = torch.stack([ids, ids.flip(0)], 1)
    mask = torch.arange(N, device=backend.device) != 2
    strided = {
        "hidden": torch.stack([hidden.detach(), hidden.detach() * torch.nan], -1)[..., 0].requires_grad_(),
        "weight": weight.detach().t().contiguous().t().requires_grad_(),
        "ids": ids_NK.t().contiguous().t(),
        "mask": torch.stack([mask, ~mask], 1)[:, 0],
    }
    for chunk_bytes in (KEPT, BLOCKS):
        found = linear_logprobs(**strided, outputs=("entropy",), chunk_bytes=chunk_bytes)
        expected = linear_logprobs(
            hidden, weight, ids_NK, mask=mask, outputs=("entropy",), chunk_bytes=chunk_bytes
        )  # fmt: skip
        torch.testing.assert_close(found.logprob, expected.logprob, rtol=1e-6, atol=1e-6)
        got = gradients(found, [strided["hidden"], strided["weight"]])
        for mine, want in zip(got, gradients(expected, [hidden, weight]), strict=True):
            assert relative_error(mine, want) < 2e-6


def test_strided_logits_give_the_same_result_and_gradient(backend: Any) -> None:
    torch.manual_seed(28)
    dense = torch.randn(N, V, device=backend.device)
    ids = torch.randint(0, V, (N,), device=backend.device)
    wide = torch.cat([dense * torch.nan, dense, dense * torch.nan], 1)
    for logits in (wide[:, V : 2 * V], dense.t().contiguous().t(), wide.view(N, 3, V)[:, 1]):
        a, b = logits.detach().requires_grad_(), dense.clone().requires_grad_()
        found, expected = (logprobs(t, ids, outputs=("entropy",), top_k=2) for t in (a, b))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(found, [a]), gradients(expected, [b]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_the_products_in_its_dtype(dtype: torch.dtype) -> None:
    hidden, weight, ids = head()
    with torch.autocast("cpu", dtype=dtype):
        found = linear_logprobs(hidden, weight, ids, outputs=("entropy",))
    explicit = linear_logprobs(hidden.to(dtype), weight.to(dtype), ids, outputs=("entropy",))
    assert found.logprob.dtype == torch.float32 and torch.equal(found.logprob, explicit.logprob)
    for mine, want in zip(gradients(found, [hidden, weight]), gradients(explicit, [hidden, weight]), strict=True):
        assert mine.dtype == torch.float32 and torch.equal(mine, want)


@pytest.mark.parametrize("chunk_bytes", [pytest.param(KEPT, id="kept"), pytest.param(BLOCKS, id="blocks")])
def test_compiled_call_equals_the_eager_one(chunk_bytes: int) -> None:
    hidden, weight, ids = head()
    mask = torch.arange(N) != 4
    options = {"outputs": ALL, "top_k": 3, "temperature": 0.7, "chunk_bytes": chunk_bytes}

    def linear(hidden: Tensor, weight: Tensor) -> Any:
        return linear_logprobs(hidden, weight, ids, mask=mask, **options)

    def of_logits(hidden: Tensor, weight: Tensor) -> Any:
        return logprobs(hidden @ weight.t(), ids, mask=mask, outputs=ALL, top_k=3)

    for call in (linear, of_logits):
        torch._dynamo.reset()
        found = torch.compile(call, backend="aot_eager", fullgraph=True)(hidden, weight)
        expected = call(hidden, weight)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        for got, want in zip(gradients(found, [hidden, weight]), gradients(expected, [hidden, weight]), strict=True):
            assert relative_error(got, want) < 2e-6


@pytest.mark.parametrize("options", [{}, {"outputs": ALL, "top_k": 3}], ids=["plain", "all"])
def test_fake_tensors_give_the_shapes_and_dtypes_of_real_ones(options: Any) -> None:
    def step(hidden: Tensor, weight: Tensor, ids: Tensor) -> list[tuple[Any, ...]]:
        found = linear_logprobs(hidden, weight, ids, **options)
        of_logits = logprobs(hidden @ weight.t(), ids, **options)
        tensors = [t for r in (found, of_logits) for t in ((r,) if isinstance(r, Tensor) else r) if t is not None]
        tensors += [*gradients(found, [hidden, weight]), *gradients(of_logits, [hidden, weight])]
        return [(t.shape, t.dtype, t.stride()) for t in tensors]

    real = head(dtype=torch.bfloat16)
    expected = step(*real)
    with FakeTensorMode() as mode:
        assert step(*(mode.from_tensor(t) for t in real)) == expected


# --- other ops, and refusals ------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_linear_cross_entropy(backend: Any) -> None:
    hidden, weight, ids = head(backend.device)
    ids[2] = -100
    loss, entropy, logprob = _cross_entropy_outputs(hidden, weight, ids)
    for chunk_bytes in (KEPT, BLOCKS):
        found = linear_logprobs(hidden, weight, ids, outputs=("entropy",), chunk_bytes=chunk_bytes)
        torch.testing.assert_close(found.logprob, -loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.logprob.detach(), logprob.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.entropy.detach(), entropy.detach(), rtol=2e-6, atol=2e-6)
        upstream = torch.linspace(-1, 2, N, device=backend.device)
        got = torch.autograd.grad(found.logprob, (hidden, weight), upstream)
        want = torch.autograd.grad(loss, (hidden, weight), -upstream, retain_graph=True)
        for mine, theirs in zip(got, want, strict=True):
            assert relative_error(mine, theirs) < 2e-6


def _cross_entropy_outputs(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = linear_cross_entropy(hidden, weight, ids, reduction="none", outputs=("logprob", "entropy"))
    return found.loss, found.entropy, found.logprob


def test_logprobs_of_logits_are_those_of_log_softmax(backend: Any) -> None:
    torch.manual_seed(29)
    logits = torch.randn(2, 5, V, device=backend.device)
    ids = torch.randint(0, V, (2, 5), device=backend.device)
    expected = F.log_softmax(logits, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs(logits, ids), expected)
    torch.testing.assert_close(logprobs(logits, ids), logprobs_oracle(logits, ids))


def test_unfit_arguments_are_refused() -> None:
    hidden, weight, ids = head()
    refused: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ShapeError, "ids", ids[:-1], {}),
        (ShapeError, "'K'", ids.view(N, 1, 1), {}),
        (ShapeError, "'K'", torch.empty(N, 0, dtype=torch.int64), {}),
        (DtypeError, "int64", ids.float(), {}),
        (ShapeError, "mask", ids, {"mask": ids}),
        (ShapeError, "mask", ids, {"mask": ids[:-1] > 0}),
        (OptionError, "top_k", ids, {"top_k": V + 1}),
        (OptionError, "top_k", ids, {"top_k": -1}),
        (OptionError, "top_k", ids, {"top_k": 1.0}),
        (OptionError, "outputs", ids, {"outputs": "entropy"}),
        (OptionError, "perplexity", ids, {"outputs": ("perplexity",)}),
        (OptionError, "temperature", ids, {"temperature": 0.0}),
        (OptionError, "softcap", ids, {"softcap": -1.0}),
        (OptionError, "logit_scale", ids, {"logit_scale": 0}),
        (OptionError, "ignore_index", ids, {"ignore_index": 1.5}),
    ]
    for error, match, chosen, options in refused:
        with pytest.raises(error, match=match):
            linear_logprobs(hidden, weight, chosen, **options)
        with pytest.raises(error, match=match):
            logprobs(hidden @ weight.t(), chosen, **options)
    with pytest.raises(ShapeError, match="gather it first"):
        linear_logprobs(hidden, torch.empty(0), ids)
    with pytest.raises(OptionError, match="chunk_bytes"):
        linear_logprobs(hidden, weight, ids, chunk_bytes=0)


def test_products_get_whole_lines_of_an_odd_vocabulary(products: Products) -> None:
    """A block starts at a multiple of its columns, whose last block is what is left."""
    hidden, weight, ids = head()
    linear_logprobs(hidden, weight, ids, chunk_bytes=BLOCKS).sum().backward()
    blocks_of_logits = [product[0] * product[2] for product in products.products if product[1] == H]
    assert sum(blocks_of_logits) == 2 * N * V and max(blocks_of_logits) * 4 <= BLOCKS
    assert matrix_products.product_into is not block_loop.product_into


@pytest.mark.parametrize("of_logits", [False, True], ids=["linear", "logits"])
def test_largest_logit_whose_id_is_ignore_index_keeps_its_gradient(of_logits: bool, backend: Any) -> None:
    """A padding token's id is often 0 or the vocabulary's last; the model may still predict it."""
    hidden, weight, ids = head(backend.device)
    ignore_index = int(torch.mode((hidden @ weight.t()).argmax(1)).values)
    ids[0] = ignore_index  # a token that is left out beside those that are not
    options: dict[str, Any] = {"top_k": 3, "ignore_index": ignore_index}
    if not of_logits:
        found, _ = assert_like_oracle(hidden, weight, ids, **options)
    else:
        logits = (hidden @ weight.t()).detach().requires_grad_()
        exact_logits = logits.detach().double().requires_grad_()
        found = logprobs(logits, ids, **options)
        exact = logprobs_oracle(exact_logits, ids, **options)
        (got,), (want,) = gradients(found, [logits]), gradients(exact, [exact_logits])
        assert relative_error(got, want) < 4e-6
    assert bool((found.topk_ids[1:] == ignore_index).any())
