"""Liger's JSD, KL and TVD losses, of logits and of heads, against dense formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dense_losses import H, Inputs, V, compare, draw, largest_temporary, results
from torch import Tensor

from tigon.compat.liger.errors import FlagConflict
from tigon.compat.liger.loss_dtype import set_loss_dtype
from tigon.compat.liger.losses import divergences as d
from tigon.compat.liger.losses.distillation import LigerFusedLinearJSDLoss, liger_fused_linear_jsd
from tigon.errors import OptionError, ShapeError

N, G = 14, 7
TEACHER = draw(N, G, seed=5), draw(V, G, seed=6), draw(V, seed=7)
LABELS = torch.randint(V, (N,), generator=torch.Generator().manual_seed(8)).index_fill(0, torch.arange(0, N, 4), -100)
COUNTS = LABELS != -100
TOKENS = int(COUNTS.sum())


def student(*, bias: bool = False) -> Inputs:
    floats = [t.float().double() for t in (draw(N, H, seed=1), draw(V, H, seed=2, scale=0.7), draw(V, seed=3))]
    return Inputs(floats[0], floats[1], floats[2] if bias else None, LABELS)


def log_p(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.log_softmax(logits / temperature, -1)


def logits_of(data: Inputs) -> Tensor:
    logits = data.hidden @ data.weight.t()
    return logits if data.bias is None else logits + data.bias


def teacher_logits(dtype: torch.dtype, bias: bool) -> Tensor:
    hidden, weight, offset = (t.to(dtype) for t in TEACHER)
    return hidden @ weight.t() + (offset if bias else 0.0)


def dense_jsd(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """(N,) generalized Jensen-Shannon divergence with the teacher's share beta."""
    s, t = log_s.exp(), log_t.exp()
    if beta == 0:
        return (t * (log_t - log_s)).sum(-1)
    if beta == 1:
        return (s * (log_s - log_t)).sum(-1)
    log_m = (beta * t + (1 - beta) * s).log()
    return beta * (t * (log_t - log_m)).sum(-1) + (1 - beta) * (s * (log_s - log_m)).sum(-1)


def mean(per_token: Tensor) -> Tensor:
    return per_token[COUNTS].sum() / TOKENS


