"""attention_with_sinks: FlashAttention's calls and layouts without a GPU, blocks, options, and errors on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import cast, make, relative_error, run, upstream_for, with_leaves
from tests.ops.cases import cases_of
from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.ops import OPS, Case, attention_with_sinks
from tigon.ops import attention_with_sinks as function

OP = OPS["attention_with_sinks"]
MODULE = __import__("sys").modules[function.__module__]
CASES = {case.id: case for case in cases_of(OP) if case.small}
OPTIONS = ({}, {"window": 5}, {"documents": 3}, {"window": 4, "documents": 2})


def case_of(options: dict[str, Any], shape: tuple[int, ...] = (2, 4, 24, 8)) -> Case:
    return Case(id="-".join(options) or "plain", shape=shape, options={"groups": 2, **options})


class Flash:
    """FlashAttention 2 on the CPU: the arguments, layouts and results of PyTorch's operators, in fp64."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        self.calls.append("forward")
        s, v_of_q = self._scores(q, k, v, rest[0], rest[1], options)
        lse = s.logsumexp(-1)
        out = (s - lse[..., None]).exp() @ v_of_q
        assert rest[4:] == (0.0, True, False)
        return self._packed(out, q, rest[0]), self._lse(lse, rest[0]), *[torch.empty(0)] * 3

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("backward")
        assert rest[4:6] == (0.0, True) and lse.is_contiguous()
        assert [(t.dtype, tuple(t.shape)) for t in rest[6:]] == [(torch.uint64, (2,)), (torch.uint64, ())]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            s, v_of_q = self._scores(*leaves, rest[0], rest[1], options)
            p = (s - lse.view(s.shape[:-1])[..., None]).exp().detach()
            dout_h, out_h = (x.movedim(-2, -3) for x in (dout, out))
            ds = p * (dout_h @ v_of_q.transpose(-1, -2) - (dout_h * out_h).sum(-1, keepdim=True)).detach()
            # The sums whose derivatives are dq, dk and dv if P does not depend on them.
            return torch.autograd.grad((ds * s.nan_to_num(neginf=0.0)).sum() + (p @ v_of_q * dout_h).sum(), leaves)

    def _scores(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, options: Any) -> tuple[Tensor, Tensor]:
        """(..., h, T, T); -inf outside of the causal mask, the window and the documents."""
        assert (cu_q is cu_k) and q.ndim == (4 if cu_q is None else 3)
        k, v = (x.repeat_interleave(q.shape[-2] // x.shape[-2], -2).movedim(-2, -3) for x in (k, v))
        s = q.movedim(-2, -3) @ k.transpose(-1, -2) * options["scale"]
        place = torch.arange(s.shape[-1])
        behind = place[:, None] - place
        sees = (behind >= 0) & (behind <= options.get("window_size_left", len(place)))
        assert options.get("window_size_right", 0) == 0
        if cu_q is not None:
            document = torch.bucketize(place, cu_q[1:], right=True)
            sees &= document[:, None] == document
        return s.masked_fill(~sees, -torch.inf), v

    @staticmethod
    def _packed(out: Tensor, q: Tensor, cu_q: Any) -> Tensor:
        return out.movedim(-3, -2).contiguous()

    @staticmethod
    def _lse(lse: Tensor, cu_q: Any) -> Tensor:
        return lse.contiguous()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_calls_of_flash_attention_give_the_gradients_of_the_formula(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, documents packed into one, windows, and the layouts of the log-sum-exp, with a stand-in for the kernels."""
    flash = Flash()
    monkeypatch.setattr(MODULE, "_takes_flash", lambda q, v: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash.backward)
    inputs = make(OP, case_of(options), torch.float64, "cpu")
    got = run(OP.call, OP, with_leaves(OP, inputs))
    want = run(OP.oracle, OP, with_leaves(OP, inputs), upstream_for(got.outputs))
    for name, value in got.named().items():
        assert relative_error(value, want.named()[name]) < 1e-12, name
    assert flash.calls == ["forward", "backward"]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_installed_pytorch_takes_the_calls_of_flash_attention(options: dict[str, Any]) -> None:
    """The operators' meta functions check names and number of the arguments, and tell the shapes of the results."""
    inputs = make(OP, case_of(options), torch.bfloat16, "cpu")
    cu_seqlens, window = inputs.get("cu_seqlens"), options.get("window", MODULE.NO_WINDOW)
    heads = MODULE.Heads(*(inputs[name].to("meta") for name in ("q", "k", "v")))
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to("meta")
    how = MODULE.Masking(cu_seqlens, 24, 0.5, window)
    out, lse = made = MODULE._flash_forward(heads, how)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 24, 4, 8), (2, 4, 24), torch.float32)
    grads = MODULE._flash_backward(torch.empty_like(out), heads, made, how)
    assert [grad.shape for grad in grads] == [x.shape for x in heads]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_blocks_of_few_rows_give_the_results_of_one_block(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "_takes_cpu_kernel", lambda *_: False)
    inputs = make(OP, case_of(options), torch.float64, "cpu")
    whole = run(OP.call, OP, with_leaves(OP, inputs))
    monkeypatch.setattr(MODULE, "BLOCK_BYTES", 5 * 4 * 2 * 4 * 24)  # five rows of scores
    assert MODULE._block_rows(2, 4, 24) == 5
    parts = run(OP.call, OP, with_leaves(OP, inputs))
    for name, value in parts.named().items():
        assert relative_error(value, whole.named()[name]) < 1e-13, name


def test_autocast_leaves_the_products_of_blocks_in_fp32() -> None:
    inputs = make(OP, CASES["window"], torch.float32, "cpu")
    want = run(OP.call, OP, with_leaves(OP, inputs)).named()
    with torch.autocast("cpu", torch.bfloat16):
        got = run(OP.call, OP, with_leaves(OP, inputs)).named()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_sinks_of_minus_infinity_leave_ordinary_attention() -> None:
    inputs = make(OP, CASES["plain"], torch.float64, "cpu")
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    got = attention_with_sinks(q, k, v, torch.full((4,), -torch.inf, dtype=torch.float64))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert relative_error(got, want.transpose(1, 2)) < 1e-14


def test_frozen_sinks_get_no_gradient_and_leave_the_others_as_they_are() -> None:
    """As under LoRA."""
    inputs = make(OP, CASES["plain"], torch.float32, "cpu")
    trained = run(OP.call, OP, with_leaves(OP, inputs))
    frozen = run(OP.call, OP, with_leaves(OP, inputs, names=["q", "k", "v"]))
    assert frozen.grads.keys() == {"q", "k", "v"}
    assert all(torch.equal(grad, trained.grads[name]) for name, grad in frozen.grads.items())


def test_bf16_takes_sinks_in_fp32() -> None:
    """Autocast makes q, k and v bf16, and leaves the parameter in fp32."""
    inputs = make(OP, CASES["window"], torch.bfloat16, "cpu") | {"sinks": torch.randn(8)}
    got = run(OP.call, OP, with_leaves(OP, inputs))
    assert got.outputs[0].dtype == torch.bfloat16 and got.grads["sinks"].dtype == torch.float32
    want = run(OP.oracle, OP, with_leaves(OP, cast(inputs, torch.float64)), upstream_for(got.outputs))
    assert relative_error(got.grads["sinks"], want.grads["sinks"]) < 0.01


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"k": torch.zeros(2, 3, 37, 16)}, ShapeError, "k must divide h"),
        ({"v": torch.zeros(2, 2, 36, 16)}, ShapeError, "they must be"),
        ({"q": torch.zeros(4, 37, 16)}, ShapeError, "3, 4 and 4 dimensions"),
        ({"sinks": torch.zeros(2)}, ShapeError, "one for each query head"),
        ({"k": torch.zeros(2, 2, 37, 16, dtype=torch.float64)}, DtypeError, "must have one dtype"),
        ({"window": 0}, OptionError, "window=0 must be at least 1"),
        ({"max_length": 1.5}, OptionError, "whole number"),
        ({"scale": "1"}, OptionError, "must be a number"),
        ({"cu_seqlens": torch.tensor([0, 74])}, DtypeError, "int32"),
        ({"cu_seqlens": torch.tensor([0], dtype=torch.int32)}, ShapeError, "documents \\+ 1"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    inputs = make(OP, CASES["plain"], torch.float32, "cpu") | changes
    with pytest.raises(error, match=words):
        attention_with_sinks(**inputs)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("shape", [(2, 16, 700, 64), (1, 4, 513, 128)], ids=["gpt-oss", "wide"])
def test_flash_attention_errs_at_most_twice_the_unfused_error(
    shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Output and every gradient against fp64, with 2 query heads per key head."""
    inputs = make(OP, case_of(options, shape), dtype, "cuda")
    assert MODULE._takes_flash(inputs["q"], inputs["v"])
    got = run(OP.call, OP, with_leaves(OP, inputs))
    upstream = upstream_for(got.outputs)
    truth = run(OP.oracle, OP, with_leaves(OP, cast(inputs, torch.float64)), upstream).named()
    unfused = run(OP.oracle, OP, with_leaves(OP, inputs), upstream).named()
    for name, value in got.named().items():
        error, usual = relative_error(value, truth[name]), relative_error(unfused[name], truth[name])
        print(name, f"{error:.2e} {usual:.2e}")
        assert error <= 2 * max(usual, torch.finfo(dtype).eps / 2), name


@pytest.mark.gpu
def test_deterministic_algorithms_repeat_every_bit() -> None:
    inputs = make(OP, dataclasses.replace(CASES["plain"], shape=(2, 16, 700, 64)), torch.bfloat16, "cuda")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # with warn_only, PyTorch only warns and runs the other algorithm
    try:
        first, again = (run(OP.call, OP, with_leaves(OP, inputs)).named() for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_no_matrix_of_scores_is_held() -> None:
    """One (T, T) matrix per head would take 8 GiB."""
    q, k, v = (torch.randn(1, heads, 16384, 64, device="cuda", dtype=torch.bfloat16) for heads in (16, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    q.requires_grad_()
    attention_with_sinks(q, k, v, torch.zeros(16, device="cuda"), window=128).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1 << 29


def test_flash_gets_copies_of_tensors_that_it_cannot_load() -> None:
    """FlashAttention loads 16 bytes at once and checks no address; a wrong one ends every kernel of the process."""
    whole = torch.randn(2 * 5 * 4 * 8 + 8).bfloat16()
    fits = whole[:320].view(2, 5, 4, 8)
    behind_one_element, behind_eight = whole[1:321].view(2, 5, 4, 8), whole[8:].view(2, 5, 4, 8)
    odd_rows = torch.randn(2, 5, 4, 12).bfloat16()[..., :8]
    for x in (behind_one_element, odd_rows):
        copy = MODULE._aligned(x)
        assert torch.equal(copy, x) and copy.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in copy.stride()[:-1])
    for x in (fits, behind_eight, fits.transpose(1, 2), fits[:, :1]):
        assert MODULE._aligned(x) is x
