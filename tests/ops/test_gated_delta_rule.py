"""The gated delta rule with gates of any strength, with empty documents, and what its kernels refuse."""

from __future__ import annotations

import importlib
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backends import HAS_GPU, HAS_TRITON, kernels_on_the_cpu
from tigon.errors import ShapeError
from tigon.kernels import chips
from tigon.ops import gated_delta_rule
from tigon.ops.dispatch import PRIMITIVES
from tigon.ops.gated_delta_rule import MAX_WIDTH, gated_delta_rule_oracle
from tigon.planner.trace.cuda_scratch import scratch_bytes

NAMES = ("o", "final", "q", "k", "v", "g", "beta")
STRENGTHS = {"strong": (20.0, 50.0), "mixed": (0.0, 50.0), "usual": (0.0, 0.5)}


def inputs(T: int, low: float, high: float) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, 1, 16), dim=-1) for _ in range(2))
    g = -(low + (high - low) * torch.rand(1, T, 2))
    return [q, k, torch.randn(1, T, 2, 16), g, torch.rand(1, T, 2)]


def results(call: object, given: list[torch.Tensor], **options: object) -> list[torch.Tensor]:
    leaves = [x.requires_grad_() for x in given]
    o, final = call(*leaves, output_final_state=True, **options)  # type: ignore[operator]
    loss = o.double().sin().sum() + final.double().cos().sum()
    return [x.detach() for x in (o, final, *torch.autograd.grad(loss, leaves))]


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: there are no kernels on this platform")
@pytest.mark.parametrize("strength", STRENGTHS)
def test_kernels_are_right_with_gates_of_any_strength(strength: str) -> None:
    """70 tokens leave rows after the last one in a chunk. A GPU found NaN there: e^{0 - γ} was infinite."""
    given = inputs(70, *STRENGTHS[strength])
    truth = results(gated_delta_rule_oracle, [x.detach().double() for x in given])
    device = "cuda" if HAS_GPU else "cpu"
    with nullcontext() if HAS_GPU else kernels_on_the_cpu():
        got = results(gated_delta_rule, [x.detach().to(device) for x in given])
    # γ is a sum in fp32 of up to 64 gates, and its rounding is that of every decay.
    limit = 4 * torch.finfo(torch.float32).eps * max(1.0, 64 * STRENGTHS[strength][1])
    for name, x, exact in zip(NAMES, got, truth, strict=True):
        assert x.isfinite().all(), name
        assert float((x.cpu() - exact).norm()) <= limit * float(exact.norm()), name


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: there are no kernels on this platform")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_right_with_beta_near_two_and_keys_that_are_alike(dtype: torch.dtype) -> None:
    """Then the chunk's inverse has entries near 2 of both signs, which are kept in 16 bits. No error decays."""
    q, k, v, g, beta = inputs(70, 0.0, 0.0)
    k = torch.nn.functional.normalize(k + 2 * k[:, :1], dim=-1)
    given = [x if x is g else x.to(dtype) for x in (q, k, v, g, 1.9 + 0.1 * beta)]
    truth = results(gated_delta_rule_oracle, [x.detach().double() for x in given])
    token_by_token = results(gated_delta_rule_oracle, [x.detach() for x in given])
    device = "cuda" if HAS_GPU else "cpu"
    with nullcontext() if HAS_GPU else kernels_on_the_cpu():
        got = results(gated_delta_rule, [x.detach().to(device) for x in given])
    for name, x, usual, exact in zip(NAMES, got, token_by_token, truth, strict=True):
        limit = 4 * float((usual - exact).norm()) if dtype is torch.bfloat16 else 2e-5 * float(exact.norm())
        assert float((x.cpu() - exact).norm()) <= limit, name


def test_chip_whose_kernels_spill_runs_pytorch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = chips.Chip(names="a slow chip", arch="slow", spills=frozenset({"gated_delta_rule"}))
    monkeypatch.setattr(chips, "chip", lambda index: slow)
    given = inputs(5, 0.0, 0.5)
    with kernels_on_the_cpu(), pytest.warns(UserWarning, match="runs in PyTorch on a slow chip"):
        body = PRIMITIVES["tigon::gated_delta_rule_fwd"].body(given[0])
    assert body.__module__ == "tigon.ops.gated_delta_rule"


