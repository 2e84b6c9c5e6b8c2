"""Liger's GRPO losses, from hidden states and from logits, against a formula that loops over sequences and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_losses import Inputs, T, V, compare, draw, inputs, results, token_logps
from torch import Tensor

import two_ranks
from tigon.compat.liger.errors import FlagConflict
from tigon.compat.liger.losses.grpo import (
    LigerFusedLinearGRPOLoss,
    fused_selective_log_softmax,
    liger_fused_linear_grpo,
    triton_grpo_loss,
)
from tigon.compat.liger.losses.policy import gamma_weights, tokens_of_step
from tigon.errors import OptionError, ShapeError

B = 4
LOW, HIGH, BETA, TEMPERATURE, DELTA, LONGEST = 0.2, 0.28, 0.2, 0.8, 1.6, 9
ADVANTAGES = torch.tensor([1.2, -0.8, 0.5, -1.4], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1]])
TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo", "vespo")
SMOOTH = ("cispo", "sapo", "vespo")
IS_RATIO = draw(B, T, seed=30).abs() + 0.3
SAPO, VESPO = (1.0, 1.05), ((2.0, 3.0), (3.0, 2.0))


def data_of(bias: bool) -> Inputs:
    data = inputs(B, bias=bias)
    return data._replace(labels=data.labels.clamp(min=0))


def before(data: Inputs) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the old model and of the reference, near the policy's."""
    logps = token_logps(data, data.labels, temperature=TEMPERATURE).detach()
    return logps + draw(B, T, seed=20, scale=0.4), logps + draw(B, T, seed=21, scale=0.4)


