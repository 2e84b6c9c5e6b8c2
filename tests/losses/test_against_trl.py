"""The losses against TRL's: functions that need no model, and the losses of its DPO and GRPO trainers.

The trainers' method `_compute_loss` runs on stand-ins for the trainer and its model, whose attributes are those of
TRL 1.16. With another version these two tests are skipped.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tigon import losses
from tigon.losses.dpo import FORMULAS as DPO_FORMULAS
from tigon.losses.grpo import FORMULAS as GRPO_FORMULAS

trl = pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[dev]')")
only_1_16 = pytest.mark.skipif(
    not trl.__version__.startswith("1.16"), reason=f"trl {trl.__version__} has other trainers"
)
B, T = 8, 6


def values(seed: int) -> Tensor:
    return torch.randn(B, T, generator=torch.Generator().manual_seed(seed)) - 2


def part_of_trl(path: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"trl.{path}"), name)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"trl {trl.__version__} has no {path}.{name}: {error}")


def compare(theirs: Tensor, ours: Tensor, leaf: Tensor) -> None:
    """Equal losses, and equal gradients of the one tensor that both came from."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(theirs.sum(), leaf)[0]
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), leaf)[0], expected, rtol=1e-4, atol=1e-6)


# --- functions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "simpo"])
def test_cpo_is_trls(loss_type: Any) -> None:
    trainer = part_of_trl("experimental.cpo.cpo_trainer", "CPOTrainer")
    e = 0.1 if loss_type in ("sigmoid", "simpo") else 0.0
    stand_in = SimpleNamespace(
        alpha=0.0, beta=0.3, simpo_gamma=0.5, label_smoothing=e, loss_type=loss_type,
        accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    leaf = values(0).requires_grad_()
    theirs = trainer.cpo_loss(stand_in, leaf[0], leaf[1])
    ours = losses.cpo(leaf[0], leaf[1], beta=0.3, loss_type=loss_type, label_smoothing=e)
    compare(theirs[0], ours.loss, leaf)
    torch.testing.assert_close(ours.chosen_rewards, theirs[1])
    torch.testing.assert_close(ours.rejected_rewards, theirs[2])


def test_orpo_is_trls() -> None:
    trainer = part_of_trl("experimental.orpo.orpo_trainer", "ORPOTrainer")
    leaf = (-values(0).abs()).requires_grad_()
    theirs = trainer.odds_ratio_loss(
        SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu")), leaf[0], leaf[1]
    )
    ours = losses.orpo(leaf[0], leaf[1], beta=0.3)
    compare(-theirs[0], ours.loss, leaf)
    for expected, found in zip(theirs[1:3], ours[1:3], strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.log_odds_ratio.mean(), theirs[3].detach())
    torch.testing.assert_close(ours.log_odds.mean(), theirs[4].detach())


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_generalized_jsd_is_trls(beta: float) -> None:
    theirs = part_of_trl("experimental.gkd.gkd_trainer", "GKDTrainer").generalized_jsd_loss
    student, teacher = values(0).requires_grad_(), values(1)
    labels = torch.tensor([1, 2, -100, 3, -100, 4, 5, 6])
    expected = theirs(student[None], teacher[None], labels[None], beta=beta)
    found = losses.divergence(student.log_softmax(-1), teacher.log_softmax(-1), kind="jsd", beta=beta)
    compare(expected, losses.distillation(found, labels != -100).loss, student)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_top_k_divergence_is_trls(beta: float) -> None:
    theirs = part_of_trl("experimental.sdpo.loss_utils", "compute_topk_self_distillation_loss")
    student, teacher = values(0).requires_grad_(), values(1)
    expected = theirs(student, teacher, distillation_topk=3, distillation_alpha=beta, distillation_add_tail=True)
    ids = student.topk(3, -1).indices  # TRL takes the student's
    found = losses.topk_divergence(
        student.log_softmax(-1).gather(-1, ids), teacher.log_softmax(-1).gather(-1, ids), kind="jsd", beta=beta
    )
    compare(expected, found, student)


# --- trainers --------------------------------------------------------------------------------------------------------

ACCELERATOR = SimpleNamespace(
    device="cpu", num_processes=1, sync_gradients=True, gather=lambda x: x, gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x, unwrap_model=lambda model: model,
)  # fmt: skip
MASK = torch.rand(B, T, generator=torch.Generator().manual_seed(9)) > 0.3
MASK[:, 0] = True


class LogProbabilities:
    """A model that returns given log-probabilities, 0 where the completion has ended."""

    training = True

    def __init__(self, logps: Tensor) -> None:
        zero = torch.zeros_like(logps).detach()
        self.outputs = SimpleNamespace(
            log_probs=logps * MASK, entropy=zero, mean_logits=zero, is_top1=zero > 0, log_sum_sq_probs=zero
        )

    def __call__(self, **inputs: Any) -> Any:
        return self.outputs


@only_1_16
@pytest.mark.parametrize("loss_type", DPO_FORMULAS)
def test_dpo_and_its_metrics_are_trls(loss_type: Any) -> None:
    # TRL's sigmoid takes no label smoothing.
    e = 0.1 if loss_type in ("robust", "exo_pair", "aot", "aot_unpaired") else 0.0
    leaf, ref = values(0).requires_grad_(), (values(1) * MASK).sum(1)
    model, metrics = LogProbabilities(leaf), defaultdict(list)
    stand_in = SimpleNamespace(
        model=model, accelerator=ACCELERATOR, aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True,
        f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0], beta=0.3, label_smoothing=e,
        args=SimpleNamespace(discopop_tau=0.05), use_weighting=False, _metrics={"train": metrics},
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    completion = torch.cat([torch.zeros(B, 1), MASK], 1).long()
    inputs = {
        "input_ids": completion, "attention_mask": completion, "completion_mask": completion,
        "ref_chosen_logps": ref[: B // 2], "ref_rejected_logps": ref[B // 2 :],
    }  # fmt: skip
    theirs = trl.DPOTrainer._compute_loss(stand_in, model, inputs, False)

    chosen, rejected = losses.sequence_sum(leaf, MASK).chunk(2)
    lengths = dict(zip(("chosen_lengths", "rejected_lengths"), losses.sequence_lengths(MASK).chunk(2), strict=True))
    ours = losses.dpo(
        chosen, rejected, *ref.chunk(2), beta=0.3, loss_type=loss_type, label_smoothing=e,
        **(lengths if loss_type in ("ipo", "sigmoid_norm") else {}),
    )  # fmt: skip
    compare(theirs, ours.loss.mean(), leaf)
    for name, found in (
        ("chosen", ours.chosen_rewards), ("rejected", ours.rejected_rewards), ("margins", ours.margins),
        ("accuracies", ours.accuracies),
    ):  # fmt: skip
        assert metrics[f"rewards/{name}"] == [pytest.approx(found.mean().item(), abs=1e-6)]


@only_1_16
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("delta", [None, 6.5])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", GRPO_FORMULAS)
def test_grpo_and_its_metrics_are_trls(loss_type: Any, level: Any, delta: Any, correct: bool, weighted: bool) -> None:
    if (loss_type, level) == ("gspo", "token") or (delta is not None and loss_type == "cispo"):
        return
    leaf, old, ref = values(0).requires_grad_(), values(0) + 0.4 * (values(2) + 2), values(3)
    entropy, weight, advantages = values(4).abs(), values(5).abs(), values(6)[:, 0] + 2
    mask = MASK.long().index_fill(0, torch.tensor([3]), 0)
    metrics: dict[str, list[float]] = defaultdict(list)
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (leaf, entropy, None), aux_loss_enabled=False, beta=0.2,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level, epsilon_low=0.2,
        args=SimpleNamespace(use_bias_correction_kl=correct, delta=delta, steps_per_generation=1), epsilon_high=5.0,
        loss_type="grpo" if loss_type == "gspo" else loss_type, use_vllm=weighted, accelerator=ACCELERATOR,
        vllm_importance_sampling_correction=weighted, model=SimpleNamespace(training=True), max_completion_length=9,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, use_adaptive_entropy=False,
        entropy_coef=0.0, _metrics={"train": metrics},
    )  # fmt: skip
    inputs = {
        "prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask, "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref,
        "importance_sampling_ratio": weight, "num_items_in_batch": torch.tensor(31.0),
    }  # fmt: skip
    theirs = trl.GRPOTrainer._compute_loss(stand_in, None, inputs)
    ours = losses.grpo(
        leaf, advantages, mask, old_logps=old, ref_logps=ref, importance_sampling_ratio=weight if weighted else None,
        loss_type=loss_type, beta=0.2, epsilon_high=5.0, delta=delta,
        importance_sampling_level=level, use_bias_correction_kl=correct,
        max_completion_length=9 if loss_type == "dr_grpo" else None,
        num_items=31 if loss_type in ("dapo", "cispo") else None,
    )  # fmt: skip
    compare(theirs, ours.loss, leaf)
    logged = {"kl": ours.kl}
    if level == "token" and loss_type == "cispo":
        logged["cispo_clip_ratio"] = ours.clipped_high
    elif level == "token":
        logged.update({"clip_ratio/low_mean": ours.clipped_low, "clip_ratio/high_mean": ours.clipped_high})
    for name, found in logged.items():
        assert metrics[name] == [pytest.approx(found.float()[mask > 0].mean().item(), rel=1e-5)]


def test_advantages_are_those_of_trls_standard_deviation() -> None:
    nanstd = part_of_trl("trainer.utils", "nanstd")
    rewards = values(0).flatten()
    rewards[5] = torch.nan
    groups = rewards.view(-1, 6)
    expected = (groups - groups.nanmean(1, keepdim=True)) / (nanstd(groups, dim=1)[:, None] + 1e-4)
    torch.testing.assert_close(losses.group_advantages(rewards, 6), expected.nan_to_num(0.0).flatten())
