"""Kernels that find the largest magnitudes of what they write: exact, void after a write, and used by FP8 layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tigon
from tigon.models.seams import fp8 as fp8_seam
from tigon.models.verification.tiny import tiny_model
from tigon.ops import add_rms_norm, fp8_linear, geglu, known_amax, rms_norm, rope, swiglu
from tigon.ops.glu import glu_bwd_amax, glu_bwd_inplace, glu_fwd_amax
from tigon.ops.linear import fp8_linear as layer
from tigon.ops.norms.norm import (
    NormBackwardOptions,
    NormOptions,
    norm_bwd,
    norm_bwd_amax,
    norm_fwd,
    norm_fwd_amax,
)  # fmt: skip
from tigon.ops.rope import RopeLayout, rotate, rotate_amax
from tigon.techniques.checkpointing.layer_function import enable, replace_function
from tigon.techniques.checkpointing.recompute import recomputed

pytest.importorskip("transformers")

# There are more programs than numbers that they share, and the width is not a power of 2.
ROWS, WIDTH = 700, 100


def magnitude(x: Tensor) -> Tensor:
    return x.float().abs().amax()


def same(parts: Tensor, x: Tensor) -> bool:
    """Whether the maximum of the parts is that of |x|, NaN included."""
    return torch.equal(parts.amax().nan_to_num(-1.0), magnitude(x).nan_to_num(-1.0))


@pytest.mark.parametrize(
    ("activation", "packed", "special"),
    [("silu", False, None), ("silu", True, float("nan")), ("gelu", True, None), ("gelu_tanh", False, float("inf"))],
)
def test_kernels_find_the_magnitudes_of_what_they_store(
    activation: str, packed: bool, special: float | None, backend: Any
) -> None:
    torch.manual_seed(0)
    gate, up, dy = (torch.randn(ROWS, WIDTH).bfloat16().to(backend.device) for _ in range(3))
    if special is not None:
        up[3, 5] = special
    if packed:
        gate, up = torch.cat([gate, up], 1), None
    amax = torch.zeros(1, known_amax.PARTS, device=backend.device)
    y = glu_fwd_amax(gate, up, activation, amax)
    assert same(amax, y)
    for inplace in (False, True):
        amax = torch.zeros(1 if packed else 2, known_amax.PARTS, device=backend.device)
        if inplace:
            glu_bwd_inplace(dy, gate, up, activation, amax)
            gradients = (gate, up)
        else:
            gradients = glu_bwd_amax(dy, gate, up, activation, True, not packed, amax)
        for gradient, parts in zip(gradients, amax, strict=False):
            assert same(parts, gradient)


@pytest.mark.parametrize(
    ("rows", "width", "residual", "eps", "special"),
    [
        (1100, 100, False, 0.0, None), (5, 100, True, 1e-6, float("nan")), (3, 17000, False, 1e-6, None),
        (3, 17000, True, 1e-6, float("inf")),
    ],
)  # fmt: skip
def test_norms_find_the_magnitude_of_what_they_store(
    rows: int, width: int, residual: bool, eps: float, special: float | None, backend: Any
) -> None:
    torch.manual_seed(0)
    x, added = (torch.randn(rows, width).bfloat16().to(backend.device) for _ in range(2))
    weight = torch.randn(width).bfloat16().to(backend.device)
    if special is not None:
        x[1, 5] = special
    options = NormOptions(eps, 0.0, False, False)
    amax = torch.zeros(1, known_amax.PARTS, device=backend.device)
    got = norm_fwd_amax(x, added if residual else None, weight, None, options, amax)
    want = norm_fwd(x, added if residual else None, weight, None, options)
    assert same(amax, got[0])
    assert all(a is b is None or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, want, strict=True))
    given = (added, x if residual else None, x, weight, got[3], got[3])
    backward = NormBackwardOptions(0.0, False, False, True, rows > 3, False)
    amax = torch.zeros(1, known_amax.PARTS, device=backend.device)
    got, want = norm_bwd_amax(*given, backward, amax), norm_bwd(*given, backward)
    assert same(amax, got[0])
    assert all(a is b is None or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("rotary", "interleaved", "in_memory"), [(16, False, "BTHD"), (16, True, "BHTD"), (6, False, "BTHD")]
)
def test_rope_finds_the_magnitudes_of_what_it_stores(
    rotary: int, interleaved: bool, in_memory: str, backend: Any
) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, 70, 16).bfloat16().to(backend.device) for heads in (6, 2))
    k[0, 1, 3, 15] = 50.0  # behind a rotary width of 6
    cos, sin = (torch.randn(1, 70, rotary).to(backend.device) for _ in range(2))
    order = (0, 2, 1) if in_memory == "BTHD" else (0, 1, 2)
    layout = RopeLayout(order, order, 1, interleaved)
    amax = torch.zeros(2, known_amax.PARTS, device=backend.device)
    got = rotate_amax(q, k, cos, sin, layout, True, amax)
    want = rotate(q, k, cos, sin, layout, True)
    assert all(same(parts, x) for parts, x in zip(amax, got, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_rope_finds_magnitudes_only_for_fp8_layers() -> None:
    torch.manual_seed(0)
    noted: list[bool] = []

    class Reader(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dx: Tensor) -> Tensor:
            parts = known_amax.noted(dx)
            noted.append(parts is not None)
            assert parts is None or same(parts, dx)
            return dx

    x, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(16, 16)
    cos, sin = torch.randn(5, 4), torch.randn(5, 4)
    for scaling in ("tensorwise", "rowwise"):
        noted.clear()
        # A view of the layer's result, as attention makes it; and the keys come from elsewhere.
        q = fp8_linear(x, weight, scaling=scaling).view(2, 5, 4, 4).transpose(1, 2)
        k = Reader.apply(x.view(2, 5, 4, 4)).transpose(1, 2)
        q, k = rope(q, k, cos, sin)
        gradient = torch.autograd.grad(q.square().sum() + k.square().sum(), x)[0]
        assert noted == [False]
        assert bool(gradient.isfinite().all())


def test_added_norm_finds_the_magnitudes_of_its_result_and_of_the_gradient_that_an_fp8_layer_reads() -> None:
    torch.manual_seed(0)
    read: list[bool] = []

    def check(dx: Tensor) -> None:
        parts = known_amax.noted(dx)
        read.append(parts is not None)
        assert parts is None or same(parts, dx)

    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16, 16)
    for scaling in ("tensorwise", "rowwise"):
        own = x.clone().requires_grad_()
        projected = fp8_linear(own, weight, scaling=scaling)
        projected.register_hook(check)
        normed, total = add_rms_norm(projected, residual, find_amax=True)
        parts = known_amax.noted(normed)
        assert parts is not None and same(parts, normed)
        (gradient,) = torch.autograd.grad((normed * total).sum(), own)
        assert bool(gradient.isfinite().all())
    assert read == [True, False], "a rowwise layer does not read them"


def test_operators_of_plain_calls_write_to_no_argument() -> None:
    """torch.compile would wrap them."""
    for name in ("norm_fwd", "norm_bwd", "rope_rotate", "glu_fwd", "glu_bwd"):
        assert not getattr(torch.ops.tigon, name).default._schema.is_mutable
        assert getattr(torch.ops.tigon, f"{name}_amax").default._schema.is_mutable


def test_only_a_whole_view_has_the_magnitude_of_its_base() -> None:
    x = torch.randn(4, 6)
    y = rms_norm(x, find_amax=True)
    parts = known_amax.noted(y)
    assert parts is not None and same(parts, y)
    assert known_amax.noted(y.view(2, 2, 6)) is parts
    assert known_amax.noted(y[:2]) is None
    assert known_amax.noted(y[:1].expand(4, 6)) is None
    assert known_amax.noted(rms_norm(x)) is None
    y.view(24).mul_(2)
    assert known_amax.noted(y) is known_amax.noted(y.view(24)) is None


@pytest.mark.parametrize("gated", [swiglu, geglu])
def test_magnitudes_reach_the_readers_of_the_result_and_of_the_gradients(gated: Any) -> None:
    class Reader(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dx: Tensor) -> Tensor:
            parts = known_amax.noted(dx)
            assert parts is not None and torch.equal(parts.amax(), magnitude(dx))
            found.append(parts)
            return dx * 2

    found: list[Tensor] = []
    gate, up = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
    for inplace in (False, True):
        y = gated(Reader.apply(gate), Reader.apply(up), inplace=inplace, find_amax=True)
        parts = known_amax.noted(y)
        assert parts is not None and torch.equal(parts.amax(), magnitude(y))
        y.square().sum().backward()
    assert len(found) == 4
    y.detach().add_(1)  # shares the version of y
    assert known_amax.noted(y) is None
    assert known_amax.noted(gated(gate, up)) is None


def mlp_of(scaling: str = "tensorwise", **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    model = tiny_model("llama", changes).bfloat16().train()
    tigon.patch(model)
    tigon.patch_fp8(model, scaling=scaling, bf16_layers=0)
    return model.model.layers[0].mlp


def results(mlp: nn.Module, x: Tensor, recomputes: bool = False) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = recomputed(mlp, x) if recomputes else mlp(x)
    upstream = torch.linspace(-3, 3, y.numel(), device=y.device).view_as(y).bfloat16()
    gradients = torch.autograd.grad(y, [x, *mlp.parameters()], upstream)
    return [y.detach(), *gradients]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the tensors for which `fp8_amax` was called."""
    shapes: list[tuple[int, ...]] = []

    def watched(x_MK: Tensor, rowwise: bool) -> Tensor:
        shapes.append(tuple(x_MK.shape))
        return plain(x_MK, rowwise)

    from tigon.ops.linear import fp8

    plain = fp8.fp8_amax
    monkeypatch.setattr(fp8, "fp8_amax", watched)
    monkeypatch.setattr(layer, "fp8_amax", watched)
    return shapes


