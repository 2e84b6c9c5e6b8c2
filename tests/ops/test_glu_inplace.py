"""Gradients of a gated unit written over its inputs: the same numbers, and only where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tigon.nn import GeGLUMLP, SwiGLUMLP
from tigon.ops import geglu, swiglu
from tigon.profiler.recording.peak import PeakMeter

CALLS: dict[str, Callable[..., Tensor]] = {"swiglu": swiglu, "geglu": geglu}


def halves(x: Tensor, packed: bool) -> tuple[Tensor, Tensor | None]:
    """Inputs that nobody else reads."""
    if packed:
        return x * 1.0, None
    gate, up = x.chunk(2, -1)
    return gate * 1.0, up * 1.0


def gradients(name: str, x: Tensor, upstream: Tensor, *, packed: bool, inplace: bool) -> tuple[Tensor, list[bool]]:
    """(dx, whether each input's gradient lies where the input lay)"""
    gate, up = halves(x, packed)
    where: list[bool] = []
    for t in (gate, up):
        if t is not None:
            at = t.data_ptr()
            t.register_hook(lambda g, at=at: where.append(g.data_ptr() == at))
    (dx,) = torch.autograd.grad(CALLS[name](gate, up, inplace=inplace), x, upstream)
    return dx, where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("shape", [(3, 5, 128), (4, 14), (2, 3, 4100)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradient_in_place_is_the_same_and_overwrites_its_input(
    name: str, shape: tuple[int, ...], packed: bool, dtype: torch.dtype, backend: Any
) -> None:
    x = torch.randn(shape, device=backend.device).to(dtype).requires_grad_()
    upstream = torch.randn(*shape[:-1], shape[-1] // 2, device=backend.device).to(dtype)
    want, elsewhere = gradients(name, x, upstream, packed=packed, inplace=False)
    got, here = gradients(name, x, upstream, packed=packed, inplace=True)
    assert torch.equal(got, want)
    assert all(here) and not any(elsewhere)


def test_retained_graph_gives_the_same_gradient_at_every_backward(backend: Any) -> None:
    x = torch.randn(4, 32, device=backend.device, requires_grad=True)
    gate, up = halves(x, packed=False)
    y = swiglu(gate, up, inplace=True).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.autograd.grad(y, x)[0], first)


def test_leaf_frozen_half_and_strided_inputs_are_not_overwritten() -> None:
    leaf = torch.randn(4, 32, requires_grad=True)
    other = torch.randn(4, 32)
    cases = [(leaf, other.clone().requires_grad_()), (leaf * 1, other), ((leaf * 1).T, (leaf * 2).T)]
    for gate, up in cases:
        before = gate.detach().clone(), up.detach().clone()
        swiglu(gate, up, inplace=True).sum().backward()
        assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


def test_autograd_detects_an_overwritten_input_that_another_node_saved() -> None:
    gate, up = halves(torch.randn(4, 32, requires_grad=True), packed=False)
    squared = (gate * gate).sum()
    swiglu(gate, up, inplace=True).sum().backward(retain_graph=False, inputs=[up])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("which", ["gate_proj", "up_proj"])
def test_loss_on_the_projections_reads_their_values(which: str, checkpointed: bool) -> None:
    """Another node saves what a hook sees; recomputed, autograd checks no versions of it."""
    from torch.utils.checkpoint import checkpoint

    def step(inplace: bool) -> list[Tensor]:
        torch.manual_seed(0)
        mlp, extra = SwiGLUMLP(16, 64), []
        getattr(mlp, which).register_forward_hook(lambda m, a, out: extra.append(out.pow(2).mean()))
        if not inplace:
            mlp.gated = lambda gate, up, _: swiglu(gate, up)  # type: ignore[method-assign]

        def run(x: Tensor) -> Tensor:
            del extra[:]
            out = mlp(x).sum()
            return out + extra[0]

        x = torch.randn(8, 16, requires_grad=True)
        (checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)).backward()
        return [x.grad, *(p.grad for p in mlp.parameters())]

    for got, want in zip(step(True), step(False), strict=True):
        assert torch.equal(got, want)


def test_recomputed_mlp_writes_gradients_over_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.checkpoint import checkpoint

    from tigon.ops import glu

    calls = []
    run = glu.glu_bwd_inplace
    monkeypatch.setattr(glu, "glu_bwd_inplace", lambda *args: calls.append(1) or run(*args))
    checkpoint(SwiGLUMLP(16, 64), torch.randn(8, 16, requires_grad=True), use_reentrant=False).sum().backward()
    assert calls


# --- the modules that ask for it -------------------------------------------------------------------------------------


def llama_mlp() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from tigon import patch

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config)
    patch(model)
    return model.model.layers[0].mlp  # type: ignore[no-any-return]


MLPS: dict[str, Callable[[], nn.Module]] = {
    "SwiGLUMLP": lambda: SwiGLUMLP(16, 512), "GeGLUMLP": lambda: GeGLUMLP(16, 512), "patched Llama": llama_mlp,
}  # fmt: skip
KEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda out: out, "detached": lambda out: out.detach(), "a view": lambda out: out[:1].detach(),
}  # fmt: skip


def step_bytes(mlp: nn.Module) -> int:
    meter, x = PeakMeter(torch.device("cpu")), torch.randn(1024, 16)
    meter.start([*mlp.parameters(), x])
    mlp(x).sum().backward()
    return meter.stop().step_bytes


@pytest.mark.parametrize("name", MLPS)
def test_mlp_writes_gradients_over_its_projections(name: str) -> None:
    """Kept by a hook, gate and up stay; the reference's fp32 intermediates are the same in both."""
    mlp = MLPS[name]()
    kept: list[Tensor] = []
    step_bytes(mlp)  # the gradients of the weights
    alone = step_bytes(mlp)
    handles = [projection.register_forward_hook(lambda m, a, out: kept.append(out))
               for projection in (mlp.gate_proj, mlp.up_proj)]  # fmt: skip
    beside = step_bytes(mlp)
    for handle in handles:
        handle.remove()
    assert beside - alone >= 1024 * 512 * 4, "no tensor less than with copies"


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("name", MLPS)
def test_projection_kept_by_a_hook_is_not_overwritten(name: str, keep: str) -> None:
    mlp, kept = MLPS[name](), {}
    for which in ("gate_proj", "up_proj"):
        projection = getattr(mlp, which)
        projection.register_forward_hook(lambda m, a, out, which=which: kept.update({which: KEEP[keep](out)}) or None)
    x = torch.randn(3, 16)
    out = mlp(x)
    before = {which: t.detach().clone() for which, t in kept.items()}
    out.sum().backward()
    for which, t in before.items():
        assert torch.equal(kept[which], t), which


def test_gate_that_is_also_up_gets_the_right_gradient(backend: Any) -> None:
    a = torch.randn(3, 8, device=backend.device, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    x, y = a * 1.0, b * 1.0
    swiglu(x, x, inplace=True).sum().backward()
    swiglu(y, y).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
