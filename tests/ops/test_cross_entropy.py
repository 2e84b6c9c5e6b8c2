"""What only a loss can get wrong: labels, denominators, confidence, infinities, fp16, and the in-place form."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import assert_within, guarded, relative_error
from tigon.errors import DoubleBackwardError, DtypeError, LabelError, OptionError, ShapeError
from tigon.ops import cross_entropy, linear_cross_entropy
from tigon.ops.losses.cross_entropy import cross_entropy_oracle

V = 37


def through_logits(logits: Tensor, target: Tensor, **options: Any) -> Any:
    return cross_entropy(logits, target, **options)


def through_linear(logits: Tensor, target: Tensor, **options: Any) -> Any:
    """The linear form with an identity head, so that both losses get the same logits; five tokens per chunk."""
    eye = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    if "weight" in options:
        options["class_weight"] = options.pop("weight")
    return linear_cross_entropy(logits, eye, target, chunk_bytes=5 * eye.shape[0] * eye.element_size(), **options)


LOSSES = [pytest.param(through_logits, id="cross_entropy"), pytest.param(through_linear, id="linear_cross_entropy")]


def logits_and_target(
    device: torch.device, dtype: torch.dtype = torch.float32, rows: int = 11
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    logits = torch.randn(rows, V).mul(2).to(dtype).to(device)
    return logits.requires_grad_(), torch.randint(0, V, (rows,)).to(device)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_labels_ignored_gives_zero_loss_and_gradient(loss: Any, reduction: str, backend: Any) -> None:
    """One all-masked micro-batch must not end a run."""
    logits, target = logits_and_target(backend.device)
    value = loss(logits, torch.full_like(target, -100), reduction=reduction)
    value.sum().backward()
    assert torch.equal(value, torch.zeros_like(value))
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_items", [0, 0.0, "tensor"])
def test_zero_items_give_zero_loss_and_gradient(loss: Any, num_items: Any, backend: Any) -> None:
    logits, target = logits_and_target(backend.device)
    count = torch.tensor(0, device=backend.device) if num_items == "tensor" else num_items
    value = loss(logits, target, num_items=count)
    value.backward()
    assert float(value.detach()) == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("loss", LOSSES)
def test_zero_tokens_give_a_loss_of_zero(loss: Any, backend: Any) -> None:
    for reduction, shape in (("mean", ()), ("sum", ()), ("none", (0,))):
        logits = torch.empty(0, V, device=backend.device, requires_grad=True)
        value = loss(logits, torch.empty(0, dtype=torch.int64, device=backend.device), reduction=reduction)
        value.sum().backward()
        assert value.shape == shape and float(value.detach().sum()) == 0.0
        assert logits.grad is not None and logits.grad.shape == (0, V)


BAD_LABELS = [V, -1, -101, 2**31, -(2**63)]


@pytest.mark.parametrize("loss", LOSSES)
def test_label_out_of_range_raises_or_gives_nan_in_its_row_alone(loss: Any, backend: Any) -> None:
    """On the CPU an error; in a kernel NaN in those rows alone, other rows bit-identical, memory untouched."""
    logits, target = logits_and_target(backend.device)
    rows = 3 + torch.arange(len(BAD_LABELS), device=backend.device)
    if backend.name == "reference":
        for label in BAD_LABELS:
            bad = target.clone()
            bad[0] = -100  # the position counts ignored tokens too
            bad[3] = label
            with pytest.raises(LabelError, match=f"label {label} at position 3 is outside \\[0, {V}\\)"):
                loss(logits, bad)
        return
    bad = target.clone()
    bad[rows] = torch.tensor(BAD_LABELS, device=backend.device)
    expected = loss(logits, target, reduction="none")
    wanted = torch.autograd.grad(expected.sum(), logits)[0]
    inside = guarded(logits.detach()).requires_grad_()
    value = loss(inside, bad, reduction="none")
    gradient = torch.autograd.grad(value.sum(), inside)[0]
    others = ~torch.isin(torch.arange(target.shape[0], device=backend.device), rows)
    assert others.any() and bool(value[rows].isnan().all()) and torch.equal(value[others], expected[others])
    assert torch.equal(gradient[others], wanted[others])
    assert bool(loss(logits, bad).isnan()), "the mean hides the bad labels"


@pytest.mark.parametrize("loss", LOSSES)
def test_opt_in_label_check_applies_to_kernels_too(loss: Any, backend: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TIGON_CHECK", "1")
    logits, target = logits_and_target(backend.device)
    target[3] = V
    with pytest.raises(LabelError):
        loss(logits, target)


@pytest.mark.parametrize("loss", LOSSES)
def test_arguments_that_do_not_fit_are_refused(loss: Any, backend: Any) -> None:
    logits, target = logits_and_target(backend.device)
    with pytest.raises(ShapeError, match="must agree"):
        loss(logits, target[:-1])
    with pytest.raises(ShapeError):
        loss(logits, target.unsqueeze(0))
    with pytest.raises(DtypeError, match="int64 and int32"):
        loss(logits, target.float())
    with pytest.raises(DtypeError):
        loss(logits.to(torch.int32), target)
    with pytest.raises(OptionError, match="reduction"):
        loss(logits, target, reduction="avg")
    with pytest.raises(OptionError, match="num_items"):
        loss(logits, target, reduction="sum", num_items=3)
    with pytest.raises(OptionError, match="softcap"):
        loss(logits, target, softcap=0.0)
    with pytest.raises(OptionError, match="label_smoothing"):
        loss(logits, target, label_smoothing=1.5)
    for name in ("z_loss", "logit_scale"):
        for number in (math.nan, math.inf):
            with pytest.raises(OptionError, match=f"{name}={number} must be finite"):
                loss(logits, target, **{name: number})
    with pytest.raises(OptionError, match="outputs"):
        loss(logits, target, outputs=("perplexity",))
    with pytest.raises(ShapeError, match="token_weight"):
        loss(logits, target, token_weight=torch.ones(3, device=backend.device))
    with pytest.raises(OptionError, match="requires a gradient"):
        loss(logits, target, token_weight=torch.ones(11, device=backend.device, requires_grad=True))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ignore_index", [0, 1, V - 1, -1, -100, V + 5])
def test_ignore_index_may_be_any_integer(loss: Any, ignore_index: int, backend: Any) -> None:
    logits, target = logits_and_target(backend.device)
    target[2] = target[7] = ignore_index
    got = loss(logits, target, ignore_index=ignore_index)
    expected = F.cross_entropy(logits.double(), target, ignore_index=ignore_index)
    assert abs(float(got) - float(expected)) <= 1e-6 * abs(float(expected))
    g = torch.autograd.grad(got, logits)[0]
    assert relative_error(g, torch.autograd.grad(expected, logits)[0]) < 1e-6
    assert torch.equal(g[2], torch.zeros_like(g[2]))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("upstream", [0.0, 3.0, 65536.0, -1.0, float("inf")])
def test_upstream_gradient_scales_the_gradient(loss: Any, upstream: float, backend: Any) -> None:
    logits, target = logits_and_target(backend.device)
    (got,) = torch.autograd.grad(loss(logits, target), logits, torch.tensor(upstream, device=backend.device))
    (one,) = torch.autograd.grad(cross_entropy_oracle(logits.double(), target), logits)
    if upstream == float("inf"):
        assert not bool(got.isfinite().all())
    else:
        assert relative_error(got, one * upstream) < 1e-6


@pytest.mark.parametrize("loss", LOSSES)
def test_per_token_losses_get_their_own_upstream_gradients(loss: Any, backend: Any) -> None:
    """Signed weights with zeros; a broadcast upstream gradient of stride 0."""
    logits, target = logits_and_target(backend.device)
    target[4] = -100
    weights = torch.linspace(-2, 2, 11, device=backend.device)
    weights[5] = 0.0
    (got,) = torch.autograd.grad((loss(logits, target, reduction="none") * weights).sum(), logits)
    (want,) = torch.autograd.grad(
        (cross_entropy_oracle(logits.double(), target, reduction="none") * weights).sum(), logits
    )
    assert relative_error(got, want) < 1e-6
    stride_0 = torch.ones((), device=backend.device).expand(11)
    (broadcast,) = torch.autograd.grad(loss(logits, target, reduction="none"), logits, stride_0)
    (plain,) = torch.autograd.grad(loss(logits, target, reduction="none"), logits, stride_0.contiguous())
    assert torch.equal(broadcast, plain)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_loss_is_fp32_for_logits_of_any_narrower_dtype(loss: Any, dtype: torch.dtype, backend: Any) -> None:
    """The sum over many tokens exceeds 65504, the largest fp16 number."""
    logits, target = logits_and_target(backend.device, dtype)
    value = loss(logits * 500, target, reduction="sum")
    assert value.dtype == torch.float32 and bool(value.isfinite())
    if dtype == torch.float16 and loss is through_logits:
        many = (torch.arange(V).expand(60, V) * 100.0).to(dtype).to(backend.device)
        total = cross_entropy(many, torch.zeros(60, dtype=torch.int64, device=backend.device), reduction="sum")
        assert float(total) == pytest.approx(60 * 100 * (V - 1), rel=1e-5) and float(total) > 65504


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("gap", [1e-1, 1e-2, 1e-3, 1e-4, 1e-6])
def test_gradient_of_a_confident_token_is_kept(loss: Any, gap: float, backend: Any) -> None:
    """P_y = 1 - gap, at logits of 20, where lse rounded to fp32 would be off by the size of 1 - p_y."""
    other = torch.tensor(20.0 + torch.log(torch.tensor(gap / (1 - gap) / 3, dtype=torch.float64)).item())
    row = torch.full((1, 8), -60.0)
    row[0, 2], row[0, 3:6] = 20.0, other
    logits = row.to(backend.device).requires_grad_()
    target = torch.tensor([2], device=backend.device)
    (got,) = torch.autograd.grad(loss(logits, target), logits)
    (low,) = torch.autograd.grad(F.cross_entropy(logits, target), logits)
    (truth,) = torch.autograd.grad(F.cross_entropy(logits.double(), target), logits)
    error, allowed = abs(float(got[0, 2] - truth[0, 2])), abs(float(low[0, 2] - truth[0, 2]))
    # p_y is a number near 1: its exponential and its sum round it by up to two units there, on some CPUs where torch is
    # exact by luck. Rounding lse to fp32 would cost 4.4e-7 to 9.1e-7 at these gaps.
    assert error <= 2 * allowed + 2 * torch.finfo(torch.float32).eps


def _infinite_rows() -> Tensor:
    torch.manual_seed(6)
    rows = torch.randn(6, 5000)
    rows[0, :4096] = -float("inf")  # all of the first tile
    rows[1, 4096:] = -float("inf")  # all of the last
    rows[2] = -float("inf")
    rows[3, 7] = float("nan")
    rows[4, 7] = float("inf")
    rows[5, ::2] = -float("inf")
    return rows


@pytest.mark.parametrize("loss", LOSSES)
def test_label_far_below_the_maximum_has_the_exact_gradient(loss: Any, backend: Any) -> None:
    """A GPU flushes exp(-87.4) to 0, and exp(88.8) overflows: no distance between them may lose a row.

    The interpreter has numbers below 1e-38, so only a GPU finds a distance that the kernel forgets.
    """
    distances = torch.arange(56.0, 96.0, 0.25)
    logits = torch.zeros(len(distances), V, device=backend.device)
    logits[:, 1] = distances.to(backend.device)
    logits.requires_grad_()
    target = torch.zeros(len(distances), dtype=torch.long, device=backend.device)
    (got,) = torch.autograd.grad(loss(logits, target), logits)
    (exact,) = torch.autograd.grad(cross_entropy_oracle(logits.double(), target), logits)
    assert relative_error(got, exact) < 1e-6


@pytest.mark.parametrize("loss", [LOSSES[0]])
def test_infinite_logits_give_nan_or_infinity_exactly_as_in_torch(loss: Any, backend: Any) -> None:
    """NaN exactly where torch has NaN, infinite where it is infinite, else equal; the entropy finite too."""
    logits = _infinite_rows().to(backend.device).requires_grad_()
    target = torch.tensor([4500, 5, 5, 5, 5, 1], device=backend.device)
    got = loss(logits, target, reduction="none", outputs=("entropy",))
    want = F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(got.loss, want, equal_nan=True, rtol=1e-6, atol=1e-6)
    (g,) = torch.autograd.grad(got.loss.nansum(), logits)
    (e,) = torch.autograd.grad(want.nansum(), logits)
    finite = torch.tensor([0, 1, 5], device=backend.device)
    torch.testing.assert_close(g[finite], e[finite], rtol=1e-5, atol=1e-7)
    assert bool(got.entropy[finite].isfinite().all())


def test_fp16_gradient_is_rounded_after_the_loss_scale(backend: Any) -> None:
    """Near-uniform softmax over 32k classes, mean over the tokens, loss scale 65536.

    The gradients of classes that are no token's target are 1 / (N V), 2^-24 of the largest. They vanish if 1 / N is
    taken before the scale.
    """
    torch.manual_seed(7)
    tokens, hidden, vocab, items = (12, 16, 1024, 192) if backend.interpreted else (256, 32, 32000, 256)
    x = torch.randn(tokens, hidden).half().to(backend.device)
    w = (torch.randn(vocab, hidden) * 0.02).half().to(backend.device)
    target = torch.randint(0, vocab // 4, (tokens,), device=backend.device)
    scale = torch.tensor(65536.0, device=backend.device)

    def grads(fn: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()]
        return torch.autograd.grad(fn(*leaves) * scale, leaves)

    def unfused_loss(x: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(x, w)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, target, reduction="sum") / items

    truth, unfused = grads(unfused_loss, torch.float64), grads(unfused_loss, torch.float16)
    quiet = torch.arange(vocab, device=backend.device) >= vocab // 4
    for chunk_bytes in (1 << 30, 40 * vocab * 2 // 4):
        got = grads(
            lambda x, w, c=chunk_bytes: linear_cross_entropy(x, w, target, chunk_bytes=c, num_items=items),
            torch.float16,
        )
        assert_within(got[0], truth[0], unfused[0], 2.0, "dX")
        assert relative_error(got[1][quiet], truth[1][quiet]) <= 2 * relative_error(unfused[1][quiet], truth[1][quiet])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"weight": 1000.0}, {"logit_scale": 100.0}, {"z_loss": 5.0}, {"logit_scale": 1e-3}, {"token_weight": 1e4}],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values()))),
)
def test_large_factors_stay_in_the_range_of_fp16(options: dict[str, float], inplace: bool, backend: Any) -> None:
    """The fp16 gradient stored between forward and backward is scaled by the largest factor that the options allow."""
    logits, target = logits_and_target(backend.device, torch.float16)
    logits = (logits.detach() / 8).requires_grad_()
    vectors = {"weight": (V,), "token_weight": target.shape}
    given = {n: torch.full(vectors[n], v, device=backend.device) if n in vectors else v for n, v in options.items()}
    (truth,) = torch.autograd.grad(cross_entropy_oracle(logits.double(), target, **given), logits)
    if inplace:
        leaf = logits.detach().clone().requires_grad_()
        (got,) = torch.autograd.grad(cross_entropy(leaf, target, inplace=True, **given), leaf)
    else:
        (got,) = torch.autograd.grad(through_linear(logits, target, **given), logits)
    assert relative_error(got, truth) < 2e-3


@pytest.mark.parametrize("loss", LOSSES)
def test_outputs_match_the_log_softmax_of_each_token(loss: Any, backend: Any) -> None:
    """Shapes follow the target, ignored rows hold the documented fill, and only the loss is differentiable."""
    torch.manual_seed(8)
    logits = torch.randn(2, 5, V, device=backend.device, requires_grad=True)
    target = torch.randint(0, V, (2, 5), device=backend.device)
    target[0, 1] = target[1, 4] = -100
    target[0, 0] = logits.detach()[0, 0].argmax()
    got = loss(logits, target, outputs=("logprob", "entropy", "accuracy", "predicted"))
    logp = F.log_softmax(logits.detach().double(), -1)
    kept = target != -100
    picked = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(got.logprob, torch.where(kept, picked, 0.0).float(), rtol=1e-5, atol=1e-6)
    entropy = -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(got.entropy, torch.where(kept, entropy, 0.0).float(), rtol=1e-5, atol=1e-6)
    best = logits.detach().argmax(-1)
    assert torch.equal(got.predicted, torch.where(kept, best, -100))
    assert float(got.accuracy) == pytest.approx(float(((best == target) & kept).sum() / kept.sum()))
    assert got.loss.requires_grad and not any(t.requires_grad for t in (got.logprob, got.entropy, got.accuracy))


def test_first_of_equal_logits_is_the_prediction(backend: Any) -> None:
    logits = torch.zeros(2, 9000, device=backend.device)
    logits[0, [5000, 700]] = 1.0
    target = torch.zeros(2, dtype=torch.int64, device=backend.device)
    assert cross_entropy(logits, target, outputs=("predicted",)).predicted.tolist() == [700, 0]


# --- in place --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("reduction", "weighted"), list(itertools.product(["mean", "none"], [False, True])))
def test_inplace_gradient_equals_the_plain_gradient_and_reuses_the_logits(
    dtype: torch.dtype, reduction: str, weighted: bool, backend: Any
) -> None:
    logits, target = logits_and_target(backend.device, dtype)
    target[1] = -100
    weight = torch.linspace(-3e4, 2e4, 11, device=backend.device) if weighted else None
    upstream = torch.full((11,) if reduction == "none" else (), 0.37, device=backend.device)
    plain = cross_entropy(logits, target, reduction=reduction, token_weight=weight)
    (want,) = torch.autograd.grad(plain, logits, upstream)
    buffer = logits.detach().clone()
    leaf = buffer.requires_grad_()
    value = cross_entropy(leaf, target, reduction=reduction, token_weight=weight, inplace=True)
    assert torch.equal(value, plain)
    (got,) = torch.autograd.grad(value, leaf, upstream, retain_graph=True)
    assert got.data_ptr() == buffer.data_ptr(), "a second tensor of logits was made"
    assert relative_error(got, want) < 4 * torch.finfo(dtype).eps
    with pytest.raises(DoubleBackwardError, match="inplace"):
        torch.autograd.grad(value, leaf, upstream)


def test_autograd_detects_logits_overwritten_by_inplace(backend: Any) -> None:
    logits, target = logits_and_target(backend.device)
    doubled = logits * 1.0
    square = (doubled * doubled).sum()  # saves `doubled`
    loss = cross_entropy(doubled, target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + square).backward()


def test_inplace_without_gradients_leaves_the_logits_unchanged(backend: Any) -> None:
    logits, target = logits_and_target(backend.device)
    before = logits.detach().clone()
    with torch.no_grad():
        cross_entropy(logits, target, inplace=True)
    assert torch.equal(logits, before)


def test_inplace_on_non_contiguous_logits_is_refused(backend: Any) -> None:
    logits = torch.randn(V, 11, device=backend.device).t().requires_grad_()
    with pytest.raises(OptionError, match="contiguous"):
        cross_entropy(logits, torch.zeros(11, dtype=torch.int64, device=backend.device), inplace=True)


def test_label_of_zero_probability_gives_infinite_loss_and_finite_gradient(backend: Any) -> None:
    """The shift of a label that is -inf is 0, at which exp(-200) is 0."""
    logits = torch.full((1, 50), -200.0)
    logits[0, 1] = -math.inf
    logits = logits.to(backend.device).requires_grad_()
    found = cross_entropy(logits, torch.tensor([1], device=backend.device), reduction="none", outputs=("entropy",))
    found.loss.sum().backward()
    assert bool(found.loss.isinf().all())
    torch.testing.assert_close(found.entropy, torch.full_like(found.entropy, math.log(49)))
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("view", ["expanded", "unfolded"])
def test_inplace_on_logits_that_overlap_is_refused(view: str, backend: Any) -> None:
    base = torch.randn(1, 65, device=backend.device, requires_grad=True) * 1.0
    logits = base[:, :50].expand(4, 50) if view == "expanded" else base[0].unfold(0, 50, 5)
    with pytest.raises(OptionError, match="overlap"):
        cross_entropy(logits, torch.tensor([1, 2, 3, 4], device=backend.device), inplace=True)


@pytest.mark.parametrize("options", [{"softcap": math.inf}, {"num_items": torch.tensor([3])}])
def test_option_without_meaning_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises((OptionError, ShapeError)):
        cross_entropy(torch.randn(4, 20), torch.arange(4), **options)


def test_labels_on_another_device_are_refused() -> None:
    with pytest.raises(ShapeError, match="target is on meta"):
        cross_entropy(torch.randn(4, 20), torch.arange(4, device="meta"))
