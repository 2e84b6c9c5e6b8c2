"""Liger's DPO, CPO, SimPO, ORPO and KTO against dense log-probabilities: losses, all results, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_losses import H, Inputs, T, V, compare, draw, inputs, largest_temporary, logits_of, results, token_logps
from torch import Tensor

from tigon import losses
from tigon.compat.liger.errors import FlagConflict
from tigon.compat.liger.losses import preference as modules
from tigon.compat.liger.losses.kto import LigerFusedLinearKTOLoss, liger_fused_linear_kto
from tigon.compat.liger.losses.preference import DPO_LOSS_TYPES
from tigon.errors import DtypeError, LabelError, OptionError, ShapeError
from tigon.ops.head.inputs import default_chunk_bytes

BETA, ALPHA, SMOOTHING, TAU = 0.3, 0.7, 0.1, 0.5
PAIRS = 3


def sequence(data: Inputs, labels: Tensor, ignore_index: int, average: bool) -> list[Tensor]:
    """The log-probability of each sequence."""
    counts = (labels != ignore_index).sum(-1)
    sums = token_logps(data, labels, ignore_index).sum(-1)
    return list(sums / counts if average else sums)


def mean_logits(data: Inputs) -> tuple[Tensor, Tensor]:
    logits = logits_of(*data[:3]).detach()
    return logits[:PAIRS].mean(), logits[PAIRS:].mean()


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def nll_of(data: Inputs, labels: Tensor, ignore_index: int) -> Tensor:
    chosen = labels[:PAIRS]
    return -token_logps(data, labels, ignore_index)[:PAIRS].sum() / (chosen != ignore_index).sum()


def returned(data: Inputs, pairs: Any, logps: list[Tensor], nll: Tensor, alpha: float = ALPHA) -> tuple[Tensor, ...]:
    """What Liger returns of a loss per pair, whose formula tests/losses proves."""
    values = torch.stack(logps).detach()
    return (
        pairs.loss.mean() + alpha * nll, values[:PAIRS], values[PAIRS:], *mean_logits(data), nll,
        pairs.chosen_rewards, pairs.rejected_rewards,
    )  # fmt: skip


def dense_dpo(data: Inputs, ref: Inputs | None, kind: Any, *, average: bool, nll: bool, ignore: int, e: float) -> Any:
    logps = sequence(data, data.labels, ignore, average)
    theirs = None if ref is None else torch.stack(sequence(ref, data.labels, ignore, average)).to(data.hidden)
    before = () if theirs is None else theirs.split(PAIRS)
    pairs = losses.dpo(
        *torch.stack(logps).split(PAIRS), *before, loss_type=kind, beta=BETA, label_smoothing=e, discopop_tau=TAU,
        reference_free=ref is None,
    )  # fmt: skip
    likelihood = nll_of(data, data.labels, ignore) if nll else torch.zeros((), dtype=pairs.loss.dtype)
    return returned(data, pairs, logps, likelihood)


@pytest.mark.parametrize("kind", DPO_LOSS_TYPES)
@pytest.mark.parametrize(
    ("average", "nll", "bias", "reference", "ignore"),
    [(False, False, False, True, -100), (True, True, True, True, 5), (False, True, True, False, -100)],
)
def test_dpo_and_its_variants_are_the_formulas(
    kind: Any, average: bool, nll: bool, bias: bool, reference: bool, ignore: int
) -> None:
    data = inputs(2 * PAIRS, bias=bias, ignore_index=ignore)
    ref = inputs(2 * PAIRS, bias=bias, seed=40) if reference else None
    e = SMOOTHING if kind in ("sigmoid", "exo_pair", "robust") else 0.0
    loss = modules.LigerFusedLinearDPOLoss(
        ignore, BETA, ALPHA, nll, use_ref_model=reference, average_log_prob=average, loss_type=kind,
        label_smoothing=e, discopop_tau=TAU,
    )  # fmt: skip

    def ours(d: Inputs) -> Any:
        tensors = () if ref is None else ref.to(d.hidden.dtype)[:3]
        return loss(d.weight, d.hidden, d.labels, d.bias, *tensors)

    compare(ours, lambda d: dense_dpo(d, ref, kind, average=average, nll=nll, ignore=ignore, e=e), data)


@pytest.mark.parametrize(("average", "e", "bias"), [(False, 0.0, False), (True, SMOOTHING, True)])
def test_cpo_is_the_formula(average: bool, e: float, bias: bool) -> None:
    data = inputs(2 * PAIRS, bias=bias)
    loss = modules.LigerFusedLinearCPOLoss(-100, BETA, ALPHA, e, average_log_prob=average)
    compare(
        lambda d: loss(d.weight, d.hidden, d.labels, d.bias),
        lambda d: dense_dpo(d, None, "sigmoid", average=average, nll=True, ignore=-100, e=e),
        data,
    )


@pytest.mark.parametrize(("e", "bias", "nll"), [(0.0, False, False), (SMOOTHING, True, True)])
def test_simpo_is_the_formula(e: float, bias: bool, nll: bool) -> None:
    beta, gamma = 1.3, 0.4
    loss = modules.LigerFusedLinearSimPOLoss(-100, beta, ALPHA, e, nll, gamma=gamma)

    def formula(d: Inputs) -> Any:
        logps = sequence(d, d.labels, -100, True)
        pairs = losses.simpo(*torch.stack(logps).split(PAIRS), beta=beta, gamma=gamma, label_smoothing=e)
        likelihood = nll_of(d, d.labels, -100) if nll else torch.zeros((), dtype=pairs.loss.dtype)
        return returned(d, pairs, logps, likelihood)

    compare(lambda d: loss(d.weight, d.hidden, d.labels, d.bias), formula, inputs(2 * PAIRS, bias=bias))


@pytest.mark.parametrize(
    ("bias", "nll", "other_target"), [(False, True, False), (True, True, True), (True, False, False)]
)
def test_orpo_is_the_formula(bias: bool, nll: bool, other_target: bool) -> None:
    data = inputs(2 * PAIRS, bias=bias)
    other = inputs(2 * PAIRS, bias=bias, seed=70).labels if other_target else None
    loss = modules.LigerFusedLinearORPOLoss(-100, BETA, nll)

    def formula(d: Inputs) -> Any:
        logps = sequence(d, d.labels, -100, True)
        pairs = losses.orpo(*torch.stack(logps).split(PAIRS), beta=BETA)
        likelihood = nll_of(d, d.labels if other is None else other, -100) if nll else pairs.loss.new_zeros(())
        return *returned(d, pairs, logps, likelihood, 1.0), pairs.log_odds_ratio.mean(), pairs.log_odds.mean()

    compare(lambda d: loss(d.weight, d.hidden, d.labels, d.bias, other), formula, data)


LABELS = torch.tensor([True, False, False, True, True])


def dense_kto(data: Inputs, ref: Inputs | None, kl: list[float], average: bool) -> Any:
    logps = sequence(data, data.labels, -100, average)
    before = [torch.zeros(())] * len(logps) if ref is None else sequence(ref, data.labels, -100, average)
    terms, ratios = [], []
    for place, (logp, ref_logp) in enumerate(zip(logps, before, strict=True)):
        ratio = logp - ref_logp.detach()
        margin = BETA * (ratio - kl[place])
        terms.append(1 - sigmoid(margin if LABELS[place] else -margin))
        ratios.append(ratio.detach())
    logits = logits_of(*data[:3]).detach()
    values, reward = torch.stack(logps).detach(), BETA * torch.stack(ratios)
    return (
        torch.stack(terms).mean(), values[LABELS].sum(), values[~LABELS].sum(), logits[LABELS].sum(),
        logits[~LABELS].sum(), reward[LABELS].sum(), reward[~LABELS].sum(),
    )  # fmt: skip


@pytest.mark.parametrize("kl", [None, [0.4], [0.4, 0.0, 1.3, 0.2, 0.7]])
@pytest.mark.parametrize(("reference", "bias", "average"), [(True, True, False), (False, False, True)])
def test_kto_is_the_formula_with_one_kl_or_one_per_sequence(
    kl: list[float] | None, reference: bool, bias: bool, average: bool
) -> None:
    data = inputs(5, bias=bias)
    ref = inputs(5, bias=bias, seed=40) if reference else None
    loss = LigerFusedLinearKTOLoss(beta=BETA, use_ref_model=reference, average_log_prob=average, chunk_size=1)

    def ours(d: Inputs) -> Any:
        tensors = (None, None, None) if ref is None else ref.to(d.hidden.dtype)[:3]
        kl_tensor = None if kl is None else torch.tensor(kl, dtype=torch.float64).to(d.hidden.dtype)
        return loss(d.hidden, d.weight, d.labels, d.bias, LABELS, *tensors, kl_tensor)

    shifts = [0.0] * 5 if kl is None else kl * (5 // len(kl))
    compare(ours, lambda d: dense_kto(d, ref, shifts, average), data)


def test_a_reference_that_is_passed_counts_with_a_warning_even_without_use_ref_model() -> None:
    """Liger's KTO module ignores it by default, as it happens to trainers that train adapters."""
    data, ref = inputs(5, bias=False), inputs(5, bias=False, seed=40)
    arguments = (data.hidden, data.weight, data.labels, None, LABELS, ref.hidden, ref.weight)
    with pytest.warns(UserWarning, match="use_ref_model=False, but ref_input is passed"):
        found, _ = LigerFusedLinearKTOLoss(beta=BETA)(*arguments)
    torch.testing.assert_close(found, dense_kto(data, ref, [0.0] * 5, False)[0])
    pairs, ref_pairs = inputs(6, bias=False), inputs(6, bias=False, seed=40)
    with pytest.warns(UserWarning, match="use_ref_model=False"):
        found, _ = modules.LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=False)(
            pairs.weight, pairs.hidden, pairs.labels, None, ref_pairs.hidden, ref_pairs.weight
        )
    wanted = dense_dpo(pairs, ref_pairs, "sigmoid", average=False, nll=False, ignore=-100, e=0.0)[0]
    torch.testing.assert_close(found, wanted)


