"""Chunks, budgets, what is skipped, and dtypes of the linear loss; its values are checked with every op's."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import assert_within, relative_error
from tigon.errors import LabelError, OptionError, ShapeError
from tigon.ops import dispatch, linear_cross_entropy, prepare_targets, products
from tigon.ops.head import chunks
from tigon.ops.head import cross_entropy as op_module
from tigon.ops.head import inputs as head_inputs
from tigon.ops.head.chunks import ChunkRequest, buffer_bytes, make_chunk_plan, plan_within
from tigon.ops.head.inputs import MIB
from tigon.ops.losses import inputs
from tigon.ops.losses.cross_entropy_rows import Rows

N, H, V = 24, 16, 53


def head(device: torch.device, dtype: torch.dtype = torch.float32, ignored: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(9)
    x = torch.randn(N, H).to(dtype).to(device).requires_grad_()
    w = (torch.randn(V, H) / 2).to(dtype).to(device).requires_grad_()
    target = torch.randint(0, V, (N,)).to(device)
    target[torch.randperm(N)[:ignored].to(device)] = -100
    return x, w, target


def bytes_for(rows: int, dtype: torch.dtype = torch.float32) -> int:
    return rows * V * dtype.itemsize


# Rows in a chunk; with so small a head the budget, not the accumulator, decides, except at the largest.
CHUNKS = [1, 5, 7, 12, 24]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_result_does_not_depend_on_the_chunk_size(reduction: str, backend: Any) -> None:
    """The loss within 1e-6, relative, in fp32; gradients within rounding; either half frozen too."""
    x, w, target = head(backend.device, ignored=6)
    upstream = torch.linspace(-1, 2, N, device=backend.device) if reduction == "none" else torch.tensor(0.7)
    upstream = upstream.to(backend.device)
    losses, grads = [], []
    for rows in CHUNKS[2::2] if backend.interpreted else CHUNKS:
        for frozen in (None, "weight", "hidden"):
            a = x.detach().requires_grad_(frozen != "hidden")
            b = w.detach().requires_grad_(frozen != "weight")
            loss = linear_cross_entropy(a, b, target, reduction=reduction, chunk_bytes=bytes_for(rows))
            loss.backward(upstream)
            losses.append(loss.detach())
            grads.append((a.grad, b.grad))
            assert (a.grad is None) == (frozen == "hidden") and (b.grad is None) == (frozen == "weight")
    for loss in losses:
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=1e-6 if reduction == "none" else 0.0)
    for dx, dw in grads:
        assert dx is None or relative_error(dx, grads[0][0]) < 5e-7
        assert dw is None or relative_error(dw, grads[0][1]) < 5e-7


@pytest.mark.parametrize("chunk_bytes", [bytes_for(N), bytes_for(7)], ids=["keep", "stream"])
def test_hidden_states_of_any_strides_have_the_same_gradient(chunk_bytes: int, backend: Any) -> None:
    """Ignored rows are often gathered first, which makes hidden contiguous; here nothing is ignored."""
    x, w, target = head(backend.device)
    wide = torch.stack((x.detach(), torch.full_like(x, float("nan"))), -1).flatten(-2)
    results = []
    for hidden in (x.detach(), wide[:, ::2], x.detach().t().contiguous().t()):
        hidden.requires_grad_()
        w.grad = None
        linear_cross_entropy(hidden, w, target, chunk_bytes=chunk_bytes).backward()
        results.append((hidden.grad, w.grad))
    for dx, dw in results[1:]:
        assert relative_error(dx, results[0][0]) < 2e-6 and relative_error(dw, results[0][1]) < 2e-6


def test_fp16_weight_gradient_is_computed_in_fp32_some_rows_at_a_time(backend: Any, monkeypatch: Any) -> None:
    """The product that waits for its loss scale in fp32 is made some rows at a time, and they are the right rows."""
    torch.manual_seed(11)
    tokens, hidden, vocab = 40, 16, 300
    x = torch.randn(tokens, hidden).half().to(backend.device).requires_grad_()
    w = (torch.randn(vocab, hidden) / 2).half().to(backend.device).requires_grad_()
    target = torch.randint(0, vocab, (tokens,)).to(backend.device)
    whole = torch.autograd.grad(linear_cross_entropy(x, w, target) * 1024, w)[0]
    monkeypatch.setattr(op_module, "_PRODUCT_BYTES", 1)  # a tile of 128 rows: 300 are three turns, the last not full
    rows: list[int] = []
    product_into = op_module.product_into

    def counted(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
        rows.append(out.shape[0])
        product_into(a, b, out, accumulate)

    monkeypatch.setattr(op_module, "product_into", counted)
    in_turns = torch.autograd.grad(linear_cross_entropy(x, w, target) * 1024, w)[0]
    assert rows == [128, 128, 44, tokens]  # and the gradient of hidden
    assert relative_error(in_turns, whole) < 1e-3


def test_many_bf16_chunks_stay_as_accurate_as_the_unfused_op(backend: Any) -> None:
    """16 chunks and more in bf16 against fp64, at most twice the unfused op's error, in every mode."""
    if backend.interpreted:
        pytest.skip("the interpreter cuts bf16 off instead of rounding; the reference and GPUs run this")
    torch.manual_seed(10)
    tokens, hidden, vocab = 2048, 64, 1000
    x = torch.randn(tokens, hidden).bfloat16().to(backend.device).requires_grad_()
    w = (torch.randn(vocab, hidden) / 8).bfloat16().to(backend.device).requires_grad_()
    target = torch.randint(0, vocab, (tokens,)).to(backend.device)
    truth_x, truth_w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    truth = torch.autograd.grad(F.cross_entropy(truth_x @ truth_w.t(), target), (truth_x, truth_w))
    unfused = torch.autograd.grad(F.cross_entropy((x @ w.t()).float(), target), (x, w))
    one = torch.tensor(1.0, device=backend.device)
    for chunk_bytes in (1 << 30, 2 * vocab * 128):
        for reduction, upstream in (("mean", one), ("none", (one / tokens).expand(tokens))):
            loss = linear_cross_entropy(x, w, target, reduction=reduction, chunk_bytes=chunk_bytes)
            for got, exact, base, name in zip(
                torch.autograd.grad(loss, (x, w), upstream), truth, unfused, ("dX", "dW"), strict=True
            ):
                assert_within(got, exact, base, 2.0, f"{name}, {reduction}, {chunk_bytes} bytes")


