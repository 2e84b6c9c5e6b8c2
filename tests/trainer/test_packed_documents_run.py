"""`tigon train` with packed rows on families that do not keep documents apart by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_technique_runs import fsdp_rank
from tiny_checkpoint import chats, save
from trainer_helpers import losses, records
from transformers import AutoConfig

from forks import in_forks
from tigon.models import packed_documents
from tigon.objectives.base import Objective
from tigon.recipe.keys import Recipe, TrainConfig
from tigon.trainer.guards import preflight

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


@pytest.fixture
def h1(here: Any, recipe: Any) -> Any:
    """Chats on a Falcon-H1, whose layers have a Mamba 2 scan and a convolution."""
    if not packed_documents.has_states(AutoConfig.for_model("falcon_h1")):
        pytest.skip(f"its layers get no arguments before transformers {packed_documents.FIRST_RELEASE}")
    save(here / "h1", torch.float32, "falcon_h1", **MAMBA)
    return recipe(
        model={"name": "h1", "config": None},
        data={"source": str(chats(here / "chats.jsonl")), "sequence_length": 64, "eval_fraction": 0, "packing": True},
        train={"steps": 2, "report_to": "none"},
    )


def test_hybrid_model_trains_packed_documents_apart_and_says_how(h1: Any, here: Any, tigon: Any) -> None:
    """A recomputation in the backward pass has the documents of its own micro-batch."""
    rows = []
    for run, more in {
        "plain": [],
        "checkpointed": ["train.checkpointing=full"],
        "selective": ["train.checkpointing=selective"],
        "accumulated": ["train.batch_size=1", "train.gradient_accumulation=4", "train.checkpointing=full"],
    }.items():
        given = [part for value in (f"output.name={run}", *more) for part in ("--set", value)]
        outcome = tigon("train", h1, *given)
        assert outcome.code == 0, outcome.err
        (line,) = [line for line in outcome.out.splitlines() if "each document runs by itself" in line]
        assert "Mamba 2 scan (2 layers) and short convolution (2 layers)" in line
        rows.append([record["loss"] for record in records(here / "runs" / run, "train")])
    for others in rows[1:]:
        assert others == pytest.approx(rows[0], rel=1e-4)


def test_processes_with_other_numbers_of_documents_train_a_hybrid_model_as_one_process_does(
    h1: Any, here: Any, tigon: Any
) -> None:
    """FSDP2 gathers the weights of a decoder layer, and not of each product within."""
    said = here / "stderr.txt"
    codes = in_forks(lambda rank: fsdp_rank(h1, ["train.batch_size=2", "output.name=two"]), 2, said=said)
    assert codes == [0, 0], said.read_text(encoding="utf-8")
    assert tigon("train", h1).code == 0
    assert losses(here / "runs" / "two") == pytest.approx(losses(here / "runs" / "r"), rel=1e-5)


def test_layers_with_a_state_that_are_not_kept_apart_are_found_before_the_first_step(
    h1: Any, tigon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_documents, "states_apart", lambda model: lambda: None)
    outcome = tigon("train", h1)
    assert outcome.code == 2 and "data.packing is true, but h1 mixes the documents of a sample" in outcome.error_line()


def test_cuda_graphs_do_not_pack_a_hybrid_model(h1: Any) -> None:
    config = AutoConfig.for_model("falcon_h1")
    assert preflight.mixes_documents(Recipe(), config) is None
    reason = preflight.mixes_documents(Recipe(train=TrainConfig(cuda_graphs=True)), config)
    assert reason is not None and "train.cuda_graphs" in reason


def test_zero_3_does_not_pack_a_hybrid_model() -> None:
    """In this process alone: a run would start DeepSpeed's process group, which later tests would meet."""
    reason = preflight.mixes_documents(Recipe().having({"sharding.zero": 3}), AutoConfig.for_model("falcon_h1"))
    assert reason is not None and "sharding.zero: 3" in reason


def test_state_space_model_is_refused_with_packing_and_trains_without(here: Any, recipe: Any, tigon: Any) -> None:
    save(here / "mamba", torch.float32, "mamba")
    path = recipe(
        model={"name": "mamba", "config": None, "attention": "eager"},
        data={"source": str(chats(here / "chats.jsonl")), "sequence_length": 64, "eval_fraction": 0},
        train={"steps": 1},
    )
    refused = tigon("train", path, "--set", "data.packing=true")
    assert refused.code == 2 and "data.packing is true, but mamba mixes the documents of a sample" in refused.err
    assert not (here / "runs").exists()
    outcome = tigon("train", path)
    assert outcome.code == 0 and "packing  off: its " in outcome.out, outcome.err
