"""Recomputation: PyTorch's gradients, memory and repeated work; the same for random numbers, hooks and kept graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from helpers import Count
from tigon.profiler.recording.peak import PeakMeter
from tigon.techniques.checkpointing.recompute import recomputed

WIDTH = 16


def theirs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, factor: float = 1.0, *, bias: Tensor | None = None) -> Tensor:
        y = self.down(self.dropout(torch.nn.functional.silu(self.up(self.norm(x)))))
        return x + factor * (y if bias is None else y + bias)


def stack(dropout: float = 0.0, device: str = "cpu", width: int = WIDTH) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer(dropout, width) for _ in range(3)).to(device)


def through(layers: nn.ModuleList, run: Callable[..., Any], x: Tensor, **kwargs: Any) -> Tensor:
    for layer in layers:
        x = run(layer, x, 0.5, **kwargs)
    return x.square().mean()


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def gradients(layers: nn.ModuleList, run: Callable[..., Any], **kwargs: Any) -> list[Tensor]:
    torch.manual_seed(7)
    x = torch.randn(5, WIDTH, device=next(layers.parameters()).device, requires_grad=True)
    loss = through(layers, run, x, **kwargs)
    torch.rand(3)  # the generators go on
    loss.backward()
    found = [x.grad, *(p.grad for p in layers.parameters())]
    layers.zero_grad()
    return [t for t in found if t is not None]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradient_equals_that_of_kept_tensors_bit_for_bit(device, dropout, autocast):
    layers = stack(dropout, device)
    bias = torch.ones(WIDTH, device=device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        want = gradients(layers, plain, bias=bias)
        got = gradients(layers, recomputed, bias=bias)
    assert len(got) == len(want) == 1 + 3 * 6
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_recomputation_leaves_the_generators_where_they_were(device):
    """The generators stand where they would without it."""
    after = []
    for run in (plain, recomputed):
        gradients(stack(0.4, device), run)
        after.append((torch.rand(4), torch.rand(4, device=device)))
    assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))


def test_work_and_memory_are_those_of_pytorchs_checkpoint():
    found = {}
    for run in (theirs, recomputed):
        layers = stack(width=64)
        x = torch.randn(256, 64, requires_grad=True)
        meter = PeakMeter(torch.device("cpu"))
        meter.start([x, *layers.parameters()])
        loss = through(layers, run, x)
        with Count() as count:
            loss.backward()
        found[run.__name__] = {name: n for name, n in count.n.items() if "mm" in name}, meter.stop().step_bytes
    assert found["recomputed"][0] == found["theirs"][0]
    assert found["recomputed"][1] <= 1.01 * found["theirs"][1]


def test_second_walk_of_a_kept_graph_recomputes():
    """The second walk computes again, with the weights as they are then."""
    layers = stack()
    x = torch.randn(5, WIDTH)
    loss = through(layers, recomputed, x)
    for _ in range(2):
        want = torch.autograd.grad(through(layers, plain, x), list(layers.parameters()))
        got = torch.autograd.grad(loss, list(layers.parameters()), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    del loss
    part = list(layers[2].parameters())
    loss = through(layers, recomputed, x)
    got = torch.autograd.grad(loss, part)
    assert all(
        torch.equal(a, b) for a, b in zip(got, torch.autograd.grad(through(layers, plain, x), part), strict=True)
    )


def test_nested_functions_get_every_gradient():
    layers = stack()
    want = gradients(layers, plain)
    got = gradients(layers, lambda f, *args: recomputed(lambda *a: recomputed(f, *a), *args))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * (ctx.saved_tensors[0] + ctx.saved_tensors[0])


def test_saved_tensor_may_be_read_more_than_once():
    x = torch.randn(4, requires_grad=True)
    recomputed(lambda x: Twice.apply(x.sin()), x).sum().backward()
    want = 2 * x.detach().sin() * x.detach().cos()
    torch.testing.assert_close(x.grad, want)


def test_function_that_saves_other_tensors_the_second_time_is_refused():
    widths = iter((2, 3))

    def fickle(x: Tensor) -> Tensor:
        return (x.repeat(next(widths)) * 2.0).sin().sum()

    with pytest.raises(CheckpointError, match=r"1 tensors \(\(8,\).* and 1 tensors \(\(12,\)"):
        recomputed(fickle, torch.randn(4, requires_grad=True)).backward()


def test_input_changed_in_place_is_detected():
    x = torch.randn(4, requires_grad=True)
    y = x * 1
    loss = recomputed(lambda x: x.sin().sum(), y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_surrounding_hooks_see_exactly_the_inputs():
    layer, x, seen = Layer(), torch.randn(5, WIDTH, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(tuple(t.shape)) or t, lambda t: t):
        recomputed(layer, x, 2.0)
    assert seen == [(5, WIDTH)]


def test_nothing_to_learn_builds_no_graph():
    layer, x = Layer(), torch.randn(5, WIDTH)
    with torch.no_grad():
        assert not recomputed(layer, x).requires_grad
    layer.requires_grad_(False)
    assert not recomputed(layer, x).requires_grad


def test_inputs_are_freed_by_the_backward():
    """Nothing of a frame outlives the graph."""
    import gc
    import weakref

    layers, x = stack(), torch.randn(5, WIDTH, requires_grad=True)
    hidden = x * 1
    alive = weakref.ref(hidden)
    loss = through(layers, recomputed, hidden)
    del hidden
    gc.disable()
    try:
        assert alive() is not None
        loss.backward()
        assert alive() is None
    finally:
        gc.enable()


def test_numbers_drawn_under_fork_rng_are_the_same():
    x = torch.randn(64, requires_grad=True)

    def noisy(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return (x * torch.rand(64)).square().sum()

    seen = []
    for run in (plain, recomputed):
        torch.manual_seed(3)
        loss = run(noisy, x)
        torch.rand(5)
        seen.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*seen)


def test_gradient_taken_inside_the_function_works():
    x = torch.randn(8, requires_grad=True)

    def penalised(x: Tensor) -> Tensor:
        y = x.sin() * x
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y + slope.square()).sum()

    want = torch.autograd.grad(penalised(x), x)
    assert torch.equal(torch.autograd.grad(recomputed(penalised, x), x)[0], want[0])


class Other(Tensor):
    pass


@pytest.mark.parametrize("kind", ["meta", "fake", "subclass"])
def test_subclass_meta_and_fake_tensors_are_recomputed_by_pytorchs_checkpoint(kind, monkeypatch):
    """They get the gradients that they get without checkpointing, of the same type, and the function runs twice."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from tigon.techniques.checkpointing import recompute

    calls = []
    monkeypatch.setattr(recompute, "checkpoint", lambda *args, **kw: calls.append("") or checkpoint(*args, **kw))
    torch.manual_seed(0)
    layer, data, runs = Layer(), torch.randn(5, WIDTH), []

    def function(x: Tensor) -> Tensor:
        runs.append(type(x))
        return layer(x)

    def gradients_of(run: Callable[..., Any]) -> list[Tensor]:
        layer.zero_grad()
        x = data.as_subclass(Other) if kind == "subclass" else data.clone()
        x.requires_grad_()
        run(function, x).sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    mode = FakeTensorMode() if kind == "fake" else torch.device("meta" if kind == "meta" else "cpu")
    with mode:
        if kind != "subclass":
            layer, data = Layer(), torch.randn(5, WIDTH)
        want = gradients_of(plain)
        assert len(runs) == 1 and not calls
        got = gradients_of(recomputed)
    assert len(runs) == 3 and len(calls) == 1
    assert len(got) == 7 and [type(t) for t in got] == [type(t) for t in want]
    assert [(t.shape, t.dtype, t.device) for t in got] == [(t.shape, t.dtype, t.device) for t in want]
    if kind == "subclass":
        assert runs == [Other] * 3 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    elif kind == "meta":
        assert all(t.is_meta for t in got)
    else:
        assert all(isinstance(t, FakeTensor) for t in got)


def test_inputs_by_keyword_are_recomputed_under_autocast():
    layer, x = Layer(), torch.randn(5, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = (run(lambda *, x: layer(x), x=x).sum() for run in (plain, recomputed))
    assert torch.equal(torch.autograd.grad(got, x)[0], torch.autograd.grad(want, x)[0])
