"""`LigerXFunction.apply`: PyTorch's numbers, forward and gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backends import Backend
from tigon.compat.liger import layers as f
from tigon.compat.liger.loss_dtype import set_loss_dtype
from tigon.compat.liger.losses import cross_entropy as ce
from tigon.errors import OptionError

EPS = 1e-5


def rms(x: Tensor, w: Tensor | None, offset: float = 0.0) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return normed if w is None else normed * (w + offset)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    R = cos.shape[-1]
    a, b = x[..., : R // 2], x[..., R // 2 : R]
    return torch.cat((x[..., :R] * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None], x[..., R:]), -1)


def tables(T: int, R: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(T)[:, None] * 100.0 ** (-torch.arange(0, R, 2) / R)
    angle = torch.cat((angle, angle), -1)[None]
    return angle.cos(), angle.sin()


@dataclass(frozen=True)
class Case:
    """Shapes of the tensors that get gradients, and two ways from them to the outputs."""

    shapes: tuple[tuple[int, ...], ...]
    reference: Callable[..., Any]
    function: Callable[..., Any]


def _rms_case(weighted: bool, offset: float, mode: Any) -> Case:
    def pad(args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        return (args[0], args[1]) if weighted else (args[0], None)

    return Case(
        ((2, 5, 24), (24,)) if weighted else ((2, 5, 24),),
        lambda *xs: rms(*pad(xs), offset),
        lambda *xs: f.LigerRMSNormFunction.apply(*pad(xs), EPS, offset, mode, True, None),
    )


def _rope_case(R: int) -> Case:
    return Case(
        ((2, 4, 5, 8), (2, 2, 5, 8)),
        lambda q, k: tuple(rotate(x, *(t.to(q.device) for t in tables(5, R))) for x in (q, k)),
        lambda q, k: f.LigerRopeFunction.apply(q, k, *(t.to(q.device) for t in tables(5, R))),
    )


CASES = {
    "rms_norm": _rms_case(True, 0.0, "llama"),
    "rms_norm-gemma": _rms_case(True, 1.0, "gemma"),
    "rms_norm-none": _rms_case(True, 0.0, "none"),
    "rms_norm-mode-number": _rms_case(True, 0.0, 1),
    "rms_norm-no-weight": _rms_case(False, 0.0, "llama"),
    "add_rms_norm": Case(
        ((2, 5, 24), (2, 5, 24), (24,)),
        lambda x, r, w: (rms(x + r, w, 1.0), x + r),
        lambda x, r, w: f.LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 1.0, "gemma"),
    ),
    "layer_norm": Case(
        ((2, 5, 24), (24,), (24,)),
        lambda x, w, b: F.layer_norm(x, (24,), w, b, EPS),
        lambda x, w, b: f.LigerLayerNormFunction.apply(x, w, b, EPS),
    ),
    "swiglu": Case(
        ((2, 5, 24), (2, 5, 24)),
        lambda a, b: F.silu(a * 0.7) * b,
        lambda a, b: f.LigerSiLUMulFunction.apply(a, b, 0.7),
    ),
    "swiglu-packed": Case(
        ((2, 5, 24),),
        lambda y: F.silu(y[..., :12]) * y[..., 12:],
        f.LigerFusedGateUpSiLUMulFunction.apply,
    ),
    "geglu": Case(
        ((2, 5, 24), (2, 5, 24)),
        lambda a, b: F.gelu(a, approximate="tanh") * b,
        f.LigerGELUMulFunction.apply,
    ),
    "rope": _rope_case(8),
    "rope-partial": _rope_case(4),
}


def _leaves(case: Case, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in case.shapes]


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _upstream(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(y.shape, generator=generator).to(y) for y in outputs]


@pytest.mark.parametrize("name", CASES)
def test_functions_equal_pytorch(name: str, backend: Backend) -> None:
    case = CASES[name]
    leaves = _leaves(case, backend.device)
    want, got = _tuple(case.reference(*leaves)), _tuple(case.function(*leaves))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    dy = _upstream(want)
    kept = [g.clone() for g in dy]
    expected = torch.autograd.grad(want, leaves, dy)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, dy), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dy, kept, rtol=0, atol=0)  # Liger's in-place default writes over them


def test_rms_norm_returns_the_dtype_of_its_input() -> None:
    x, w = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(8)
    assert f.LigerRMSNormFunction.apply(x, w, EPS).dtype is torch.bfloat16


def test_unknown_casting_mode_is_refused() -> None:
    with pytest.raises(OptionError, match="casting_mode='gema'"):
        f.LigerRMSNormFunction.apply(torch.randn(3, 8), None, EPS, 0.0, "gema")


@pytest.mark.parametrize("shape", ["2-D", "3-D", "4-D", "wide", "rotary_dim"])
def test_rope_tables_of_every_shape_give_the_same_rotation(shape: str) -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    cos, sin = tables(5, 8)
    want = rotate(q, cos, sin), rotate(k, cos, sin)
    options: dict[str, Any] = {}
    if shape == "2-D":
        cos, sin = cos[0], sin[0]
    elif shape == "4-D":
        cos, sin = cos[:, None], sin[:, None]
    elif shape == "wide":  # 7 columns of x under a table of 8: 3 pairs, the last column passes through
        q, k = q[..., :7], k[..., :7]
        few = [torch.cat((t[..., :3], t[..., :3]), -1) for t in (cos, sin)]
        want = rotate(q, *few), rotate(k, *few)
    elif shape == "rotary_dim":
        options = {"rotary_dim": 4}
        few = [torch.cat((t[..., :2], t[..., :2]), -1) for t in (cos, sin)]
        want = rotate(q, *few), rotate(k, *few)
    torch.testing.assert_close(f.LigerRopeFunction.apply(q, k, cos, sin, **options), want)


def test_rope_with_heads_after_tokens_rotates_along_the_tokens() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    cos, sin = tables(5, 8)
    got = f.LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(got[0].transpose(1, 2), rotate(q, cos, sin))


# --- losses -----------------------------------------------------------------------------------------------------------

N, H, V = 12, 8, 20
LOSS_OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0},
    "z_loss": {"lse_square_scale": 1e-2, "return_z_loss": True},
    "z_loss-none": {"lse_square_scale": 1e-2, "return_z_loss": True, "reduction": "none"},
    "weight": {"weight": True, "lse_square_scale": 1e-2, "return_z_loss": True},
    "everything": {
        "weight": True, "label_smoothing": 0.2, "softcap": 5.0, "lse_square_scale": 1e-3, "return_z_loss": True,
        "return_token_accuracy": True, "return_predicted_tokens": True,
    },
    "none-metrics": {"reduction": "none", "return_token_accuracy": True, "return_predicted_tokens": True},
}  # fmt: skip


def _loss_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, head, bias, target; a third of the labels is ignored."""
    generator = torch.Generator().manual_seed(5)
    target = torch.randint(0, V, (N,), generator=generator)
    target[::3] = -100
    hidden, head, bias = (torch.randn(*shape, generator=generator) for shape in ((N, H), (V, H), (V,)))
    return hidden.requires_grad_(), head.requires_grad_(), bias.requires_grad_(), target


