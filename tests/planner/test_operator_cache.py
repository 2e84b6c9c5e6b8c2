"""The cache of operators gives what PyTorch's fake mode gives: the same shapes, the same memory, the same traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planner_helpers import H200, request_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tigon.planner.request import Request
from tigon.planner.trace.cache import operator_cache
from tigon.planner.trace.dispatch_recorder import TraceRecorder
from tigon.planner.trace.trace import Trace, trace

aten = torch.ops.aten
# The results share memory with an argument, are an argument, are new, are several, or are no tensor.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(3, 8),
    "transpose": lambda x: x.t(),
    "slice": lambda x: x[1:, ::2],
    "unsafe view": lambda x: aten._unsafe_view(x, [24]),
    "cast": lambda x: x.to(torch.bfloat16),
    "cast to a layout": lambda x: aten._to_copy(x.t(), memory_format=torch.contiguous_format),
    "product": lambda x: x @ x.t(),
    "sum of a view with itself": lambda x: x.t() + x.t(),
    "in place": lambda x: x.add_(1),
    "list of tensors": lambda x: torch.cat([x, x.t().reshape(4, 6)]),
    "several views": lambda x: x.split(2),
    "several results": lambda x: torch.native_dropout(x, 0.1, True),
    "dtype": lambda x: torch.promote_types(x.dtype, torch.float64),
    "number of another type": lambda x: (torch.ones(3, dtype=torch.int64) * 2, torch.ones(3, dtype=torch.int64) * 2.0),
    "reinterpreted": lambda x: x.view(torch.int32),
    "complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj(),
    "changed in place": lambda x: x.clone().t_(),
}


def _described(result: Any, x: Tensor) -> Any:
    if isinstance(result, Tensor):
        storage = result.untyped_storage()
        owner = "x" if storage._cdata == x.untyped_storage()._cdata else storage.nbytes()
        return result is x, result.shape, result.stride(), result.storage_offset(), result.dtype, result.device, owner
    if isinstance(result, (tuple, list)):
        return type(result), [_described(one, x) for one in result]
    return result


@pytest.mark.parametrize("name", CALLS)
def test_remembered_result_is_that_of_the_fake_mode(name: str) -> None:
    def described(mode: FakeTensorMode) -> Any:
        x = torch.empty(4, 6)
        return _described(CALLS[name](x), x)

    with FakeTensorMode() as mode:
        expected = described(mode)
    for _ in range(2):
        with FakeTensorMode() as mode, TraceRecorder({}, {}):
            assert described(mode) == expected


def test_tensor_of_another_fake_mode_is_not_served_from_the_cache() -> None:
    with FakeTensorMode(), TraceRecorder({}, {}):
        x = torch.empty(4, 6)
        x.t()
    with FakeTensorMode(), TraceRecorder({}, {}), pytest.raises(Exception, match="fake mode"):
        x.t()


def _compared(traced: Trace) -> Any:
    """The parts of a trace that two traces without the cache share. Their frees may swap places within the loss."""
    return [
        ([(one.where, sorted(one.events), vars(one.cost)) for one in tape.segments], tape.sizes, tape.components)
        for tape in (traced.tape, traced.eval_tape)
    ]


def _fresh_trace(request: Request, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """A trace in which PyTorch's fake mode answers every operator."""
    with monkeypatch.context() as patched:
        patched.setattr(operator_cache, "call", lambda func, args, kwargs: func(*args, **kwargs))
        return trace(request, H200)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("llama", {"precision": "amp-bf16", "kernels": "tigon", "checkpointing": "selective"}),
        ("gemma3_text", {"precision": "bf16", "kernels": "none", "checkpointing": "full"}),
        ("qwen3", {"precision": "bf16", "kernels": "liger", "lora_rank": 4, "quantized": True}),
    ],
)
def test_trace_with_the_cache_is_the_trace_without_it(
    name: str, choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(name, **choices)
    expected = _compared(_fresh_trace(request, monkeypatch))
    assert _compared(trace(request, H200)) == expected
    assert _compared(trace(request, H200)) == expected  # all from the cache


def test_second_trace_asks_the_fake_mode_for_few_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plain = [0, 0], FakeTensorMode.dispatch

    def counted(self: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        asked[-1] += 1
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    request = request_of(precision="amp-bf16", kernels="tigon")
    _fresh_trace(request, monkeypatch)
    trace(request, H200)
    asked.append(0)
    trace(request, H200)
    assert asked[-1] < asked[1] / 4, asked
