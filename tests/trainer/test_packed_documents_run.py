"""`tigon train` with packed rows on families that do not keep documents apart by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_checkpoint import chats, save
from trainer_helpers import records

from tigon.objectives.base import Objective

OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}
MAMBA = {
    "mamba_d_state": 16, "mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_chunk_size": 32, "head_dim": 16,
}  # fmt: skip


@pytest.fixture
def oss(here: Any, recipe: Any) -> Any:
    save(here / "oss", torch.float32, "gpt_oss", **OSS)
    return recipe(
        model={"name": "oss", "attention": "eager", "config": None},
        data={"source": str(chats(here / "chats.jsonl")), "sequence_length": 64, "eval_fraction": 0.2},
        train={"steps": 1, "report_to": "none"},
    )


def test_documents_of_gpt_oss_train_apart(oss: Any, here: Any, tigon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the run gives a document the same logits after another one as after the first."""
    seen: list[float] = []
    original = Objective.loss

    def loss(self: Any, model: Any, inputs: Any, of_model: Any) -> Any:
        positions = inputs["position_ids"][:1]
        second = int((positions[0] == 0).nonzero()[1])
        other = inputs["input_ids"][:1].clone()
        other[:, :second] = 5
        with torch.no_grad():
            a, b = (model(input_ids=ids, position_ids=positions).logits for ids in (inputs["input_ids"][:1], other))
        seen.extend(float((a - b).abs()[0, part].max()) for part in (slice(second), slice(second, None)))
        return original(self, model, inputs, of_model)

    with monkeypatch.context() as patched:
        patched.setattr(Objective, "loss", loss)
        outcome = tigon("train", oss)
    assert outcome.code == 0, outcome.err
    assert seen[0] > 1e-3 and seen[1] < 1e-5
    assert [record["step"] for record in records(here / "runs/r", "train")] == [1]


def test_attention_with_sinks_trains_packed_documents_to_the_same_loss(oss: Any, here: Any, tigon: Any) -> None:
    losses = []
    for run, sinks in (("own", "false"), ("op", "true")):
        outcome = tigon("train", oss, "--set", f"model.attention_sinks={sinks}", "--set", f"output.name={run}",
                        "--set", "model.kernels=tigon")  # fmt: skip
        assert outcome.code == 0, outcome.err
        losses.append(records(here / "runs" / run, "train")[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_state_space_model_is_refused_with_packing_and_trains_without(here: Any, recipe: Any, tigon: Any) -> None:
    save(here / "h1", torch.float32, "falcon_h1", **MAMBA)
    path = recipe(
        model={"name": "h1", "config": None},
        data={"source": str(chats(here / "chats.jsonl")), "sequence_length": 64, "eval_fraction": 0},
        train={"steps": 1},
    )
    refused = tigon("train", path, "--set", "data.packing=true")
    assert refused.code == 2 and "data.packing is true, but h1 mixes the documents of a sample" in refused.err
    assert not (here / "runs").exists()
    outcome = tigon("train", path)
    assert outcome.code == 0 and "packing  off: its " in outcome.out, outcome.err