def test_documents_are_computed_as_if_each_were_alone() -> None:
    given, bounds = [x.double() for x in inputs(70, 0.0, 0.5)], (0, 1, 1, 66, 70)
    together = gated_delta_rule(*given, cu_seqlens=torch.tensor(bounds), output_final_state=True)
    alone = [
        gated_delta_rule(*(x[:, begin:end] for x in given), output_final_state=True)
        for begin, end in itertools.pairwise(bounds)
    ]
    torch.testing.assert_close(together[0], torch.cat([o for o, _ in alone], dim=1))
    finals = [final for _, final in alone if final is not None]
    torch.testing.assert_close(together[1], torch.cat(finals))


def test_state_in_fp32_may_begin_a_sequence_in_fp64() -> None:
    given = [x.double() for x in inputs(5, 0.0, 0.5)]
    state = torch.randn(1, 2, 16, 16, requires_grad=True)
    o, final = gated_delta_rule(*given, initial_state=state, output_final_state=True)
    expected, _ = gated_delta_rule_oracle(*given, initial_state=state)
    torch.testing.assert_close(o, expected)
    assert final is not None and final.dtype is torch.float64
    (gradient,) = torch.autograd.grad(o.sum(), state)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), state)[0])


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: there are no kernels on this platform")
def test_kernels_read_rows_of_one_token_that_lie_as_one_row_of_tokens() -> None:
    """PyTorch calls (B, 1, H, K) contiguous whatever the distance of its tokens, which is that of rows here."""
    device = "cuda" if HAS_GPU else "cpu"
    q, k, v, g, beta = (x.to(device) for x in inputs(3, 0.0, 0.5))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    assert k.is_contiguous() and k.stride(0) != k.stride(1)
    g, beta = (x.transpose(0, 1).contiguous() for x in (g, beta))
    with nullcontext() if HAS_GPU else kernels_on_the_cpu():
        o, _ = gated_delta_rule(q, k, v, g, beta)
    torch.testing.assert_close(o, gated_delta_rule_oracle(q, k, v, g, beta)[0])


@pytest.mark.parametrize("bounds", [(), (0, 4), (1, 5), (0, 3, 2, 5), (0, 6)])
def test_documents_that_do_not_fill_the_row_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="cu_seqlens is"):
        gated_delta_rule(*inputs(5, 0.0, 0.5), cu_seqlens=torch.tensor(bounds, dtype=torch.int64))


def test_wider_keys_than_the_kernels_hold_are_refused() -> None:
    q = torch.randn(1, 3, 1, MAX_WIDTH + 1)
    v, g = torch.randn(1, 3, 1, 4), torch.randn(1, 3, 1)
    with pytest.raises(ShapeError, match=f"1 ... {MAX_WIDTH}"):
        gated_delta_rule(q, q, v, g, g)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: there are no kernels on this platform")
def test_planner_counts_what_the_launches_allocate() -> None:
    class Allocated(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if "empty" in func.__name__:
                self.total += result.numel() * result.itemsize
            return result

    kernels = importlib.import_module("tigon.kernels.gated_delta_rule")
    backward = importlib.import_module("tigon.kernels.gated_delta_rule_backward")
    q, k, v, g, beta = inputs(64, 0.0, 0.5)
    with kernels_on_the_cpu(), Allocated() as forward:  # type: ignore[no-untyped-call]
        o, _, gamma, inverse = kernels.gated_delta_rule_fwd(q, k, v, g, beta, None, None, 1.0, False)
    scratch = scratch_bytes(1)
    given = (q, k, v, g, beta, None, None, 1.0, False)
    kept = sum(x.numel() * x.itemsize for x in (o, gamma, inverse))
    assert forward.total == kept + scratch["tigon::gated_delta_rule_fwd"](given)
    with kernels_on_the_cpu(), Allocated() as back:  # type: ignore[no-untyped-call]
        results = backward.gated_delta_rule_bwd(o, None, q, k, v, gamma, beta, inverse, None, None, 1.0)
    made = sum(x.numel() * x.itemsize for x in results[2:5])  # dq and dk are sums over heads
    assert back.total == made + scratch["tigon::gated_delta_rule_bwd"]((o, None, q, k, v, gamma))
