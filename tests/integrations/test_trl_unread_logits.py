"""Trainers that slice the model's logits, as TRL 1.8 to 1.14 do: the same numbers from the hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from trl_runs import model

from tigon.integrations.trl.unread_logits import UnreadLogits, UnreadLogitsTrainer

pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[dev]')")

from trl.trainer.utils import entropy_from_logits, selective_log_softmax

IDS = torch.randint(5, 64, (4, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.rand((2, 8), generator=torch.Generator().manual_seed(1)) < 0.6


class SlicingTrainer:
    """Reads the logits in every way that a trainer of TRL 1.8 to 1.14 does."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        logits = outputs.logits[..., :-1, :]
        labels = inputs["input_ids"][:, 1:]
        logps = selective_log_softmax(logits, labels)
        chosen, rejected = logits.detach().chunk(2, dim=0)
        first, _ = logits.chunk(2, dim=0)
        with torch.no_grad():
            weight = torch.logsumexp(2.0 * logits, dim=-1) - 2.0 * torch.logsumexp(logits, dim=-1)
        sampled = model(**inputs).logits[:, :-1, :][:, -3:, :]
        sampled.div_(0.7)
        values = {
            "logps": logps, "entropy": entropy_from_logits(logits.detach()), "predictions": chosen.argmax(dim=-1),
            "mean": chosen[MASK].mean(-1), "weight": weight,
            "sum": rejected.index_select(0, torch.tensor([1])).nansum(),
            "sft": F.cross_entropy(first[MASK], labels[:2][MASK]),
            "sampled": selective_log_softmax(sampled, labels[:, -3:]), "bonus": entropy_from_logits(sampled),
            "other": (rejected + 1).amax(-1),
        }  # fmt: skip
        loss = logps.square().sum() + values["sft"] + values["sampled"].sum() + values["bonus"].sum()
        return (loss, outputs) if return_outputs else (loss, values)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_every_reading_of_logits_gives_the_numbers_of_the_logits(family: str) -> None:
    options = {
        "gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
        "granite": {"logits_scaling": 3.0},
    }
    policies = [model(family, **options.get(family, {})) for _ in range(2)]
    trainer, inputs = SlicingTrainer(), {"input_ids": IDS}
    loss, want = trainer._compute_loss(policies[0], inputs)
    loss.backward()
    part = UnreadLogitsTrainer(trainer, {"model": policies[1]})
    fused_loss, got = trainer._compute_loss(policies[1], inputs)
    fused_loss.backward()
    torch.testing.assert_close(fused_loss, loss)
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    for ours, theirs in zip(policies[1].parameters(), policies[0].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)

    assert isinstance(trainer._compute_loss(policies[1], inputs, return_outputs=True)[1].logits, torch.Tensor)
    assert isinstance(policies[1](**inputs).logits, torch.Tensor)
    part.restore()
    assert "_compute_loss" not in vars(trainer) and "forward" not in vars(policies[1])


def test_model_returns_unread_logits_only_inside_the_trainers_methods() -> None:
    policy, seen = model(), []

    class Watching(SlicingTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
            logits = model(**inputs).logits
            seen.append(type(logits))
            return selective_log_softmax(logits[:, :-1], inputs["input_ids"][:, 1:])

    trainer = Watching()
    UnreadLogitsTrainer(trainer, {"model": policy})
    trainer._compute_loss(policy, {"input_ids": IDS})
    assert seen == [UnreadLogits] and type(policy(input_ids=IDS).logits) is torch.Tensor