class Shapes:
    """Records the largest first-dimension-times-vocabulary tensor that reaches the row-wise pass, and the products."""

    def __init__(self, monkeypatch: Any) -> None:
        self.logits_rows: list[int] = []
        self.products: list[tuple[int, ...]] = []
        inner = chunks.rows_with_gradient

        def run(rows: Rows, *args: Any) -> Any:
            self.logits_rows.append(rows.logits_NV.shape[0])
            return inner(rows, *args)

        monkeypatch.setattr(chunks, "rows_with_gradient", run)
        for name in ("mm", "addmm"):
            real = getattr(torch, name)

            def product(*args: Any, _real: Any = real, **options: Any) -> Tensor:
                factors = [a for a in args if isinstance(a, Tensor)][-2:]
                self.products.append((factors[0].shape[0], factors[0].shape[1], factors[1].shape[1]))
                return _real(*args, **options)

            monkeypatch.setattr(torch, name, product)


@pytest.mark.parametrize("rows", [1, 5, 7])
def test_logits_stay_within_the_chunk_budget(rows: int, backend: Any, monkeypatch: Any) -> None:
    x, w, target = head(backend.device)
    shapes = Shapes(monkeypatch)
    linear_cross_entropy(x, w.detach(), target, chunk_bytes=bytes_for(rows)).backward()
    assert max(shapes.logits_rows) <= rows and sum(shapes.logits_rows) == N


def test_results_of_a_chunk_are_freed_before_the_next_chunk(backend: Any, monkeypatch: Any) -> None:
    x, w, target = head(backend.device)
    previous: list[weakref.ref[Tensor]] = []
    alive = []
    inner = chunks.rows_with_gradient

    def run(*args: Any) -> Any:
        alive.append(sum(ref() is not None for ref in previous))
        results = inner(*args)
        previous[:] = [weakref.ref(result) for result in results]
        return results

    monkeypatch.setattr(chunks, "rows_with_gradient", run)
    linear_cross_entropy(x, w, target, chunk_bytes=bytes_for(7), outputs=("entropy", "predicted"))
    assert alive == [0, 0, 0, 0]


