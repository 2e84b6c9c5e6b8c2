"""Liger's JSD, KL, TVD, CE with TVD and cosine losses, of logits and of heads, against dense formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dense_losses import H, Inputs, V, compare, draw, largest_temporary, results
from torch import Tensor

from tigon.compat.liger.chunked_loss import cosine_similarity, functional
from tigon.compat.liger.chunked_loss.modules import LigerFusedLinearCosineSimilarityLoss, LigerFusedLinearJSDLoss
from tigon.compat.liger.errors import FlagConflict
from tigon.compat.liger.ops import divergences as d
from tigon.compat.liger.ops import losses, row_blocks, target_kl
from tigon.compat.liger.transformers import divergences as modules
from tigon.compat.liger.transformers import functional as f
from tigon.errors import DoubleBackwardError, OptionError, ShapeError

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
        monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 4 * V * 4)
        monkeypatch.setattr(target_kl, "BLOCK_BYTES", 4 * V * 4)
        monkeypatch.setattr(cosine_similarity, "BLOCK_ROWS", 5)


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


@pytest.mark.parametrize(("bias", "hard"), [(True, 0.4), (False, 0.0)])
def test_cosine_of_heads_is_the_formula_without_logits(blocks: None, bias: bool, hard: float) -> None:
    loss = LigerFusedLinearCosineSimilarityLoss(hard, 0.6, 0.5)

    def ours(s: Inputs) -> Any:
        hidden, weight, offset = frozen(s.hidden.dtype, bias)
        return loss(s.hidden, s.weight, hidden, weight, s.labels, s.bias, offset)

    def formula(s: Inputs) -> Any:
        z, t = logits_of(s), teacher_logits(s.hidden.dtype, bias)
        soft = mean(0.5 * (1 - (z * t).sum(-1) / (z.square().sum(-1).sqrt() * t.square().sum(-1).sqrt())))
        nll = -log_p(z)[COUNTS].gather(1, LABELS[COUNTS].unsqueeze(1)).sum() / TOKENS
        return hard * nll + 0.6 * soft

    compare(ours, formula, student(bias=bias))


@pytest.mark.parametrize("zero", ["student", "teacher", "both"])
def test_cosine_of_logits_that_are_all_zero_is_pytorchs(zero: str) -> None:
    s, t = draw(N, H, seed=1), TEACHER[0].clone()
    for name, hidden in (("student", s), ("teacher", t)):
        if zero in (name, "both"):
            hidden[3] = 0.0
    weight, hidden = draw(V, H, seed=2), s.requires_grad_()
    head = cosine_similarity.Head
    ours = cosine_similarity.cosine_of_logits(head(hidden, weight, None), head(t, TEACHER[1], None), COUNTS)
    wanted = torch.cosine_similarity(hidden @ weight.t(), t @ TEACHER[1].t())[COUNTS]
    torch.testing.assert_close(ours[COUNTS], wanted)
    for got, want in zip(*(torch.autograd.grad(x.sum(), hidden) for x in (ours[COUNTS], wanted)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("loss_class", [LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss])
def test_rows_that_only_a_padded_teacher_has_are_left_out(loss_class: Any) -> None:
    """Liger gives the student the logit 0 there: a constant on all logits, which no probability sees, changes it."""
    s = student(bias=True)
    padded = torch.cat([TEACHER[1], draw(9, G, seed=11)])
    offset = torch.cat([TEACHER[2], draw(9, seed=12)])
    assert s.bias is not None
    loss = loss_class(0.0, 1.0)
    wanted = loss(s.hidden, s.weight, *TEACHER[:2], LABELS, s.bias, TEACHER[2])
    torch.testing.assert_close(loss(s.hidden, s.weight, TEACHER[0], padded, LABELS, s.bias, offset), wanted)
    if loss_class is LigerFusedLinearJSDLoss:
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
        lambda s: modules.LigerJSD(beta)(log_p(logits_of(s)), log_p(teacher_logits(s.hidden.dtype, True)), LABELS),
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
        call(modules.LigerKLDIVLoss(1e-10, reduction=reduction, log_target=log_target)),
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
        found = modules.LigerTVDLoss(reduction)(
            log_p(logits_of(s)).exp(), log_p(teacher_logits(s.hidden.dtype, True)).exp(), labels
        )
        return (found * weight.to(found.dtype)).sum()

    compare(ours, formula, student())


def test_cross_entropy_with_total_variation_is_the_formula_for_any_upstream_gradient(blocks: None) -> None:
    ce_weight, tvd_weight = draw(N, seed=31), draw(N, seed=32)

    def total(ce: Tensor, tvd: Tensor) -> Any:
        return (ce * ce_weight.to(ce.dtype) + tvd * tvd_weight.to(ce.dtype)).sum(), ce, tvd

    def formula(s: Inputs) -> Any:
        log_s, log_t = log_p(logits_of(s)), log_p(teacher_logits(s.hidden.dtype, True))
        ce = -log_s.gather(1, LABELS.clamp(min=0).unsqueeze(1)).squeeze(1) * COUNTS
        return total(ce, 0.5 * (log_s.exp() - log_t.exp()).abs().sum(-1) * COUNTS)

    compare(
        lambda s: total(*modules.LigerFusedCETVDLoss()(logits_of(s), teacher_logits(s.hidden.dtype, True), LABELS)),
        formula,
        student(),
    )


@pytest.mark.parametrize(("beta", "temperature", "labels"), [(0.5, 1.0, LABELS), (0.1, 2.0, None), (1.0, 0.7, LABELS)])
def test_fused_linear_jsd_is_the_formula(beta: float, temperature: float, labels: Tensor | None) -> None:
    def formula(s: Inputs) -> Any:
        log_s, log_t = log_p(logits_of(s), temperature), log_p(teacher_logits(s.hidden.dtype, False), temperature)
        per_token = dense_jsd(log_s, log_t, beta)
        return per_token.mean() if labels is None else mean(per_token)

    loss = modules.LigerFusedLinearJSD(beta, temperature=temperature)
    compare(lambda s: loss(s.hidden, s.weight, *frozen(s.hidden.dtype, False)[:2], labels), formula, student())


@pytest.mark.parametrize("reduction", ["sum", "mean", "batchmean"])
@pytest.mark.parametrize(("temperature", "labels"), [(1.0, LABELS), (1.5, None)])
def test_fused_linear_kl_to_given_probabilities_is_the_formula(
    blocks: None, reduction: str, temperature: float, labels: Tensor | None
) -> None:
    # Some probabilities are 0, and rows need not sum to 1.
    target = (draw(N, V, seed=33) * 2).softmax(-1)
    target = target.masked_fill(target < 0.01, 0.0)
    rows = N if labels is None else TOKENS

    def formula(s: Inputs) -> Any:
        q = target.to(s.hidden.dtype)
        kl = torch.where(q > 0, q * (q.clamp(min=1e-10).log() - log_p(logits_of(s), temperature)), 0.0)
        kl = kl if labels is None else kl[COUNTS]
        return kl.sum() / {"sum": 1, "mean": rows * V, "batchmean": rows}[reduction]

    loss = modules.LigerFusedLinearKLDivLoss(reduction, temperature=temperature)
    compare(lambda s: loss(s.hidden, s.weight, target.to(s.hidden.dtype), labels), formula, student())


def test_batch_without_labels_gives_0_and_ignored_rows_may_be_nan() -> None:
    """Liger divides by the number of labels, which is 0."""
    none = torch.full((N,), -100)
    s = student()
    target = log_p(teacher_logits(torch.float64, True))
    calls = {
        "jsd": lambda x, y: f.liger_jsd(log_p(logits_of(x)), target, y),
        "tvd": lambda x, y: f.liger_tvd(log_p(logits_of(x)).exp(), target.exp(), y),
        "linear jsd": lambda x, y: f.liger_fused_linear_jsd(x.hidden, x.weight, *TEACHER[:2], y),
        "linear kl": lambda x, y: f.liger_fused_linear_kl_div(x.hidden, x.weight, target.exp(), y),
        "chunked jsd": lambda x, y: functional.liger_fused_linear_jsd(
            x.hidden, x.weight, *TEACHER[:2], y, None, None
        ),
        "cosine": lambda x, y: functional.liger_fused_linear_cosine(x.hidden, x.weight, *TEACHER[:2], y, None, None),
    }  # fmt: skip
    broken = s._replace(hidden=s.hidden.masked_fill(~COUNTS.unsqueeze(1), math.nan))
    for name, call in calls.items():
        assert all(not value.any() for value in results(lambda x, c=call: c(x, none), s, torch.float64)), name
        loss, _, dweight = results(lambda x, c=call: c(x, LABELS), broken, torch.float64)
        wanted, _, wanted_dweight = results(lambda x, c=call: c(x, LABELS), s, torch.float64)
        torch.testing.assert_close(loss, wanted, msg=name)
        if "linear" in name or name in ("chunked jsd", "cosine"):
            torch.testing.assert_close(dweight, wanted_dweight, msg=name)


def test_teacher_gets_no_gradient_and_inputs_are_not_written_to() -> None:
    s, leaves = student(), [t.clone().requires_grad_() for t in TEACHER[:2]]
    copies = [t.detach().clone() for t in (s.hidden, s.weight, *leaves)]
    hidden = s.hidden.clone().requires_grad_()
    for loss in (
        modules.LigerFusedLinearJSD()(hidden, s.weight, *leaves, LABELS),
        LigerFusedLinearCosineSimilarityLoss()(hidden, s.weight, *leaves, LABELS),
        modules.LigerJSD()(log_p(hidden @ s.weight.t()), log_p(leaves[0] @ leaves[1].t())),
    ):
        loss.backward()
    assert all(leaf.grad is None for leaf in leaves)
    for tensor, copy in zip((s.hidden, s.weight, *leaves), copies, strict=True):
        assert torch.equal(tensor, copy)


def test_second_backward_gives_the_same_gradient_and_a_second_derivative_is_refused() -> None:
    s = student()
    target = log_p(teacher_logits(torch.float64, True))
    leaf = log_p(logits_of(s)).requires_grad_()
    loss = f.liger_jsd(leaf, target, LABELS)
    first, second = (torch.autograd.grad(loss, leaf, torch.tensor(g), retain_graph=True)[0] for g in (3.0, 1.0))
    torch.testing.assert_close(first, 3 * second)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(f.liger_jsd(leaf, target), leaf, create_graph=True)


def test_losses_of_heads_make_no_tensor_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, tokens = 3000, 40
    monkeypatch.setattr(target_kl, "BLOCK_BYTES", 4 * vocab)
    hidden = draw(tokens, H, seed=1).float().requires_grad_()
    weight = draw(vocab, H, seed=2).float().requires_grad_()
    teacher = draw(tokens, G, seed=3).float(), draw(vocab, G, seed=4).float()
    labels, target = torch.randint(vocab, (tokens,)), torch.full((tokens, vocab), 1 / vocab)
    kl = modules.LigerFusedLinearKLDivLoss()
    assert largest_temporary(lambda: kl(hidden, weight, target, None).backward()) < tokens * vocab
    angle = LigerFusedLinearCosineSimilarityLoss(0.0)
    assert largest_temporary(lambda: angle(hidden, weight, *teacher, labels).backward()) < tokens * vocab


def test_loss_dtype_option_reaches_these_losses() -> None:
    log_q, log_t = (log_p(draw(4, 9, seed=n)).to(torch.bfloat16) for n in (1, 2))
    try:
        for choice, jsd, kl in (("fp32", 4, 4), ("liger", 2, 4), ("logits", 2, 2)):
            losses.set_loss_dtype(choice)
            assert f.liger_jsd(log_q, log_t).element_size() == jsd
            assert f.liger_kl_div(log_q, log_t, log_target=True).element_size() == kl
    finally:
        losses.set_loss_dtype("fp32")


def test_wrong_input_is_refused_by_name() -> None:
    x = log_p(draw(4, 9, seed=1))
    for call, error, words in (
        (lambda: f.liger_jsd(x, x[:3]), ShapeError, r"both must be \(N, V\)"),
        (lambda: f.liger_jsd(x, x, torch.zeros(3)), FlagConflict, "the shape of shift_labels must be"),
        (lambda: f.liger_tvd(x, x, reduction="average"), OptionError, "choose one of none, sum, mean, batchmean"),
        (lambda: f.liger_kl_div(x, x, size_average=False), OptionError, "use reduction"),
        (lambda: f.liger_fused_linear_kl_div(x, x, x, reduction="none"), OptionError, "choose one of sum, mean"),
        (lambda: f.liger_fused_linear_kl_div(x, x, x), ShapeError, "a probability per token and id"),
        (lambda: d.LigerJSDFunction.apply(x, x, None, 0.5, -100, "cutile"), OptionError, "Liger's backends"),
        (lambda: modules.LigerFusedLinearJSD(temperature=0), FlagConflict, "temperature=0"),
        (lambda: LigerFusedLinearJSDLoss(temperature=0), FlagConflict, "temperature=0"),
        (lambda: LigerFusedLinearJSDLoss()(x, x, x, x, torch.zeros(5)), ShapeError, "student_input is"),
        (lambda: modules.LigerFusedCETVDLoss()(x, x, torch.zeros(5)), ShapeError, "target is"),
    ):
        with pytest.raises(error, match=words):
            call()