@pytest.fixture(params=["one block", "blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops over blocks with one block, and with many whose last one is shorter."""
    if request.param == "blocks":
        monkeypatch.setattr(d, "BLOCK_BYTES", 4 * V * 4)


def frozen(dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    hidden, weight, offset = (t.to(dtype) for t in TEACHER)
    return hidden, weight, offset if bias else None


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("bias", "hard", "temperature"), [(True, 0.4, 2.0), (False, 0.0, 1.0)])
def test_jsd_of_heads_with_the_loss_on_labels_is_the_formula(
    beta: float, bias: bool, hard: float, temperature: float
) -> None:
    loss = LigerFusedLinearJSDLoss(hard, 0.6, beta, temperature=temperature, return_soft_hard_loss=True)

    def ours(s: Inputs) -> Any:
        hidden, weight, offset = frozen(s.hidden.dtype, bias)
        return loss(s.hidden, s.weight, hidden, weight, s.labels, s.bias, offset)

    def formula(s: Inputs) -> Any:
        z = logits_of(s)
        soft = mean(dense_jsd(log_p(z, temperature), log_p(teacher_logits(z.dtype, bias), temperature), beta))
        nll = -log_p(z)[COUNTS].gather(1, LABELS[COUNTS].unsqueeze(1)).sum() / TOKENS
        return hard * nll + 0.6 * soft, soft, nll

    compare(ours, formula, student(bias=bias))


def test_rows_that_only_a_padded_teacher_has_are_left_out() -> None:
    """Liger gives the student the logit 0 there: a constant on all logits, which no probability sees, changes it."""
    s = student(bias=True)
    padded = torch.cat([TEACHER[1], draw(9, G, seed=11)])
    offset = torch.cat([TEACHER[2], draw(9, seed=12)])
    assert s.bias is not None
    loss = LigerFusedLinearJSDLoss(0.0, 1.0)
    wanted = loss(s.hidden, s.weight, *TEACHER[:2], LABELS, s.bias, TEACHER[2])
    torch.testing.assert_close(loss(s.hidden, s.weight, TEACHER[0], padded, LABELS, s.bias, offset), wanted)
    moved = loss(s.hidden, s.weight, TEACHER[0], padded, LABELS, s.bias + 3.0, offset)
    torch.testing.assert_close(moved, wanted)


def test_bf16_jsd_of_heads_is_as_accurate_as_its_logits() -> None:
    """Liger takes the log-softmax of bf16 logits in bf16."""
    s = student().to(torch.bfloat16)
    exact = s.to(torch.float64)
    hidden, weight, _ = frozen(torch.bfloat16, False)

    def call(x: Inputs) -> Any:
        return LigerFusedLinearJSDLoss(0.0, 1.0)(
            x.hidden, x.weight, hidden.to(x.hidden.dtype), weight.to(x.hidden.dtype), LABELS
        )

    truth, found = results(call, exact, torch.float64)[0], results(call, s, torch.bfloat16)[0]
    z, t = s.hidden @ s.weight.t(), hidden @ weight.t()
    in_bf16 = mean(dense_jsd(torch.log_softmax(z, -1), torch.log_softmax(t, -1), 0.5)).double()
    assert abs(found - truth) < 0.3 * abs(in_bf16 - truth)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_of_log_probabilities_is_the_formula(blocks: None, beta: float) -> None:
    compare(
        lambda s: d.LigerJSD(beta)(log_p(logits_of(s)), log_p(teacher_logits(s.hidden.dtype, True)), LABELS),
        lambda s: mean(dense_jsd(log_p(logits_of(s)), log_p(teacher_logits(s.hidden.dtype, True)), beta)),
        student(),
    )


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("log_target", [True, False])
def test_kl_of_log_probabilities_is_pytorchs(blocks: None, reduction: str, log_target: bool) -> None:
    weight = draw(N, V, seed=30) if reduction == "none" else torch.ones((), dtype=torch.float64)

    def target(dtype: torch.dtype) -> Tensor:
        log_t = log_p(teacher_logits(dtype, True))
        return log_t if log_target else log_t.exp().masked_fill(log_t < -4, 0.0)

    def call(loss: Any) -> Any:
        return lambda s: (loss(log_p(logits_of(s)), target(s.hidden.dtype)) * weight.to(s.hidden.dtype)).sum()

    compare(
        call(d.LigerKLDIVLoss(1e-10, reduction=reduction, log_target=log_target)),
        call(torch.nn.KLDivLoss(reduction=reduction, log_target=log_target)),
        student(),
    )


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("labels", [None, LABELS])
def test_total_variation_is_the_formula(blocks: None, reduction: str, labels: Tensor | None) -> None:
    weight = draw(N, V, seed=30) if reduction == "none" else torch.ones((), dtype=torch.float64)
    rows = N if labels is None else TOKENS

    def formula(s: Inputs) -> Any:
        distance = 0.5 * (log_p(logits_of(s)).exp() - log_p(teacher_logits(s.hidden.dtype, True)).exp()).abs()
        if labels is not None:
            distance = distance * COUNTS.unsqueeze(1)
        if reduction == "none":
            return (distance * weight.to(distance.dtype)).sum()
        return distance.sum() / {"sum": 1, "mean": rows * V, "batchmean": rows}[reduction]

    def ours(s: Inputs) -> Any:
        found = d.LigerTVDLoss(reduction)(
            log_p(logits_of(s)).exp(), log_p(teacher_logits(s.hidden.dtype, True)).exp(), labels
        )
        return (found * weight.to(found.dtype)).sum()

    compare(ours, formula, student())


@pytest.mark.parametrize(("beta", "temperature", "labels"), [(0.5, 1.0, LABELS), (0.1, 2.0, None), (1.0, 0.7, LABELS)])
def test_fused_linear_jsd_is_the_formula(beta: float, temperature: float, labels: Tensor | None) -> None:
    def formula(s: Inputs) -> Any:
        log_s, log_t = log_p(logits_of(s), temperature), log_p(teacher_logits(s.hidden.dtype, False), temperature)
        per_token = dense_jsd(log_s, log_t, beta)
        return per_token.mean() if labels is None else mean(per_token)

    loss = d.LigerFusedLinearJSD(beta, temperature=temperature)
    compare(lambda s: loss(s.hidden, s.weight, *frozen(s.hidden.dtype, False)[:2], labels), formula, student())


def test_batch_without_labels_gives_0_and_ignored_rows_may_be_nan() -> None:
    """Liger divides by the number of labels, which is 0."""
    none = torch.full((N,), -100)
    s = student()
    target = log_p(teacher_logits(torch.float64, True))
    calls = {
        "jsd": lambda x, y: d.liger_jsd(log_p(logits_of(x)), target, y),
        "tvd": lambda x, y: d.liger_tvd(log_p(logits_of(x)).exp(), target.exp(), y),
        "linear jsd": lambda x, y: d.liger_fused_linear_jsd(x.hidden, x.weight, *TEACHER[:2], y),
        "chunked jsd": lambda x, y: liger_fused_linear_jsd(
            x.hidden, x.weight, *TEACHER[:2], y, None, None
        ),
    }  # fmt: skip
    broken = s._replace(hidden=s.hidden.masked_fill(~COUNTS.unsqueeze(1), math.nan))
    for name, call in calls.items():
        assert all(not value.any() for value in results(lambda x, c=call: c(x, none), s, torch.float64)), name
        loss, _, dweight = results(lambda x, c=call: c(x, LABELS), broken, torch.float64)
        wanted, _, wanted_dweight = results(lambda x, c=call: c(x, LABELS), s, torch.float64)
        torch.testing.assert_close(loss, wanted, msg=name)
        if name in ("linear jsd", "chunked jsd"):
            torch.testing.assert_close(dweight, wanted_dweight, msg=name)


def test_teacher_gets_no_gradient_and_inputs_are_not_written_to() -> None:
    s, leaves = student(), [t.clone().requires_grad_() for t in TEACHER[:2]]
    copies = [t.detach().clone() for t in (s.hidden, s.weight, *leaves)]
    hidden = s.hidden.clone().requires_grad_()
    for loss in (
        d.LigerFusedLinearJSD()(hidden, s.weight, *leaves, LABELS),
        d.LigerJSD()(log_p(hidden @ s.weight.t()), log_p(leaves[0] @ leaves[1].t())),
    ):
        loss.backward()
    assert all(leaf.grad is None for leaf in leaves)
    for tensor, copy in zip((s.hidden, s.weight, *leaves), copies, strict=True):
        assert torch.equal(tensor, copy)


def test_second_backward_gives_the_same_gradient() -> None:
    s = student()
    target = log_p(teacher_logits(torch.float64, True))
    leaf = log_p(logits_of(s)).requires_grad_()
    loss = d.liger_jsd(leaf, target, LABELS)
    first, second = (torch.autograd.grad(loss, leaf, torch.tensor(g), retain_graph=True)[0] for g in (3.0, 1.0))
    torch.testing.assert_close(first, 3 * second)


def test_losses_of_rows_make_no_temporary_of_the_whole_size(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, tokens = 3000, 40
    monkeypatch.setattr(d, "BLOCK_BYTES", 4 * 4 * vocab)
    log_q, log_t = (log_p(draw(tokens, vocab, seed=n)).float().requires_grad_() for n in (1, 2))
    assert largest_temporary(lambda: d.liger_jsd(log_q, log_t)) == 4 * vocab


def test_loss_dtype_option_reaches_these_losses() -> None:
    log_q, log_t = (log_p(draw(4, 9, seed=n)).to(torch.bfloat16) for n in (1, 2))
    try:
        for choice, jsd, kl in (("fp32", 4, 4), ("liger", 2, 4), ("logits", 2, 2)):
            set_loss_dtype(choice)
            assert d.liger_jsd(log_q, log_t).element_size() == jsd
            assert d.liger_kl_div(log_q, log_t, log_target=True).element_size() == kl
    finally:
        set_loss_dtype("fp32")


def test_wrong_input_is_refused_by_name() -> None:
    x = log_p(draw(4, 9, seed=1))
    for call, error, words in (
        (lambda: d.liger_jsd(x, x[:3]), ShapeError, r"both must be \(N, V\)"),
        (lambda: d.liger_jsd(x, x, torch.zeros(3)), FlagConflict, "the shape of shift_labels must be"),
        (lambda: d.liger_tvd(x, x, reduction="average"), OptionError, "choose one of none, sum, mean, batchmean"),
        (lambda: d.liger_kl_div(x, x, size_average=False), OptionError, "use reduction"),
        (lambda: d.LigerJSDFunction.apply(x, x, None, 0.5, -100, "cutile"), OptionError, "Liger's backends"),
        (lambda: d.LigerFusedLinearJSD(temperature=0), FlagConflict, "temperature=0"),
        (lambda: LigerFusedLinearJSDLoss(temperature=0), FlagConflict, "temperature=0"),
        (lambda: LigerFusedLinearJSDLoss()(x, x, x, x, torch.zeros(5)), ShapeError, "student_input is"),
    ):
        with pytest.raises(error, match=words):
            call()