def test_ignored_tokens_are_left_out_of_every_product(backend: Any, monkeypatch: Any) -> None:
    """Both with a plain target and with a prepared one."""
    for prepare in (False, True):
        monkeypatch.setattr(head_inputs, "_WORTH_A_WAIT_FLOPS", 0)
        x, w, target = head(backend.device, ignored=15)
        shapes = Shapes(monkeypatch)
        linear_cross_entropy(x, w, prepare_targets(target) if prepare else target).backward()
        assert sum(shapes.logits_rows) == N - 15
        assert all(N not in product for product in shapes.products)
        kept = target != -100
        assert torch.equal(x.grad[~kept], torch.zeros_like(x.grad[~kept])) and bool((x.grad[kept] != 0).any(1).all())
        monkeypatch.undo()


def test_few_ignored_tokens_are_computed_instead_of_gathering_the_rest(backend: Any, monkeypatch: Any) -> None:
    """One row of 64 ignored: taking it along is cheaper than gathering 63 and scattering their gradient."""
    monkeypatch.setattr(head_inputs, "_WORTH_A_WAIT_FLOPS", 0)
    torch.manual_seed(4)
    x, w = torch.randn(64, H).to(backend.device), torch.randn(V, H).to(backend.device)
    target = torch.randint(0, V, (64,)).to(backend.device)
    target[-1] = -100
    found = []
    for left_out, rows in ((inputs._LEFT_OUT, 64), (0.0, 63)):
        with monkeypatch.context() as patch:
            patch.setattr(inputs, "_LEFT_OUT", left_out)
            shapes = Shapes(patch)
            leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
            loss = linear_cross_entropy(*leaves, target)
            found.append([loss, *torch.autograd.grad(loss, leaves)])
            assert sum(shapes.logits_rows) == rows
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) < 1e-6
    assert not found[0][1][-1].any()