def dense_terms(
    logps: Tensor, old: Tensor | None, ref: Tensor | None, kind: str, level: str, *, delta: float | None,
    correct: bool, is_ratio: Tensor | None, beta: float = BETA,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, KL, clipped) of each token."""
    upper = 1.3 if kind == "cispo" else 1 + HIGH
    loss, kls, clipped = (torch.zeros(B, T, dtype=logps.dtype) for _ in range(3))
    for b in range(B):
        places = [t for t in range(T) if MASK[b, t]]
        log_ratios = {t: logps[b, t] - (logps[b, t].detach() if old is None else old[b, t]) for t in places}
        mean = sum(log_ratios.values()) / max(len(places), 1)
        A = ADVANTAGES[b].to(logps.dtype)
        for t in places:
            ratio = torch.exp(mean if level == "sequence" else log_ratios[t])
            w = 1.0 if is_ratio is None else is_ratio[b, t].to(logps.dtype)
            if kind == "cispo":
                value = -min(ratio.detach(), torch.tensor(upper, dtype=ratio.dtype)) * A * logps[b, t] * w
                clipped[b, t] = float(ratio > upper and A > 0)
            elif kind == "sapo":
                tau = SAPO[0] if A > 0 else SAPO[1]
                value = -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * A * w
            elif kind == "vespo":
                k, lam = VESPO[0] if A >= 0 else VESPO[1]
                total = float(sum(log_ratios.values()).detach())
                if is_ratio is not None:
                    total += float(sum(is_ratio[b, s].log() for s in places))
                value = -math.exp(k * total + lam - lam * math.exp(total)) * A * logps[b, t]
            else:
                one = ratio * A if delta is None else ratio.clamp(max=delta) * A
                value = -torch.minimum(one, ratio.clamp(1 - LOW, upper) * A) * w
                clipped[b, t] = float((ratio < 1 - LOW and A < 0) or (ratio > upper and A > 0))
            if ref is not None and beta:
                d = ref[b, t].to(logps.dtype) - logps[b, t]
                kl = torch.exp(d) - d - 1
                kls[b, t] = kl * ratio if correct else kl
                value = value + beta * kls[b, t]
            loss[b, t] = value
    return loss, kls.detach(), clipped


def reduced(loss: Tensor, kind: str, num_items: float | None) -> Tensor:
    lengths = MASK.sum(-1).clamp(min=1)
    if kind in ("grpo", "sapo"):
        return (loss.sum(-1) / lengths).mean()
    if kind == "dr_grpo":
        return loss.sum() / (B * LONGEST)
    if kind == "luspo":
        return loss.sum(-1).mean()
    return loss.sum() / (MASK.sum() if num_items is None else num_items)


def mean(values: Tensor) -> Tensor:
    return values.sum() / MASK.sum()


CASES = [(kind, level) for kind in TYPES for level in ("token", "sequence") if level == "token" or kind not in SMOOTH]


@pytest.mark.parametrize(("kind", "level"), CASES)
@pytest.mark.parametrize(
    ("bias", "old", "correct", "weighted", "num_items"),
    [(False, True, False, False, None), (True, True, True, True, 11), (True, False, False, True, None)],
)
def test_loss_metrics_and_gradients_are_the_formulas(
    kind: str, level: str, bias: bool, old: bool, correct: bool, weighted: bool, num_items: int | None
) -> None:
    data = data_of(bias)
    old_logps, ref_logps = before(data)
    delta = DELTA if correct and kind not in SMOOTH else None
    weights = IS_RATIO if weighted else None
    loss = LigerFusedLinearGRPOLoss(
        BETA, epsilon_low=LOW, epsilon_high=1.3 if kind == "cispo" else HIGH, loss_type=kind,
        max_completion_length=LONGEST if kind == "dr_grpo" else None, importance_sampling_level=level,
        temperature=TEMPERATURE, delta=delta, use_bias_correction_kl=correct,
    )  # fmt: skip

    def ours(d: Inputs) -> Any:
        dtype = d.hidden.dtype
        return loss(
            d.hidden, d.weight, d.labels, MASK, ADVANTAGES.to(dtype), d.bias, ref_logps.to(dtype),
            old_logps.to(dtype) if old else None, vllm_is_ratio=None if weights is None else weights.to(dtype),
            num_items_in_batch=num_items,
        )  # fmt: skip

    def formula(d: Inputs) -> Any:
        logps = token_logps(d, d.labels, temperature=TEMPERATURE)
        per_token, kl, clipped = dense_terms(
            logps, old_logps if old else None, ref_logps, kind, level, delta=delta, correct=correct, is_ratio=weights
        )
        items = num_items if kind in ("dapo", "cispo", "vespo") else None
        return reduced(per_token, kind, items), mean(kl), mean(clipped)

    compare(ours, formula, data)


def test_reference_from_hidden_states_equals_its_log_probabilities() -> None:
    data, ref = data_of(True), data_of(True)._replace(hidden=draw(*data_of(True).hidden.shape, seed=60))
    loss = LigerFusedLinearGRPOLoss(BETA, temperature=TEMPERATURE)
    logps = token_logps(ref, data.labels, temperature=TEMPERATURE)
    tensors = (data.hidden, data.weight, data.labels, MASK, ADVANTAGES, data.bias)
    by_logps = loss(*tensors, logps)
    by_hidden = loss(*tensors, ref_input=ref.hidden, ref_weight=ref.weight, ref_bias=ref.bias)
    torch.testing.assert_close(by_hidden, by_logps)
    with pytest.warns(UserWarning, match="the loss uses ref_per_token_logps"):
        both = loss(*tensors, logps, ref_input=ref.hidden.flip(0), ref_weight=ref.weight)
    torch.testing.assert_close(both, by_logps)


def test_without_a_reference_the_kl_is_0_and_beta_0_returns_no_kl() -> None:
    data = data_of(False)
    tensors = (data.hidden, data.weight, data.labels, MASK, ADVANTAGES)
    loss, metrics = LigerFusedLinearGRPOLoss(BETA, use_ref_model=False)(*tensors)
    plain, only_clipped = LigerFusedLinearGRPOLoss(0.0, use_ref_model=False)(*tensors)
    assert torch.equal(loss, plain) and len(metrics) == 2 and float(metrics[0]) == 0.0 and len(only_clipped) == 1
    with pytest.raises(FlagConflict, match="use_ref_model=True requires"):
        LigerFusedLinearGRPOLoss()(*tensors)


@pytest.mark.parametrize("shape", [(B,), (B, 1)])
@pytest.mark.parametrize("kind", ["grpo", "sapo", "vespo"])
def test_one_correction_per_sequence_may_have_one_or_two_dimensions(shape: tuple[int, ...], kind: str) -> None:
    data = data_of(False)
    ratio = IS_RATIO[:, 0]
    loss = LigerFusedLinearGRPOLoss(0.0, use_ref_model=False, loss_type=kind)
    tensors = (data.hidden, data.weight, data.labels, MASK, ADVANTAGES)
    found, _ = loss(*tensors, vllm_is_ratio=ratio.reshape(shape))
    # VESPO multiplies the ratios of a sequence, so one per sequence counts once.
    per_token = torch.ones(B, T, dtype=ratio.dtype)
    first = MASK.argmax(1)
    per_token[range(B), first] = ratio
    wanted, _ = loss(*tensors, vllm_is_ratio=per_token if kind == "vespo" else ratio[:, None].expand(B, T))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("beta", [0.0, BETA])
def test_luspo_does_not_count_padding(beta: float) -> None:
    """In Liger the padding enters once the loss has a value per token, and its two GRPO functions disagree."""
    data = data_of(False)
    old, ref = before(data)
    mask = MASK.clone()
    mask[:, 4:] = 0
    loss = LigerFusedLinearGRPOLoss(beta, loss_type="luspo", importance_sampling_level="sequence")
    rows = (data.hidden, data.labels, mask, ref, old)
    padded, _ = loss(rows[0], data.weight, rows[1], rows[2], ADVANTAGES, None, rows[3], rows[4])
    short = [row[:, :4] for row in rows]
    cut, _ = loss(short[0], data.weight, short[1], short[2], ADVANTAGES, None, short[3], short[4])
    torch.testing.assert_close(padded, cut)
    logits = torch.nn.functional.pad(data.hidden @ data.weight.t(), (0, 0, 0, 1))
    by_logits, _ = triton_grpo_loss(
        logits, old, ref, data.labels, ADVANTAGES, mask, 1.0, beta, 0.2, 0.2, loss_type="luspo",
        importance_sampling_level="sequence", reduce=True,
    )  # fmt: skip
    torch.testing.assert_close(by_logits, padded)


@pytest.mark.parametrize(("kind", "level"), CASES)
def test_loss_of_logits_is_the_formula_per_token_and_reduced(kind: str, level: str) -> None:
    data = data_of(True)
    old, ref = before(data)
    high = 1.3 if kind == "cispo" else HIGH
    rest = draw(B, 1, V, seed=50)  # the last position predicts no token of the completion

    def logits_with_last(d: Inputs) -> Tensor:
        assert d.bias is not None
        return torch.cat([d.hidden @ d.weight.t() + d.bias, rest.to(d.hidden.dtype)], 1)

    weight = draw(B, T, seed=51)

    def ours(d: Inputs, reduce: bool) -> Any:
        dtype = d.hidden.dtype
        found = triton_grpo_loss(
            logits_with_last(d), old.to(dtype), ref.to(dtype), d.labels, ADVANTAGES.to(dtype), MASK, TEMPERATURE,
            BETA, LOW, high, loss_type=kind, max_completion_length=LONGEST, importance_sampling_level=level,
            reduce=reduce,
        )  # fmt: skip
        return found if reduce else ((found[0] * weight.to(dtype)).sum(), *found)

    def formula(d: Inputs, reduce: bool) -> Any:
        logps = token_logps(d, d.labels, temperature=TEMPERATURE)
        found = dense_terms(logps, old, ref, kind, level, delta=None, correct=False, is_ratio=None)
        if reduce:
            return reduced(found[0], kind, None), mean(found[1]), mean(found[2])
        return (found[0] * weight.to(logps.dtype)).sum(), *found

    for reduce in (True, False):
        compare(lambda d, r=reduce: ours(d, r), lambda d, r=reduce: formula(d, r), data)


def test_logits_are_not_written_to_and_the_last_position_gets_a_gradient_of_0() -> None:
    """Liger writes the gradient over the logits by default."""
    data = data_of(False)
    logits = torch.nn.functional.pad(data.hidden @ data.weight.t(), (0, 0, 0, 1)).requires_grad_()
    copy = logits.detach().clone()
    loss, _ = triton_grpo_loss(logits, None, None, data.labels, ADVANTAGES, MASK, beta=0.0, reduce=True)
    loss.backward()
    assert torch.equal(logits, copy) and logits.grad is not None
    assert not logits.grad[:, -1].any() and not logits.grad[:, :-1][MASK == 0].any() and logits.grad.any()


def test_selective_log_softmax_reads_the_last_ids_and_leaves_masked_tokens_0() -> None:
    data = data_of(False)
    logits = torch.nn.functional.pad(data.hidden @ data.weight.t(), (0, 0, 0, 1)).requires_grad_()
    prompt = torch.zeros(B, 3, dtype=torch.long)
    found = fused_selective_log_softmax(
        logits, torch.cat([prompt, data.labels], 1), TEMPERATURE, torch.cat([prompt, MASK], 1)
    )
    wanted = token_logps(data, data.labels, temperature=TEMPERATURE) * MASK
    torch.testing.assert_close(found, wanted)
    assert not found.requires_grad
    default = fused_selective_log_softmax(logits, data.labels)
    torch.testing.assert_close(default, token_logps(data, data.labels, temperature=0.9))


def test_gamma_weight_is_1_on_policy_and_bounded_for_any_ratio() -> None:
    zero = torch.zeros(B, T)
    torch.testing.assert_close(gamma_weights(ADVANTAGES.float(), zero, MASK), torch.ones(B, 1))
    for log_ratio in (-1e4, 1e4):
        assert gamma_weights(ADVANTAGES.float(), zero + log_ratio, MASK).isfinite().all()
    # A masked token's correction does not count, whatever it is.
    with_zero = torch.where(MASK > 0, 1.0, 0.0)
    torch.testing.assert_close(gamma_weights(ADVANTAGES.float(), zero, MASK, with_zero), torch.ones(B, 1))


def test_a_bool_as_the_temperature_is_its_number_with_a_warning() -> None:
    """Liger divides by it. A call whose arguments are one place off passes a bool there."""
    data = data_of(False)
    tensors = (data.hidden, data.weight, data.labels, MASK, ADVANTAGES)
    wanted, _ = LigerFusedLinearGRPOLoss(0.0, use_ref_model=False, temperature=1.0)(*tensors)
    with pytest.warns(UserWarning, match="temperature=True is used as 1.0"):
        found, _ = LigerFusedLinearGRPOLoss(0.0, use_ref_model=False, temperature=True)(*tensors)
    assert torch.equal(found, wanted)
    logits = torch.nn.functional.pad(data.hidden @ data.weight.t(), (0, 0, 0, 1))
    with pytest.warns(UserWarning, match="temperature=True is used as 1.0"):
        triton_grpo_loss(logits, None, None, data.labels, ADVANTAGES, MASK, True, beta=0.0)
    # A call with the positional order of an older Liger gives `compiled` as the temperature.
    rest = (None, torch.zeros(B, T), None, None, None, None, 0.1, 0.2, 0.2, "bnpo", None, "token", 1.0, False, True)
    with pytest.warns(UserWarning, match="an argument that is one place off"):
        liger_fused_linear_grpo(*tensors, *rest)
    with pytest.warns(UserWarning, match="temperature=False"), pytest.raises(OptionError, match="must be positive"):
        LigerFusedLinearGRPOLoss(0.0, use_ref_model=False, temperature=False)(*tensors)


@pytest.mark.parametrize("kind", TYPES)
def test_extreme_log_ratios_and_empty_masks_give_finite_losses(kind: str) -> None:
    data = data_of(False)
    level = "sequence" if kind == "luspo" else "token"
    loss = LigerFusedLinearGRPOLoss(
        BETA, epsilon_high=1.3, loss_type=kind, max_completion_length=T, importance_sampling_level=level
    )

    def call(d: Inputs, old: Tensor, mask: Tensor) -> Any:
        return loss(d.hidden, d.weight, d.labels, mask, ADVANTAGES.float(), None, old, old)

    for old, mask in ((torch.full((B, T), 300.0), MASK), (torch.full((B, T), -300.0), MASK), (-MASK.float(), 0 * MASK)):
        found = results(lambda d, old=old, mask=mask: call(d, old, mask), data, torch.float32)
        assert all(value.isfinite().all() for value in found), (kind, float(old[0, 0]))


def test_options_without_a_meaning_are_refused_by_name() -> None:
    data = data_of(False)
    tensors = (data.hidden, data.weight, data.labels, MASK, ADVANTAGES)

    def call(**options: Any) -> Callable[[], Any]:
        return lambda: LigerFusedLinearGRPOLoss(0.0, use_ref_model=False, **options)(*tensors)

    for refused, words in (
        (call(loss_type="nonsense"), "loss_type='nonsense' is not known"),
        (call(importance_sampling_level="batch"), "choose token or sequence"),
        (call(loss_type="cispo", delta=3.0), "delta .two-sided clipping. is not supported"),
        (call(loss_type="sapo", importance_sampling_level="sequence"), "Sequence-level importance sampling"),
        (call(delta=1.1), "delta=1.1 must be above 1.2"),
        (call(sapo_temperature_pos=0.0), "sapo_temperature_pos must be positive"),
        (call(loss_type="dr_grpo"), "requires max_completion_length"),
        (call(temperature="1"), "temperature='1'"),
    ):
        with pytest.raises(OptionError, match=words):
            refused()
    logits = draw(B, T + 1, V, seed=0)
    with pytest.raises(FlagConflict, match="requires ref_logp"):
        triton_grpo_loss(logits, None, None, data.labels, ADVANTAGES)
    with pytest.raises(ShapeError, match=r"pass \(B, T \+ 1, V\)"):
        triton_grpo_loss(logits[:, :T], None, None, data.labels, ADVANTAGES, beta=0.0)


def _tokens_of_step(rank: int, mesh: Any) -> float:
    mask = torch.ones(1, 3 if rank == 0 else 7)
    assert tokens_of_step(0 * mask, 0) == 1.0
    return float((tokens_of_step(mask, None) - 5.0).abs() + (tokens_of_step(mask, 24) - 12.0).abs())


def test_denominator_of_a_step_is_the_mean_number_of_tokens_per_process(tmp_path: Path) -> None:
    scenario = {"tokens": _tokens_of_step}
    two_ranks.assert_right(two_ranks.run(scenario, tmp_path), "tokens")