@pytest.mark.parametrize("recomputes", [False, True], ids=["none", "full"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_fp8_mlp_has_the_same_bits_with_fewer_searches(
    scaling: str, recomputes: bool, searched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    mlp = mlp_of(scaling).to(backend.device)
    x = torch.randn(1, 16, mlp.gate_proj.in_features, device=backend.device).bfloat16()
    got, fewer = results(mlp, x, recomputes), len(searched)
    searched.clear()
    monkeypatch.setattr(known_amax, "parts_for", lambda x, tensors: None)
    want = results(mlp, x, recomputes)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # those of the gated unit's result and of its two gradients
    assert len(searched) - fewer == (3 if scaling == "tensorwise" else 0)


def test_hook_that_changes_a_gradient_in_place_makes_its_magnitude_void(searched: list[tuple[int, ...]]) -> None:
    mlp = mlp_of()
    x = torch.randn(1, 16, mlp.gate_proj.in_features).bfloat16()
    results(mlp, x)
    without = len(searched)
    searched.clear()

    def enlarge_gradient(module: nn.Module, args: Any, y: Tensor) -> None:
        y.register_hook(lambda grad: grad.mul_(100))

    mlp.gate_proj.register_forward_hook(enlarge_gradient)
    assert all(bool(gradient.isfinite().all()) for gradient in results(mlp, x))
    assert len(searched) == without + 1


@pytest.mark.parametrize("recomputes", [False, True])
def test_whole_model_trains_with_the_same_bits(
    recomputes: bool, searched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients() -> list[Tensor]:
        searched.clear()
        torch.manual_seed(0)
        model = tiny_model("llama", {}).bfloat16().train()
        tigon.patch(model)
        tigon.patch_fp8(model, bf16_layers=0)
        if recomputes:
            enable(model)
            replace_function(model, recomputed)
        ids = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(1))
        model(input_ids=ids, labels=ids).loss.backward()
        assert fp8_seam.fp8_scaling(model.model.layers[0].mlp.down_proj) == "tensorwise"
        return [p.grad for p in model.parameters()]

    got, fewer = gradients(), len(searched)
    monkeypatch.setattr(known_amax, "parts_for", lambda x, tensors: None)
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(), strict=True))
    layers = len(tiny_model("llama", {}).model.layers)
    # those of two norms' results, of the gradients of q and k, and of the gated unit's result and two gradients
    assert len(searched) - fewer == 7 * layers