def test_label_smoothing_changes_the_sigmoid_loss_and_is_refused_where_it_has_no_meaning() -> None:
    data = inputs(6, bias=False)
    call = (data.weight, data.hidden, data.labels)
    plain, smooth = (
        modules.LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=False, label_smoothing=e)(*call)[0] for e in (0.0, 0.2)
    )
    assert abs(float(plain - smooth)) > 1e-3
    with pytest.raises(OptionError, match="does not apply to loss_type='hinge'"):
        modules.LigerFusedLinearDPOLoss(loss_type="hinge", label_smoothing=0.2)


def test_gradient_of_a_bf16_head_does_not_depend_on_the_number_of_sequences_per_chunk() -> None:
    """Liger sums the weight's gradient in bf16, chunk by chunk: the error grows with the batch."""
    data = inputs(64, bias=False)
    truth = results(lambda d: dpo_loss(d, 1), data, torch.float64)[-1]
    errors = []
    for chunk in (1, 16):
        found = results(lambda d, chunk=chunk: dpo_loss(d, chunk), data, torch.bfloat16)[-1]
        errors.append(float((found - truth).norm() / truth.norm()))
    assert errors[0] == errors[1] < 0.01


def dpo_loss(data: Inputs, chunk_size: int) -> Any:
    loss = modules.LigerFusedLinearDPOLoss(use_ref_model=False, average_log_prob=True, chunk_size=chunk_size)
    return loss(data.weight, data.hidden, data.labels)[0]


