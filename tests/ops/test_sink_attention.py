"""Attention with a sink per head against the unfused formula in fp64: masks, windows, dtypes and wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tigon.errors import DoubleBackwardError, OptionError, ShapeError
from tigon.ops.sink_attention import MASKED, causal_mask, sink_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMES = ("out", "dq", "dk", "dv", "dsinks")
# An error below this is rounding, and may be smaller by luck: a gradient of the sinks has four numbers.
ROUNDING = {torch.float32: 3e-6, torch.float16: 3e-4, torch.bfloat16: 2e-3}


def unfused(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor, scale: float) -> Tensor:
    """transformers' eager attention of GPT-OSS."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale + mask
    scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).contiguous()


def inputs(B: int, h: int, g: int, T: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(B + T)
    shapes = ((B, h, T, D), (B, g, T, D), (B, g, T, D), (h,))
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def results(function: Any, tensors: list[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    out = function(*leaves)
    torch.manual_seed(1)
    upstream = torch.randn(out.shape, device=DEVICE).to(tensors[0].dtype).to(dtype)
    return dict(zip(NAMES, [out.detach(), *torch.autograd.grad(out, leaves, upstream)], strict=True))


def error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "window", "masked"),
    [
        pytest.param((2, 4, 2, 50, 16), 0, False, id="causal"),
        pytest.param((2, 4, 1, 50, 16), 7, False, id="window"),
        pytest.param((2, 4, 4, 37, 8), 0, True, id="mask"),
        pytest.param((1, 8, 2, 64, 64), 9, True, id="mask-of-a-window"),
        pytest.param((1, 4, 2, 9, 4), 0, True, id="narrow-heads"),
    ],
)
def test_error_is_at_most_twice_the_unfused_ones(
    shape: tuple[int, int, int, int, int], window: int, masked: bool, dtype: torch.dtype
) -> None:
    tensors, T, scale = inputs(*shape, dtype), shape[3], shape[4] ** -0.5
    seen = causal_mask(T, window, DEVICE).expand(shape[0], 1, T, T).clone()
    if masked:
        seen[0, :, :, :3] = False  # padding before the first row: its first queries see nothing
    mask = torch.zeros(seen.shape, device=DEVICE).masked_fill_(~seen, torch.finfo(torch.float32).min)
    lowest = mask.clamp(min=MASKED)

    def op(*leaves: Tensor) -> Tensor:
        return sink_attention(*leaves, scale=scale, mask=mask if masked else None, window=window)

    got = results(op, tensors, dtype)
    truth = results(lambda *leaves: unfused(*leaves, lowest.double(), scale), tensors, torch.float64)
    usual = results(lambda *leaves: unfused(*leaves, lowest.to(dtype), scale), tensors, dtype)
    for name in NAMES:
        assert got[name].dtype == dtype and got[name].isfinite().all()
        assert error(got[name], truth[name]) <= 2 * max(error(usual[name], truth[name]), ROUNDING[dtype]), name


def test_frozen_sinks_get_no_gradient_and_autocast_gives_its_dtype() -> None:
    q, k, v, sinks = inputs(1, 4, 2, 16, 8, torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = sink_attention(*leaves, sinks, scale=0.3)
    assert out.dtype == torch.bfloat16 and out.shape == (1, 16, 4, 8)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.dtype == torch.float32 for grad in grads) and sinks.grad is None


def test_compiled_attention_is_one_graph_and_equals_eager() -> None:
    tensors = inputs(1, 4, 2, 16, 8, torch.float32)

    def op(*leaves: Tensor) -> Tensor:
        return sink_attention(*leaves, scale=0.3, window=5)

    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    want, got = results(op, tensors, torch.float32), results(compiled, tensors, torch.float32)
    for name in NAMES:
        torch.testing.assert_close(got[name], want[name])


def test_wrong_arguments_are_refused() -> None:
    q, k, v, sinks = inputs(1, 4, 2, 6, 8, torch.float32)
    with pytest.raises(ShapeError, match="g must divide h"):
        sink_attention(q[:, :3], k, v, sinks[:3], scale=1.0)
    with pytest.raises(ShapeError, match="they must be"):
        sink_attention(q, k[:, :, :5], v[:, :, :5], sinks, scale=1.0)
    with pytest.raises(ShapeError, match="one per head"):
        sink_attention(q, k, v, sinks[:3], scale=1.0)
    with pytest.raises(OptionError, match="window=-1"):
        sink_attention(q, k, v, sinks, scale=1.0, window=-1)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(sink_attention(q.requires_grad_(), k, v, sinks, scale=1.0).sum(), q, create_graph=True)
