"""bf16 logits that leave their product as exponentials: rows that this form could lose. Values are checked with every
op's; here are the ends of its range, what the plan for a chip says, and sums in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backends import Backend
from helpers import assert_within, relative_error
from tigon.errors import OptionError
from tigon.kernels import chips
from tigon.ops import dispatch, linear_cross_entropy
from tigon.ops.head import chunks
from tigon.ops.head.inputs import Head, Wanted
from tigon.ops.losses.inputs import LossOptions, TokenLabels

N, H, V = 24, 16, 120


def bf16_head(device: torch.device, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(17)
    x = (torch.randn(N, H) * scale).bfloat16().to(device).requires_grad_()
    w = torch.randn(V, H).bfloat16().to(device).requires_grad_()
    return x, w, torch.randint(0, V, (N,)).to(device)


def needs_exponentials(backend: Backend) -> None:
    if backend.device.type == "cuda" and (chip := chips.chip(backend.device.index)) and chip.logits_tile:
        return
    if not backend.interpreted:
        pytest.skip("neither this chip nor the reference writes exponentials")


def truth_of(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, dX and dW of their sum, in fp64."""
    a, b = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    losses = F.cross_entropy(a @ b.t(), target, reduction="none")
    return losses.detach(), *torch.autograd.grad(losses.sum(), (a, b))


@pytest.mark.parametrize("chunk_rows", [5, N])
def test_label_150_nats_below_the_largest_logit_keeps_its_loss_and_gradient(chunk_rows: int, backend: Any) -> None:
    needs_exponentials(backend)
    x, w, target = bf16_head(backend.device, scale=12.0)
    losses, dx, dw = truth_of(x, w, target)
    assert (losses > 150).any() and (losses < 60).any(), "both kinds of rows must be here"
    loss = linear_cross_entropy(x, w, target, reduction="sum", chunk_bytes=2 * V * chunk_rows)
    loss.backward()
    assert relative_error(loss, losses.sum()) < 1e-5
    assert relative_error(x.grad, dx) < 2e-2 and relative_error(w.grad, dw) < 2e-2


def test_confident_token_keeps_its_loss_and_gradient(backend: Any) -> None:
    """p_y = 1 - 1e-6 and closer: bf16 logits would round the loss away, here it keeps its relative precision."""
    needs_exponentials(backend)
    x, w, target = bf16_head(backend.device)
    x = (w.detach()[target] * 1.5).requires_grad_()
    losses, dx, _ = truth_of(x, w, target)
    assert (losses < 1e-6).any()
    got = linear_cross_entropy(x, w, target, reduction="none")
    assert float(((got.detach().double() - losses).abs() / losses).max()) < 1e-3
    got.sum().backward()
    rows = (x.grad.double() - dx).norm(dim=1) / dx.norm(dim=1)
    assert float(rows.max()) < 3e-2


@pytest.mark.parametrize("rows", [15, 16])
def test_few_tokens_keep_their_upstream_factors(rows: int, backend: Any) -> None:
    """Below 16 the logits come from the vendor's product, and their gradient is whole already."""
    assert chunks.FEWEST_EXP_ROWS == 16
    x, w, target = bf16_head(backend.device)
    x, target = x.detach()[:rows].requires_grad_(), target[:rows]
    losses, dx, dw = truth_of(x, w, target)
    loss = linear_cross_entropy(x, w, target, reduction="sum")
    (2.0 * loss).backward()
    assert relative_error(loss, losses.sum()) < 1e-3
    assert relative_error(x.grad, 2 * dx) < 2e-2 and relative_error(w.grad, 2 * dw) < 2e-2


@pytest.mark.parametrize("bad", [V, -1, 1 << 40])
def test_label_outside_the_vocabulary_affects_its_own_row_alone(bad: int, backend: Any) -> None:
    needs_exponentials(backend)
    x, w, target = bf16_head(backend.device)
    target[3] = bad
    losses = linear_cross_entropy(x, w.detach(), target, reduction="none")
    losses.nansum().backward()
    row = torch.arange(N, device=backend.device) == 3
    assert bool(losses[row].isnan().all()) and not bool(losses[~row].isnan().any())
    assert not bool(x.grad[~row].isnan().any())


def test_every_label_ignored_without_counting_gives_zeros(backend: Any) -> None:
    """If ignored rows may not be counted, they go through the products: their exponentials are 0, not large."""
    needs_exponentials(backend)
    x, w, target = bf16_head(backend.device, scale=40.0)
    target[:] = -100
    options = LossOptions(-100, 0.0, None, 1.0, 0.0)
    results = chunks.chunk_loop(
        Head(x.detach(), w.detach()),
        TokenLabels(target, None, None, torch.ones((), device=x.device)),
        chunks.ChunkOptions(loss=options, chunk=7, wanted=Wanted(want_hidden=True, want_weight=True)),
    )
    loss, dx, dw = results.loss, results.dx_NH, results.dw_VH
    assert not bool(loss.any()) and not bool(dx.any()) and not bool(dw.any())