def _options(name: str) -> dict[str, Any]:
    options = dict(LOSS_OPTIONS[name])
    options["weight"] = torch.linspace(0.5, 1.5, V) if options.get("weight") else None
    return options


def reference_loss(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    valid = target != -100
    ce = F.cross_entropy(z, target, weight, label_smoothing=label_smoothing, reduction="none")
    square = lse_square_scale * z.logsumexp(-1).square() * valid
    count = valid.sum() if weight is None else (weight[target.clamp(min=0)] * valid).sum()

    def reduced(rows: Tensor, count: Tensor) -> Tensor:
        return rows if reduction == "none" else rows.sum() / (count if reduction == "mean" else 1)

    z_loss = reduced(square, valid.sum())  # Liger divides it by the number of labels
    hit = ((z.argmax(-1) == target) & valid).float()
    return (
        reduced(ce, count) + z_loss,
        z_loss.detach() if return_z_loss else None,
        (hit if reduction == "none" else hit.sum() / valid.sum()) if return_token_accuracy else None,
        z.argmax(-1).masked_fill(~valid, -1) if return_predicted_tokens else None,
    )


def _assert_four(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LOSS_OPTIONS)
def test_cross_entropy_equals_pytorch(name: str) -> None:
    hidden, head, _, target = _loss_inputs()
    logits = (hidden @ head.T).detach().requires_grad_()
    before = logits.detach().clone()
    options = _options(name)
    want = reference_loss(logits, target, **options)
    got = ce.LigerCrossEntropyFunction.apply(logits, target, **options)
    _assert_four(got, want)
    g = torch.rand_like(want[0])
    expected = torch.autograd.grad(want[0], logits, g)[0]
    torch.testing.assert_close(torch.autograd.grad(got[0], logits, g)[0], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(logits.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSS_OPTIONS)
def test_linear_cross_entropy_equals_pytorch(name: str) -> None:
    hidden, head, bias, target = _loss_inputs()
    options = _options(name)
    want = reference_loss(F.linear(hidden, head, bias), target, **options)
    options["ce_weight"] = options.pop("weight")
    got = ce.LigerFusedLinearCrossEntropyFunction.apply(hidden, head, target, bias, **options)
    _assert_four(got, want)
    g = torch.rand_like(want[0])
    expected = torch.autograd.grad(want[0], (hidden, head, bias), g)
    actual = torch.autograd.grad(got[0], (hidden, head, bias), g)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_token_scaling_weights_each_token_with_its_probability() -> None:
    hidden, head, _, target = _loss_inputs()
    logits = F.linear(hidden, head)
    p = torch.softmax(logits, -1).gather(1, target.clamp(min=0)[:, None]).squeeze(1).detach()
    rows = F.cross_entropy(logits, target, reduction="none") * p
    want = rows.sum() / (target != -100).sum()
    got = ce.LigerFusedLinearCrossEntropyFunction.apply(hidden, head, target, use_token_scaling=True)[0]
    torch.testing.assert_close(got, want)
    expected = torch.autograd.grad(want, (hidden, head))
    torch.testing.assert_close(torch.autograd.grad(got, (hidden, head)), expected, rtol=1e-4, atol=1e-6)


def test_backend_choice_of_the_fused_loss_is_refused() -> None:
    hidden, head, _, target = _loss_inputs()
    with pytest.raises(OptionError, match="ce_impl='cutedsl'"):
        ce.LigerFusedLinearCrossEntropyFunction.apply(hidden, head, target, ce_impl="cutedsl")


@pytest.mark.parametrize("label", [V, -3])
def test_label_outside_the_vocabulary_is_refused_as_liger_refuses_it(label: int) -> None:
    hidden, head, _, target = _loss_inputs()
    target[1] = label
    for call in (
        lambda: ce.LigerFusedLinearCrossEntropyFunction.apply(hidden, head, target),
        lambda: ce.LigerCrossEntropyFunction.apply(hidden @ head.T, target, None),
    ):
        with pytest.raises(AssertionError, match=rf"label {label} .*out of\s+bounds") as caught:
            call()
        assert isinstance(caught.value, IndexError)  # what PyTorch raises


@pytest.fixture
def default_loss_dtype() -> Iterator[None]:
    yield
    set_loss_dtype("fp32")


@pytest.mark.usefixtures("default_loss_dtype")
@pytest.mark.parametrize(
    ("choice", "cross_entropy", "fused", "z_loss"),
    [
        ("fp32", torch.float32, torch.float32, torch.float32),
        ("logits", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("liger", torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss_dtype_is_the_chosen_one_and_gradients_do_not_depend_on_it(
    choice: str, cross_entropy: torch.dtype, fused: torch.dtype, z_loss: torch.dtype, reduction: str
) -> None:
    hidden, head, _, target = _loss_inputs()
    hidden, head = hidden.detach().bfloat16().requires_grad_(), head.detach().bfloat16().requires_grad_()
    logits = (hidden @ head.T).detach().requires_grad_()
    options: dict[str, Any] = {"lse_square_scale": 1e-3, "return_z_loss": True, "reduction": reduction}

    def run() -> tuple[list[torch.dtype], list[Tensor]]:
        plain = ce.LigerCrossEntropyFunction.apply(logits, target, None, **options)
        flce = ce.LigerFusedLinearCrossEntropyFunction.apply(hidden, head, target, **options)
        grads = [torch.autograd.grad(plain[0].sum(), logits)[0], *torch.autograd.grad(flce[0].sum(), (hidden, head))]
        return [plain[0].dtype, flce[0].dtype, plain[1].dtype, flce[1].dtype], grads

    _, expected = run()
    set_loss_dtype(choice)
    dtypes, grads = run()
    assert dtypes == [cross_entropy, fused, z_loss, z_loss]
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)
    if choice != "fp32":
        plain = F.cross_entropy(logits, target, reduction=reduction)
        ours = ce.LigerCrossEntropyFunction.apply(logits, target, None, reduction=reduction)[0]
        assert torch.allclose(ours, plain, rtol=2e-2)


def test_unknown_loss_dtype_is_refused() -> None:
    with pytest.raises(OptionError, match=r"loss_dtype='bf16'.*fp32, logits, liger"):
        set_loss_dtype("bf16")


def test_fp16_loss_and_gradient_are_rounded_after_the_loss_scale() -> None:
    logits = torch.randn(64, 4096, requires_grad=True)
    target = torch.randint(0, 4096, (64,))
    half = logits.detach().half().requires_grad_()
    exact = torch.autograd.grad(F.cross_entropy(half.float(), target) * 2**16, half)[0].float()
    loss = ce.LigerCrossEntropyFunction.apply(half, target, None)[0]
    assert loss.dtype is torch.float32 and bool((loss * 2**16).isfinite())
    got = torch.autograd.grad(loss * 2**16, half)[0].float()
    assert float((got - exact).norm() / exact.norm()) < 1e-3


def test_compiled_call_is_one_graph_and_equals_eager_with_ignored_labels() -> None:
    hidden, head, _, target = _loss_inputs()
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    cos, sin = tables(5, 8)

    def step(hidden: Tensor, head: Tensor, w: Tensor) -> Tensor:
        normed = f.LigerRMSNormFunction.apply(f.LigerSiLUMulFunction.apply(hidden, hidden), w, EPS)
        normed = f.LigerLayerNormFunction.apply(f.LigerGELUMulFunction.apply(normed, hidden), w, w, EPS)
        rotated = f.LigerRopeFunction.apply(q, k, cos, sin)
        loss = ce.LigerFusedLinearCrossEntropyFunction.apply(normed, head, target)[0]
        return loss + sum(x.sum() for x in rotated)

    w = torch.ones(H)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, head, w), step(hidden, head, w))


def test_z_loss_with_class_weights_is_the_mean_over_the_labels() -> None:
    torch.manual_seed(3)
    z, y, w = torch.randn(6, 10), torch.randint(0, 10, (6,)), torch.rand(10) * 3
    square = 0.1 * torch.logsumexp(z, -1).square()
    loss, z_loss, *_ = ce.LigerCrossEntropyFunction.apply(z, y, w, -100, 0.1, 0.0, "mean", None, True)
    torch.testing.assert_close(z_loss, square.mean())
    torch.testing.assert_close(loss, F.cross_entropy(z, y, w) + square.mean())
    nothing = ce.LigerCrossEntropyFunction.apply(z, torch.full_like(y, -100), w, -100, 0.1, 0.0, "mean", None, True)
    assert [float(x) for x in nothing[:2]] == [0.0, 0.0]