def test_all_labels_ignored_computes_no_logits(backend: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(head_inputs, "_WORTH_A_WAIT_FLOPS", 0)
    x, w, target = head(backend.device, ignored=N)
    shapes = Shapes(monkeypatch)
    linear_cross_entropy(x, w, target).backward()
    assert sum(shapes.logits_rows) == 0
    assert torch.equal(w.grad, torch.zeros_like(w)) and torch.equal(x.grad, torch.zeros_like(x))


def test_prepared_targets_give_the_same_result(backend: Any) -> None:
    x, w, target = head(backend.device, ignored=7)
    for shape in ((N,), (2, N // 2)):
        hidden, labels = x.view(*shape, H), target.view(shape)
        plain = linear_cross_entropy(hidden, w, labels, reduction="none")
        prepared = linear_cross_entropy(hidden, w, prepare_targets(labels), reduction="none")
        assert torch.equal(plain, prepared) and plain.shape == shape
    renamed = torch.where(target == -100, 3, target)
    plain = linear_cross_entropy(x, w, renamed, ignore_index=3)
    assert torch.equal(linear_cross_entropy(x, w, prepare_targets(renamed, ignore_index=3), ignore_index=3), plain)


def test_frozen_half_or_eval_costs_no_product(backend: Any, monkeypatch: Any) -> None:
    """Three products with both gradients, two with one frozen, one in eval and under no_grad."""
    x, w, target = head(backend.device)

    def products(hidden: Tensor, weight: Tensor, *, grad: bool = True) -> int:
        with monkeypatch.context() as patched:
            shapes = Shapes(patched)
            with torch.set_grad_enabled(grad):
                loss = linear_cross_entropy(hidden, weight, target)
            if loss.requires_grad:
                loss.backward()
            return len(shapes.products)

    assert products(x, w) == 3
    assert products(x, w.detach()) == 2
    assert products(x.detach(), w) == 2
    assert products(x.detach(), w.detach()) == 1
    assert products(x, w, grad=False) == 1


def test_no_grad_saves_nothing(backend: Any) -> None:
    x, w, target = head(backend.device)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        with torch.no_grad():
            loss = linear_cross_entropy(x, w, target)
        with torch.inference_mode():
            inference = linear_cross_entropy(x, w, target)
        assert not packed
    assert not loss.requires_grad and torch.equal(loss, inference)
    assert torch.equal(loss, linear_cross_entropy(x, w, target).detach())


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_mixed_dtypes_are_as_accurate_as_the_promoted_product(
    x_dtype: Any, w_dtype: Any, autocast: Any, backend: Any
) -> None:
    """Products run in the promoted dtype, or in autocast's; each gradient has the dtype of its tensor."""
    if backend.interpreted and torch.bfloat16 in (x_dtype, w_dtype, autocast):
        pytest.skip("the interpreter cuts bf16 off instead of rounding; the reference and GPUs run this")
    x, w, target = head(backend.device)
    x, w = x.detach().to(x_dtype).requires_grad_(), w.detach().to(w_dtype).requires_grad_()
    dtype = autocast or torch.promote_types(x_dtype, w_dtype)
    with torch.autocast(backend.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = linear_cross_entropy(x, w, target, chunk_bytes=500)
    got = torch.autograd.grad(loss, (x, w))
    a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
    unfused = torch.autograd.grad(F.cross_entropy((a.to(dtype) @ b.to(dtype).t()).float(), target), (a, b))
    c, d = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    truth = torch.autograd.grad(F.cross_entropy(c @ d.t(), target), (c, d))
    assert loss.dtype == torch.float32
    # Rounding into `dtype` happens on the way even where the gradient's own dtype is wider.
    for g, t, u, name in zip(got, truth, unfused, ("dX", "dW"), strict=True):
        assert g.dtype == u.dtype
        assert relative_error(g, t) <= 2 * relative_error(u, t) + torch.finfo(dtype).eps, name


def test_sharded_or_mismatched_weight_is_refused(backend: Any) -> None:
    x, w, target = head(backend.device)
    with pytest.raises(ShapeError, match="gather it first"):
        linear_cross_entropy(x, torch.empty(0, device=backend.device), target)
    with pytest.raises(ShapeError):
        linear_cross_entropy(x, w[:, :-1], target)
    with pytest.raises(ShapeError, match="bias"):
        linear_cross_entropy(x, w, target, bias=torch.zeros(V + 1, device=backend.device))
    with pytest.raises(OptionError, match="chunk_bytes"):
        linear_cross_entropy(x, w, target, chunk_bytes=0)
    with pytest.raises(ShapeError, match="must agree"):
        linear_cross_entropy(x, w, target[:-1])


def test_label_check_covers_every_chunk(backend: Any) -> None:
    """A bad label in the last of many chunks: an error on the CPU reference, NaN from the kernels."""
    x, w, target = head(backend.device)
    target[-1] = V
    if backend.name == "reference":
        with pytest.raises(LabelError):
            linear_cross_entropy(x, w, target, chunk_bytes=bytes_for(2))
    else:
        assert bool(linear_cross_entropy(x, w, target, chunk_bytes=bytes_for(2)).isnan())


GIB = 1 << 30


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab", "per_row", "weight", "mode", "most_bytes"),
    [
        (8192, 4096, 128256, False, True, "keep_grad", 2.0 * GIB),  # 1.96 GiB of logits; the accumulator alone is 1.96
        (32768, 2048, 128256, False, True, "stream", 1.0 * GIB),  # as much as the accumulator
        (65536, 4096, 128256, False, True, "stream", 1.0 * GIB),
        (32768, 2048, 128256, True, True, "recompute", 1.0 * GIB),
        (4096, 2048, 128256, False, False, "stream", 0.5 * GIB),  # a frozen head needs no accumulator
        (64, 2048, 128256, False, True, "keep_grad", 0.5 * GIB),
    ],
)
def test_plan_chooses_the_mode_that_holds_the_least(
    tokens: int, hidden: int, vocab: int, per_row: bool, weight: bool, mode: str, most_bytes: float
) -> None:
    plan = make_chunk_plan(
        ChunkRequest(
            tokens=tokens, hidden=hidden, vocab=vocab, itemsize=2, chunk_bytes=(GIB // 2, GIB), per_row=per_row,
            want_weight=weight,
        )
    )  # fmt: skip
    assert plan.mode == mode
    assert plan.chunk * vocab * 2 <= most_bytes
    if mode != "keep_grad":
        assert plan.chunk % 128 == 0, "a ragged tile in every product"


def within(memory_mib: int, tokens: int, *, bf16: bool = True, weight: bool = True) -> tuple[Any, int]:
    """(plan, MiB of its buffers) for the head of Llama-3.2-1B."""
    request = replace(llama_head(tokens), want_weight=weight, may_sum_in_16_bits=bf16)
    plan = plan_within(memory_mib * MIB, request)
    return plan, buffer_bytes(plan, request) // MIB


def llama_head(tokens: int) -> ChunkRequest:
    return ChunkRequest(tokens=tokens, hidden=2048, vocab=128256, itemsize=2, chunk_bytes=(GIB // 2, GIB))


@pytest.mark.parametrize("memory_mib", [4096, 2048, 1536, 1100, 1024, 840])
@pytest.mark.parametrize("tokens", [64, 4096, 8192])
def test_plan_within_a_limit_holds_no_more(memory_mib: int, tokens: int) -> None:
    plan, held_mib = within(memory_mib, tokens)
    assert held_mib <= memory_mib
    assert plan.fp32_accumulate or tokens <= 7 * plan.chunk


def test_plan_within_a_limit_is_the_usual_one_then_sums_in_16_bits_then_in_small_chunks() -> None:
    usual = make_chunk_plan(llama_head(8192))
    assert within(2048, 8192)[0] == usual
    assert within(1536, 8192)[0] == usual._replace(chunk=2048)
    assert within(1024, 8192)[0] == usual._replace(chunk=2048, fp32_accumulate=False)
    assert within(1136, 8192, bf16=False)[0] == usual._replace(chunk=512)  # fp16 is summed in fp32
    assert within(1, 8192) == within(2, 8192)  # the smallest there is
    assert within(1, 8192)[1] < 850


def test_limit_of_memory_excludes_the_options_that_it_chooses() -> None:
    x, w, target = torch.randn(4, 8), torch.randn(10, 8), torch.zeros(4, dtype=torch.long)
    for options in ({"chunk_bytes": 100}, {"fp32_accumulate": False}):
        with pytest.raises(OptionError, match="memory_bytes"):
            linear_cross_entropy(x, w, target, memory_bytes=1000, **options)
    with pytest.raises(OptionError, match="memory_bytes=0 must be positive"):
        linear_cross_entropy(x, w, target, memory_bytes=0)


@pytest.mark.gpu
def test_loss_with_prepared_targets_does_not_wait_for_the_device() -> None:
    """With prepared targets nothing synchronises; inside a CUDA graph the plain form does not either."""
    device = torch.device("cuda")
    x, w, target = head(device, ignored=5)
    for _ in range(2):  # compile first
        linear_cross_entropy(x, w, prepare_targets(target)).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(x, w, prepare_targets(target)).backward()
        linear_cross_entropy(x, w, prepare_targets(target), chunk_bytes=bytes_for(5)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_bytes", [None, 500])
def test_graph_replay_reads_the_new_labels(chunk_bytes: int | None) -> None:
    """New labels, other ignored rows and none at all, in a replayed graph."""
    device = torch.device("cuda")
    x, w, target = head(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(linear_cross_entropy(x, w, target, chunk_bytes=chunk_bytes), (x, w))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = linear_cross_entropy(x, w, target, chunk_bytes=chunk_bytes)
        grads = torch.autograd.grad(loss, (x, w))
    for ignored in (0, 9, N):
        fresh = torch.randint(0, V, (N,), device=device)
        fresh[:ignored] = -100
        target.copy_(fresh)
        graph.replay()
        expected = linear_cross_entropy(x, w, fresh, chunk_bytes=chunk_bytes)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        for got, want in zip(grads, torch.autograd.grad(expected, (x, w)), strict=True):
            assert relative_error(got, want) < 1e-6


@pytest.mark.gpu
def test_logits_beyond_2_31_elements_are_addressed_right() -> None:
    """17,000 x 128,256 logits in one chunk, 4.4 GB in bf16; rows on both sides of element 2^31 are compared."""
    device = torch.device("cuda")
    torch.manual_seed(11)
    tokens, vocab, hidden = 17_000, 128_256, 64
    x = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
    w = (torch.randn(vocab, hidden, device=device) / 8).bfloat16().requires_grad_()
    target = torch.randint(0, vocab, (tokens,), device=device)
    one_chunk = linear_cross_entropy(x, w, target, reduction="none", chunk_bytes=1 << 40)
    g = torch.autograd.grad(one_chunk.sum(), (x, w))
    many = linear_cross_entropy(x, w, target, reduction="none", chunk_bytes=1 << 28)
    h = torch.autograd.grad(many.sum(), (x, w))
    torch.testing.assert_close(one_chunk, many, rtol=1e-5, atol=1e-5)
    for a, b in zip(g, h, strict=True):
        assert relative_error(a, b) < 2 * torch.finfo(torch.bfloat16).eps
    assert not bool(one_chunk[-200:].isnan().any())


def test_interpreter_flag_is_off_by_default() -> None:
    """The fixture must leave the reference as the default, or the reference tests above tested kernels."""
    assert not dispatch.INTERPRET


def test_meta_tensors_give_shapes_alone() -> None:
    """Planners run models on the meta device: shapes only, nothing counted, nothing waited for."""
    x, w, target = (t.to("meta") for t in head(torch.device("cpu")))
    for given in (target, prepare_targets(target)):
        loss = linear_cross_entropy(x, w, given)
        dx, dw = torch.autograd.grad(loss, (x, w))
        assert (loss.shape, dx.shape, dw.shape) == ((), x.shape, w.shape) and loss.is_meta


ODD, PADDED = 1029, 1032  # 128 lines of 8 columns and 5 left over, which are a separate product


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("role", ["logits", "dX", "dW"])
def test_product_over_an_odd_vocabulary_has_every_column_and_is_not_rounded_twice(role, out_dtype, accumulate):
    torch.manual_seed(3)
    x, w = torch.randn(N, H).bfloat16(), torch.randn(ODD, H).bfloat16()
    e = torch.full((N, PADDED), float("nan")).bfloat16()
    e[:, :ODD] = torch.randn(N, ODD)
    factors = {"logits": (x, w.t()), "dX": (e[:, :ODD], w), "dW": (e[:, :ODD].t(), x)}
    a, b = factors[role]
    rows, columns = a.shape[0], b.shape[1]
    out = torch.full((rows, columns + 3), float("nan"), dtype=out_dtype)[:, :columns]
    before = torch.randn(rows, columns).to(out_dtype) if accumulate else torch.zeros(rows, columns)
    if accumulate:
        out.copy_(before)
    products.product_into(a, b, out, accumulate)
    want = before.double() + a.double() @ b.double()
    # the columns left over are few, so that their rounding adds little to that of the whole
    assert relative_error(out, want) <= 1.15 * relative_error(want.to(out_dtype), want) + 1e-6


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"chunk_bytes": 8 * 2 * ODD}], ids=str)
def test_odd_vocabulary_errs_at_most_twice_the_unfused_loss(options: Any, backend: Any) -> None:
    torch.manual_seed(4)
    x, w = torch.randn(N, H).bfloat16(), (torch.randn(ODD, H) / 4).bfloat16()
    bias, target = torch.randn(ODD).bfloat16(), torch.randint(0, ODD, (N,))
    smoothing = options.get("label_smoothing", 0.0)

    def gradients(dtype: torch.dtype, call: Any) -> list[Tensor]:
        leaves = [t.clone().to(backend.device, dtype).requires_grad_() for t in (x, w, bias)]
        call(*leaves, target.to(backend.device)).backward()
        return [leaf.grad.cpu() for leaf in leaves]

    def unfused(x: Tensor, w: Tensor, bias: Tensor, y: Tensor) -> Tensor:
        logits = F.linear(x, w, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, y, label_smoothing=smoothing)

    got = gradients(torch.bfloat16, lambda x, w, bias, y: linear_cross_entropy(x, w, y, bias=bias, **options))
    plain, truth = gradients(torch.bfloat16, unfused), gradients(torch.float64, unfused)
    for mine, others, want in zip(got, plain, truth, strict=True):
        assert relative_error(mine, want) <= 2 * relative_error(others, want)


def test_boolean_mask_of_tokens_works_in_fp16() -> None:
    x, w = torch.randn(20, 16), torch.randn(24, 16)
    target, keep = torch.randint(0, 24, (20,)), torch.arange(20) % 2 == 0
    whole = linear_cross_entropy(x, w, target, token_weight=keep)
    half = linear_cross_entropy(x.half().requires_grad_(), w.half(), target, token_weight=keep)
    torch.testing.assert_close(half.detach(), whole, rtol=2e-3, atol=0.0)


def test_strided_bias_is_read_by_its_strides(backend: Any) -> None:
    torch.manual_seed(12)
    x, w = torch.randn(40, 32).bfloat16(), (torch.randn(100, 32) / 5).bfloat16()
    bias, target = torch.randn(200).bfloat16()[::2], torch.randint(0, 100, (40,))
    x, w, target = (t.to(backend.device) for t in (x, w, target))
    found = linear_cross_entropy(x, w, target, bias=bias.to(backend.device))
    expected = linear_cross_entropy(x, w, target, bias=bias.contiguous().to(backend.device))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("chunk_bytes", [None, 30_000], ids=["kept", "chunks"])
def test_products_on_the_cpu_get_contiguous_factors_alone(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int | None
) -> None:
    """oneDNN's bf16 product for AMX multiplies the memory between strided rows by 0, which gives NaN for a NaN there.

    The tests themselves run without AMX (tests/backends.py).
    """
    gaps = []
    product = products._product_into

    def watched(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
        gaps.extend(t for t in (a, b) if not (t.is_contiguous() or t.t().is_contiguous()))
        product(a, b, out, accumulate)

    monkeypatch.setattr(products, "_product_into", watched)
    x = torch.randn(300, 8).bfloat16().requires_grad_()
    w = torch.randn(97, 8).bfloat16().requires_grad_()
    linear_cross_entropy(x, w, torch.randint(0, 97, (300,)), chunk_bytes=chunk_bytes).backward()  # type: ignore[union-attr]
    assert not gaps


def test_product_of_one_token_has_no_factor_of_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS loads such a factor element by element."""
    inner = []
    product = products._product_into

    def watched(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
        inner.append(a.shape[1])
        product(a, b, out, accumulate)

    monkeypatch.setattr(products, "_product_into", watched)
    x, w = torch.randn(1, 16).bfloat16(), torch.randn(40, 16).bfloat16().requires_grad_()
    target = torch.randint(0, 40, (1,))
    linear_cross_entropy(x, w, target).backward()  # type: ignore[union-attr]
    assert inner and 1 not in inner
    exact, unfused = (w.detach().to(dtype).requires_grad_() for dtype in (torch.float64, torch.bfloat16))
    F.cross_entropy(x.double() @ exact.t(), target).backward()
    F.cross_entropy(x @ unfused.t(), target).backward()
    assert w.grad is not None and exact.grad is not None and unfused.grad is not None
    assert_within(w.grad, exact.grad, unfused.grad, 2, "gradient of the weight")


@pytest.mark.parametrize(("ignored", "kept"), [(0, None), (4, None), (5, 251)])
def test_plan_gathers_the_tokens_that_a_run_gathers(
    ignored: int, kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 1/64 of the tokens is computed with the others, because a gather would cost more."""
    monkeypatch.setattr(head_inputs, "_WORTH_A_WAIT_FLOPS", 0)
    hidden, target = torch.randn(256, 8), torch.randint(0, 50, (256,))
    target[:ignored] = -100
    loss_head = head_inputs.Head.of(hidden, torch.randn(50, 8), None)
    run = head_inputs.LossArguments.of(loss_head, target.shape, target)
    with dispatch.planned_for(dispatch.Planned(arch=(9, 0), ignored=ignored)):
        for labels in (target, prepare_targets(target)):
            plan = head_inputs.LossArguments.of(loss_head, target.shape, labels)
            assert (None if plan.index is None else len(plan.index)) == kept
    assert (None if run.index is None else len(run.index)) == kept
