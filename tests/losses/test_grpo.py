"""GRPO's family against a formula that loops over sequences and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from loss_checks import check, check_finite, draw
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.losses import GRPOLoss, dpo, grpo, importance_sampling_ratio, sequence_sum
from tigon.losses.grpo import FORMULAS, GRPOLossType

MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1]], dtype=torch.bool)
SHAPE = MASK.shape
LENGTHS = MASK.sum(1).tolist()
ADVANTAGES = torch.tensor([1.2, -0.7, 0.5, -1.4], dtype=torch.float64)
OLD = draw(*SHAPE, seed=2) - 3
WEIGHT = draw(*SHAPE, seed=7).abs()
INPUTS = {"logps": OLD + draw(*SHAPE, scale=0.8, seed=12), "ref_logps": OLD + draw(*SHAPE, scale=0.6, seed=3)}
LOW, HIGH = 0.2, 0.28


def own(loss_type: str) -> dict[str, Any]:
    """The bounds of a type, and what else it requires."""
    if loss_type == "cispo":
        return {"epsilon_high": 1.3}
    return {"epsilon_high": HIGH} | ({"max_completion_length": 8} if loss_type == "dr_grpo" else {})


def formula(
    loss_type: str,
    *,
    level: str = "token",
    beta: float = 0.3,
    delta: float = math.inf,
    correct: bool = False,
    weight: Tensor | None = None,
    old: Tensor | None = OLD,
    num_items: float | None = None,
) -> Callable[..., Tensor]:
    upper = own(loss_type)["epsilon_high"]

    def of(logps: Tensor, ref_logps: Tensor) -> Tensor:
        before = (logps.detach() if old is None else old).to(logps.dtype)
        per_sequence, tokens = [], 0
        for b in range(SHAPE[0]):
            places = [t for t in range(SHAPE[1]) if MASK[b, t]]
            total = logps.new_zeros(())
            mean = logps.new_zeros(())
            for t in places:
                mean = mean + (logps[b, t] - before[b, t]) / len(places)
            for t in places:
                tokens += 1
                a = ADVANTAGES[b].to(logps.dtype)
                ratio = torch.exp(mean if level == "sequence" else logps[b, t] - before[b, t])
                if loss_type == "cispo":
                    loss = -min(ratio.item(), upper) * a * logps[b, t]
                else:
                    clipped = min(max(ratio, a.new_tensor(1 - LOW)), a.new_tensor(1 + upper))
                    loss = -min(min(ratio, a.new_tensor(delta)) * a, clipped * a)
                if weight is not None:
                    loss = loss * weight[b, t].to(logps.dtype)
                d = logps[b, t] - ref_logps[b, t]
                kl = torch.exp(-d) - 1 + d
                total = total + loss + beta * kl * (ratio if correct else 1)
            per_sequence.append((total, len(places)))
        if loss_type in ("grpo", "gspo"):
            return sum(total / max(n, 1) for total, n in per_sequence) / SHAPE[0]
        denominator = {"dr_grpo": SHAPE[0] * 8}.get(loss_type, tokens if num_items is None else num_items)
        return sum(total for total, _ in per_sequence) / denominator

    return of


def ours(loss_type: str, **more: Any) -> Callable[..., Tensor]:
    more = {"old_logps": OLD, "beta": 0.3, **own(loss_type), **more}

    def of(logps: Tensor, ref_logps: Tensor) -> Tensor:
        cast = {k: v.to(logps.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in more.items()}
        return grpo(logps, ADVANTAGES.to(logps.dtype), MASK, ref_logps=ref_logps, loss_type=loss_type, **cast).loss

    return of


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_inputs_reach_every_bound(level: Any) -> None:
    result = grpo(
        INPUTS["logps"], ADVANTAGES, MASK, old_logps=OLD, epsilon_high=HIGH, importance_sampling_level=level
    )  # fmt: skip
    assert result.clipped_low.any() and result.clipped_high.any()
    assert (MASK & ~result.clipped_low & ~result.clipped_high).any()


def level_of(loss_type: str) -> str:
    return "sequence" if loss_type == "gspo" else "token"


@pytest.mark.parametrize("loss_type", FORMULAS)
def test_loss_and_gradients_are_the_formulas(loss_type: str) -> None:
    check(ours(loss_type), formula(loss_type, level=level_of(loss_type)), INPUTS)


@pytest.mark.parametrize("loss_type", FORMULAS)
def test_one_ratio_per_sequence(loss_type: str) -> None:
    check(ours(loss_type, importance_sampling_level="sequence"), formula(loss_type, level="sequence"), INPUTS)


@pytest.mark.parametrize("loss_type", FORMULAS)
def test_without_old_log_probabilities_the_ratio_is_1_and_has_a_gradient(loss_type: str) -> None:
    check(ours(loss_type, old_logps=None), formula(loss_type, level=level_of(loss_type), old=None), INPUTS)


@pytest.mark.parametrize("loss_type", FORMULAS)
def test_the_bias_correction_multiplies_the_kl_by_the_ratio(loss_type: str) -> None:
    check(
        ours(loss_type, use_bias_correction_kl=True),
        formula(loss_type, level=level_of(loss_type), correct=True), INPUTS,
    )  # fmt: skip


def test_two_sided_clipping_bounds_the_ratio_of_negative_advantages() -> None:
    far = {**INPUTS, "logps": OLD + draw(*SHAPE, scale=2.0, seed=5)}
    check(ours("dapo", delta=1.6), formula("dapo", delta=1.6), far)
    check(ours("gspo", delta=1.6), formula("gspo", level="sequence", delta=1.6), far)


def test_importance_weights_multiply_the_policy_term_alone() -> None:
    check(ours("dapo", importance_sampling_ratio=WEIGHT), formula("dapo", weight=WEIGHT), INPUTS)
    per_sequence = WEIGHT[:, :1]
    check(
        ours("grpo", importance_sampling_ratio=per_sequence),
        formula("grpo", weight=per_sequence.expand(SHAPE)), INPUTS,
    )  # fmt: skip


@pytest.mark.parametrize("num_items", [37, 37.0, torch.tensor(37)])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_num_items_is_the_denominator(loss_type: str, num_items: Any) -> None:
    check(ours(loss_type, num_items=num_items), formula(loss_type, num_items=37), INPUTS)


def test_advantages_may_be_per_token() -> None:
    per_token = ADVANTAGES[:, None].expand(SHAPE).clone()
    expected = grpo(INPUTS["logps"], ADVANTAGES, MASK, old_logps=OLD).loss
    torch.testing.assert_close(grpo(INPUTS["logps"], per_token, MASK, old_logps=OLD).loss, expected)


@pytest.mark.parametrize("loss_type", FORMULAS)
def test_masked_values_never_enter_even_if_they_are_nan(loss_type: str) -> None:
    bad = {name: x.masked_fill(~MASK, math.nan) for name, x in INPUTS.items()}
    old, weight = OLD.masked_fill(~MASK, math.inf), WEIGHT.masked_fill(~MASK, math.nan)
    leaves = {name: x.clone().requires_grad_() for name, x in bad.items()}
    found = ours(loss_type, old_logps=old, importance_sampling_ratio=weight)(**leaves)
    clean = ours(loss_type, importance_sampling_ratio=WEIGHT)(**INPUTS)
    torch.testing.assert_close(found, clean)
    found.backward()
    for x in leaves.values():
        assert x.grad.isfinite().all() and not x.grad[~MASK].any()


@pytest.mark.parametrize("loss_type", FORMULAS)
def test_a_batch_without_tokens_gives_0(loss_type: str) -> None:
    logps = torch.zeros(2, 3, requires_grad=True)
    loss = grpo(logps, torch.ones(2), torch.zeros(2, 3), loss_type=loss_type, **own(loss_type)).loss
    loss.backward()
    assert loss.item() == 0.0 and not logps.grad.any()
    for shape in ((0, 3), (2, 0)):
        assert grpo(torch.zeros(shape), torch.ones(shape[0]), loss_type=loss_type, **own(loss_type)).loss.item() == 0.0


@pytest.mark.parametrize("gap", [500.0, -500.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss_type", FORMULAS)
def test_extreme_log_ratios_give_finite_losses_and_gradients(loss_type: str, advantage: float, gap: float) -> None:
    x = {"logps": torch.tensor([[-1.0, gap - 1.0]]), "ref_logps": torch.tensor([[-1.0, -1.0 - gap]])}
    for correct in (False, True):
        check_finite(
            lambda **x: grpo(
                x["logps"], torch.tensor([advantage]), old_logps=torch.full((1, 2), -1.0), ref_logps=x["ref_logps"],
                beta=0.1, loss_type=loss_type, use_bias_correction_kl=correct, **own(loss_type),  # noqa: B023
            ).loss,
            x,
        )  # fmt: skip


def test_a_huge_ratio_of_a_bad_token_still_has_a_gradient_that_lowers_it() -> None:
    logps = torch.tensor([[50.0]], requires_grad=True)
    grpo(logps, torch.tensor([-1.0]), old_logps=torch.zeros(1, 1)).loss.backward()
    assert logps.grad.item() > 0


@pytest.mark.parametrize("loss_type", FORMULAS)
def test_loss_per_token_is_differentiable_and_its_sum_is_the_loss_with_one_item(loss_type: Any) -> None:
    leaf = INPUTS["logps"].clone().requires_grad_()
    options = {"beta": 0.3, "old_logps": OLD, "ref_logps": INPUTS["ref_logps"], "loss_type": loss_type}
    found = grpo(leaf, ADVANTAGES, MASK, **options, **own(loss_type))
    assert not found.per_token[~MASK].any()
    level = "sequence" if loss_type == "gspo" else "token"
    summed = "cispo" if loss_type == "cispo" else "dapo"
    total = grpo(
        leaf, ADVANTAGES, MASK, **(options | {"loss_type": summed}), epsilon_high=own(loss_type)["epsilon_high"],
        importance_sampling_level=level, num_items=1,
    ).loss  # fmt: skip
    torch.testing.assert_close(found.per_token.sum(), total)
    ours, wanted = (torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (found.per_token.sum(), total))
    torch.testing.assert_close(ours, wanted)


def test_metrics_are_per_token_without_gradient_and_clipping_is_by_the_sign_of_the_advantage() -> None:
    logps = torch.log(torch.tensor([[0.5, 1.0, 2.0], [0.5, 1.0, 2.0]])).requires_grad_()
    old, mask = torch.zeros(2, 3), torch.tensor([[1, 1, 1], [1, 1, 0]])
    result = grpo(logps, torch.tensor([1.0, -1.0]), mask, old_logps=old, ref_logps=old)
    assert result.clipped_high.tolist() == [[False, False, True], [False, False, False]]
    assert result.clipped_low.tolist() == [[False, False, False], [True, False, False]]
    torch.testing.assert_close(result.ratio[0], torch.tensor([0.5, 1.0, 2.0]))
    assert result.kl is not None and result.kl.shape == (2, 3)
    assert not any(x.requires_grad for x in result[1:-1])
    assert grpo(logps, torch.ones(2)).kl is None
    (grad,) = torch.autograd.grad(result.loss, logps)
    assert not grad[result.clipped_low | result.clipped_high].any()


# --- correction for the sampler --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_weights_are_clipped_or_masked(mode: Any) -> None:
    sampling = OLD + draw(*SHAPE, scale=0.4, seed=9)
    found = importance_sampling_ratio(OLD, sampling, MASK, mode=mode, clip_max=1.5)
    for b in range(SHAPE[0]):
        gaps = {t: float(OLD[b, t] - sampling[b, t]) for t in range(SHAPE[1]) if MASK[b, t]}
        for t, gap in gaps.items():
            w = math.exp(sum(gaps.values()) if mode.startswith("sequence") else gap)
            expected = min(w, 1.5) if mode.endswith("truncate") else w * (w <= 1.5)
            assert found[b, t].item() == pytest.approx(expected, rel=1e-12)


def test_tokens_that_the_sampler_did_not_score_count_as_equal() -> None:
    sampling = torch.tensor([[math.nan, -1.0]])
    found = importance_sampling_ratio(torch.tensor([[-2.0, -0.5]]), sampling, mode="token_truncate", clip_max=1.2)
    torch.testing.assert_close(found, torch.tensor([[1.0, 1.2]]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "token"}, "mode='token' is not known; choose one of token_truncate"),
        ({"clip_max": 0.0}, "clip_max=0.0 must be above 0"),
    ],
)
def test_invalid_limits_of_the_correction_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        importance_sampling_ratio(OLD, OLD, **options)
    assert words in str(caught.value)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "ppo"}, "loss_type='ppo' is not known; choose one of grpo, bnpo"),
        ({"loss_type": "cispo"}, "requires epsilon_high"),
        ({"loss_type": "dr_grpo"}, "requires max_completion_length"),
        ({"max_completion_length": 8}, "does not apply to loss_type='dapo'"),
        ({"beta": 0.1}, "beta=0.1 requires ref_logps"),
        ({"beta": -0.1}, "beta=-0.1 must be at least 0"),
        ({"epsilon": -0.1}, "epsilon=-0.1"),
        ({"delta": 1.1}, "delta=1.1 must be above 1.2"),
        ({"delta": 9.0, "loss_type": "cispo", "epsilon_high": 5.0}, "delta=9.0 does not apply"),
        ({"importance_sampling_level": "word"}, "choose one of token, sequence"),
        ({"importance_sampling_level": "token", "loss_type": "gspo"}, "contradicts loss_type='gspo'"),
        ({"num_items": 3, "loss_type": "grpo"}, "num_items does not apply to loss_type='grpo'"),
        ({"num_items": -3}, "num_items=-3 must be at least 0"),
        ({"use_bias_correction_kl": 1}, "must be True or False"),
    ],
)
def test_invalid_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        grpo(INPUTS["logps"], ADVANTAGES, MASK, **options)
    assert words in str(caught.value)


def test_wrong_tensors_are_refused() -> None:
    logps = INPUTS["logps"]
    with pytest.raises(ShapeError, match=r"advantages is \(3,\)"):
        grpo(logps, torch.ones(3), MASK)
    with pytest.raises(ShapeError, match="old_logps"):
        grpo(logps, ADVANTAGES, old_logps=OLD[:, :2])
    with pytest.raises(ShapeError, match="mask"):
        grpo(logps, ADVANTAGES, MASK[0])
    with pytest.raises(ShapeError, match="num_items"):
        grpo(logps, ADVANTAGES, num_items=torch.ones(2))
    with pytest.raises(DtypeError, match="advantages"):
        grpo(logps, torch.ones(4, dtype=torch.int64))


def test_module_gives_the_functions_result() -> None:
    module = GRPOLoss(beta=0.1, loss_type="gspo", epsilon=0.1)
    expected = grpo(
        INPUTS["logps"], ADVANTAGES, MASK, old_logps=OLD, ref_logps=OLD, beta=0.1, loss_type="gspo", epsilon=0.1
    )
    assert torch.equal(module(INPUTS["logps"], ADVANTAGES, MASK, old_logps=OLD, ref_logps=OLD).loss, expected.loss)
    with pytest.raises(OptionError):
        GRPOLoss(loss_type="cispo")
    assert get_args(GRPOLossType) == tuple(FORMULAS)


def test_losses_compile_into_one_graph() -> None:
    def step(logps: Tensor) -> Tensor:
        policy = grpo(logps, ADVANTAGES, MASK, old_logps=OLD, ref_logps=OLD, beta=0.1, loss_type="gspo").loss
        chosen, rejected = sequence_sum(logps, MASK).chunk(2)
        return policy + dpo(chosen, rejected, OLD[:2, 0], OLD[2:, 0]).loss.mean()

    torch._dynamo.reset()
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(INPUTS["logps"])
    torch.testing.assert_close(found, step(INPUTS["logps"]))