# --- sums in 16 bits --------------------------------------------------------------------------------------------------


def test_16_bit_sums_are_within_twice_the_unfused_ops_error() -> None:
    torch.manual_seed(18)
    tokens, hidden, vocab = 1024, 64, 1000
    x = torch.randn(tokens, hidden).bfloat16().requires_grad_()
    w = (torch.randn(vocab, hidden) / 8).bfloat16().requires_grad_()
    target = torch.randint(0, vocab, (tokens,))
    _, dx, dw = truth_of(x, w, target)
    unfused = torch.autograd.grad(F.cross_entropy((x @ w.t()).float(), target, reduction="sum"), (x, w))
    for rows in (512, 256, 16):  # the last are summed in fp32
        loss = linear_cross_entropy(
            x, w, target, reduction="sum", chunk_bytes=2 * vocab * rows, fp32_accumulate=False
        )  # fmt: skip
        got = torch.autograd.grad(loss, (x, w))
        assert_within(got[0], dx, unfused[0], 2.0, f"dX, chunks of {rows}")
        assert_within(got[1], dw, unfused[1], 2.0, f"dW, chunks of {rows}")


def test_16_bit_sum_is_not_scaled_twice_by_two_backwards(backend: Any) -> None:
    """It is scaled where it lies, unless the graph is kept; a second walk of a freed graph is refused as ever."""
    x, w, target = bf16_head(backend.device)

    def loss() -> Any:
        return linear_cross_entropy(x, w, target, chunk_bytes=2 * V * 5, fp32_accumulate=False)

    (expected,) = torch.autograd.grad(3.0 * loss(), w)
    kept = loss()
    (first,) = torch.autograd.grad(3.0 * kept, w, retain_graph=True)
    (second,) = torch.autograd.grad(3.0 * kept, w)
    assert torch.equal(first, expected) and torch.equal(second, expected)
    freed = loss()
    freed.backward()
    with pytest.raises(RuntimeError, match="second time"):
        freed.backward()


def test_16_bit_sum_takes_half_the_memory_and_has_few_addends(monkeypatch: Any) -> None:
    torch.manual_seed(19)
    x, w = torch.randn(600, H).bfloat16().requires_grad_(), torch.randn(V, H).bfloat16().requires_grad_()
    target = torch.randint(0, V, (600,))
    sums = []
    inner = chunks._chunks_outputs

    def outputs(*args: Any) -> Any:
        result = inner(*args)
        sums.append(result[5].nbytes)
        return result

    monkeypatch.setattr(chunks, "_chunks_outputs", outputs)
    for fp32 in (True, False):
        linear_cross_entropy(x, w, target, chunk_bytes=4 * V * 128, fp32_accumulate=fp32).backward()
    linear_cross_entropy(x, w, target, chunk_bytes=2 * V * 60, fp32_accumulate=False).backward()
    assert sums == [4 * V * H, 2 * V * H, 4 * V * H], "five chunks, five chunks, ten chunks"


def test_fp32_sum_is_freed_by_the_backward_that_reads_it() -> None:
    """V x H fp32 values would stay allocated while the layers' backward runs."""
    torch.manual_seed(20)
    x, w = torch.randn(600, H).bfloat16().requires_grad_(), torch.randn(V, H).bfloat16().requires_grad_()
    loss = linear_cross_entropy(x, w, torch.randint(0, V, (600,)), chunk_bytes=2 * V * 64)
    node: Any = loss.grad_fn
    assert node.dw.dtype == torch.float32
    loss.backward()
    assert node.dw is None


def test_fp16_sums_in_16_bits_are_refused() -> None:
    x, w, target = bf16_head(torch.device("cpu"))
    with pytest.raises(OptionError, match="bfloat16"):
        linear_cross_entropy(x.half(), w.half(), target, fp32_accumulate=False)


# --- plans for a chip that is not here --------------------------------------------------------------------------------


def test_plan_follows_the_chip_it_is_for_not_the_machine() -> None:
    x = torch.empty(4, 64, dtype=torch.bfloat16)
    options = LossOptions(-100, 0.0, None, 1.0, 0.0)

    def tile() -> Any:
        return chunks.exp_tile(x, x, options, False)

    assert tile() is None
    with dispatch.planned_for(dispatch.Planned(arch=(9, 0))):
        assert dispatch.planned_device(x) == "cuda"
        assert tile() == chips.chip_of_arch((9, 0)).logits_tile  # type: ignore[union-attr]
        assert chunks.exp_tile(x, x, options, True) is None
        with dispatch.planned_for(dispatch.Planned(arch=(8, 0))):
            assert tile() is None
        assert tile() is not None
    assert dispatch.planned_device(x) == "cpu" and tile() is None