def test_sequences_without_labels_give_finite_losses_and_gradients() -> None:
    data = inputs(6, bias=True)
    data.labels[0] = data.labels[4] = -100
    for loss in (
        modules.LigerFusedLinearORPOLoss(), modules.LigerFusedLinearSimPOLoss(),
        modules.LigerFusedLinearCPOLoss(average_log_prob=True), modules.LigerFusedLinearDPOLoss(use_ref_model=False),
    ):  # fmt: skip
        found = results(lambda d, loss=loss: loss(d.weight, d.hidden, d.labels, d.bias), data, torch.float32)
        assert all(value.isfinite().all() for value in found), type(loss).__name__
    data.labels[:] = -100
    loss = LigerFusedLinearKTOLoss(average_log_prob=True)
    found = results(lambda d: loss(d.hidden, d.weight, d.labels, d.bias, torch.tensor([True] * 6)), data, torch.float32)
    assert all(value.isfinite().all() for value in found)


def test_no_tensor_of_all_logits_is_made() -> None:
    sequences, tokens, vocab = 4, 40, 5000
    hidden, weight = draw(sequences, tokens, H, seed=1).float(), draw(vocab, H, seed=2).float()
    labels = torch.randint(vocab, (sequences, tokens))
    block = default_chunk_bytes(hidden)[0] // 4
    hidden = hidden.repeat(1, 1 + 2 * block // (sequences * tokens * vocab), 1)
    labels = labels.repeat(1, hidden.shape[1] // tokens)
    loss = modules.LigerFusedLinearDPOLoss(use_ref_model=False, compute_nll_loss=True)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    found = largest_temporary(lambda: loss(leaves[1], leaves[0], labels)[0].backward())
    assert labels.numel() * vocab > 1.5 * block and found <= block


def test_functional_forms_take_the_functions_positional_arguments() -> None:
    data = inputs(6, bias=False)
    by_class, _ = modules.LigerFusedLinearDPOLoss(-100, BETA, use_ref_model=False)(
        data.weight, data.hidden, data.labels
    )
    by_function, _ = modules.liger_fused_linear_dpo(
        data.hidden, data.weight, data.labels, None, None, None, None, -100, BETA, False, True, False
    )
    assert torch.equal(by_class, by_function)
    by_class, _ = LigerFusedLinearKTOLoss(-100, BETA)(data.hidden, data.weight, data.labels, None, LABELS6)
    by_function, _ = liger_fused_linear_kto(
        data.hidden, data.weight, data.labels, LABELS6, None, None, None, None, None, -100, BETA, True, False
    )
    assert torch.equal(by_class, by_function)


LABELS6 = torch.tensor([True, False] * 3)


def test_wrong_input_is_refused_by_name() -> None:
    data = inputs(6, bias=False)
    dpo, kto = modules.LigerFusedLinearDPOLoss, LigerFusedLinearKTOLoss
    for kind in ("ipo", "sigmoid_norm", "nonsense"):
        with pytest.raises(OptionError, match="Unsupported loss_type"):
            dpo(loss_type=kind)
    with pytest.raises(OptionError, match="whose paper recommends 1e-3"):
        dpo(loss_type="exo_pair")
    with pytest.raises(FlagConflict, match="requires ref_input and ref_weight"):
        dpo()(data.weight, data.hidden, data.labels)
    with pytest.raises(FlagConflict, match="requires ref_weight"):
        dpo()(data.weight, data.hidden, data.labels, None, data.hidden)
    with pytest.raises(ShapeError, match="as many rejected ones"):
        dpo(use_ref_model=False)(data.weight, data.hidden[:5], data.labels[:5])
    with pytest.raises(ShapeError, match=r"pass \(B, T, H\) and \(B, T\)"):
        dpo(use_ref_model=False)(data.weight, data.hidden.flatten(0, 1), data.labels.flatten())
    with pytest.raises(ShapeError, match="nll_target"):
        modules.LigerFusedLinearORPOLoss()(data.weight, data.hidden, data.labels, None, data.labels[:3])
    with pytest.raises(LabelError):
        dpo(use_ref_model=False)(data.weight, data.hidden, data.labels.masked_fill(data.labels > 0, V))
    with pytest.raises(FlagConflict, match="preference_labels is None"):
        kto()(data.hidden, data.weight, data.labels)
    with pytest.raises(DtypeError, match="pass bool"):
        kto()(data.hidden, data.weight, data.labels, None, torch.ones(6))
    with pytest.raises(ShapeError, match="kl is"):
        kto()(data.hidden, data.weight, data.labels, None, LABELS6, kl=torch.zeros(2))
    with pytest.raises(ShapeError, match="preference_labels is"):
        kto()(data.hidden, data.weight, data.labels, None, LABELS6[: T - 2])
