"""GRPO with tigon's generator under FSDP2, in two gloo processes of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_generation_run import written
from trl_cases import lora
from trl_runs import build

import tigon
import tigon.integrations.trl as integration
from forks import forks, in_forks
from tigon.errors import PatchError
from tigon.integrations.trl import GraphGeneration, generation
from tigon.models.patch import unwrap

pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[dev]')")
pytestmark = [forks, pytest.mark.filterwarnings("ignore")]

DIFFERENCE = f"{generation.DIFFERENCE}/max"


def in_two(folder: Path, *, sharded: bool = True, **options: Any) -> list[dict[str, Any]]:
    """What each of two processes wrote, logged and said."""
    build("GRPO")  # imports and models, before the processes are copied
    said = folder / "stderr"
    ended = in_forks(lambda rank: written(rank, folder, sharded=sharded, **options), 2, said=said)
    assert ended == [0, 0], said.read_text()[-3000:]
    return [torch.load(folder / f"{sharded}-{rank}.pt") for rank in range(2)]


def assert_writes_what_whole_weights_write(wholes: list[dict[str, Any]], shards: list[dict[str, Any]]) -> None:
    """The same completions, log-probabilities and updates; the weights are divided again and the twin is empty."""
    for whole, divided in zip(wholes, shards, strict=True):
        assert len(whole["completions"]) == len(divided["completions"]) == 2
        assert all(map(torch.equal, whole["completions"], divided["completions"]))
        assert divided["logs"] == [pytest.approx(log, rel=1e-5, abs=1e-6, nan_ok=True) for log in whole["logs"]]
        differences = [log[DIFFERENCE] for log in divided["logs"] if DIFFERENCE in log]
        assert len(differences) == 2 and max(differences) < 1e-5, "each step measures its completions"
        assert "gathered once for all completions" in divided["said"]
        assert all(divided["divided"]) and not any(divided["left"])


@pytest.mark.parametrize("adapters", [None, lora()], ids=["full", "LoRA"])
def test_generator_under_fsdp2_writes_what_ddp_writes_and_leaves_the_weights_divided(
    adapters: Any, tmp_path: Path
) -> None:
    wholes, shards = (in_two(tmp_path, sharded=sharded, lora=adapters) for sharded in (False, True))
    assert_writes_what_whole_weights_write(wholes, shards)


def test_generator_writes_for_layers_that_accelerate_checkpoints(tmp_path: Path) -> None:
    """Accelerate puts each layer into a wrapper after `decode_in_graphs`, which changes the names of the weights."""

    def note(rank: int, made: GraphGeneration) -> None:
        assert not any("_checkpoint_wrapped_module" in name for name, _ in made.model.named_parameters())

    wholes = in_two(tmp_path, sharded=False)
    shards = in_two(tmp_path, fsdp={"activation_checkpointing": True}, change=note)
    assert_writes_what_whole_weights_write(wholes, shards)


def refuse(rank: int, made: GraphGeneration) -> None:
    if rank == 1:
        vars(made)["_missing_memory"] = lambda *_: "whole weights do not fit"


def lose_memory(rank: int, made: GraphGeneration) -> None:
    def refusal(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if rank == 1:
        vars(generation)["_refusal"] = refusal


def gather_too_little(rank: int, made: GraphGeneration) -> None:
    def fail(_: object) -> None:
        raise PatchError("FSDP2 does not gather lm_head.weight")

    if rank == 1:
        vars(made._twin)["_set"] = fail


def lack_a_module(rank: int, made: GraphGeneration) -> None:
    def fail(_: object) -> None:
        raise AttributeError("no attribute wrapped")

    if rank == 1:
        vars(generation)["_refusal"] = fail


FAULTS = [
    (refuse, "whole weights do not fit"),
    (lose_memory, "the memory does not suffice (OutOfMemoryError: CUDA out of memory)"),
    (gather_too_little, "FSDP2 does not gather lm_head.weight"),
    (lack_a_module, "its modules are not those of the copy (AttributeError: no attribute wrapped)"),
]


@pytest.mark.parametrize(("change", "reason"), FAULTS, ids=[change.__name__ for change, _ in FAULTS])
def test_all_processes_leave_the_generator_if_one_cannot_use_it(change: Any, reason: str, tmp_path: Path) -> None:
    for found in in_two(tmp_path, change=change):
        assert found["said"] == f"TRL's generate: transformers generates, because {reason}"
        assert len(found["completions"]) == len(found["logs"]) - 1 == 2 and not found["error"]
        assert f"transformers generates, because {reason}" in found["warned"]


def test_all_processes_raise_if_one_cannot_use_the_required_generator(tmp_path: Path) -> None:
    for found in in_two(tmp_path, change=lose_memory, required=True):
        assert "UsageError: tigon's generator cannot write the completions: the memory does not" in found["error"]
        assert not found["completions"] and all(found["divided"]) and not any(found["left"])


def test_weights_are_divided_again_after_an_error_in_the_generator(tmp_path: Path) -> None:
    def break_generator(_: int, made: GraphGeneration) -> None:
        from tigon.models.decoding import generator

        def fail(model: Any, *_: object) -> None:
            assert all(not weight.is_meta for weight in model.parameters())
            raise RuntimeError("the generator ended")

        made._unchecked = False
        vars(generator)["generate"] = fail

    for found in in_two(tmp_path, change=break_generator):
        assert found["error"] == "RuntimeError: the generator ended"
        assert found["divided"] == [True] and found["left"] == [0]


def patch_late(_: int, made: GraphGeneration) -> None:
    tigon.patch(unwrap(made.model))


def fuse_late(_: int, made: GraphGeneration) -> None:
    integration.fuse(made.trainer)


def test_patch_after_the_copy_of_the_modules_is_said_once(tmp_path: Path) -> None:
    for found in in_two(tmp_path, change=patch_late):
        said = [one for one in found["warned"] if "tigon.patch of" in one]
        assert len(said) == 1 and "came after decode_in_graphs; call decode_in_graphs after tigon.patch" in said[0]
        assert "without the later tigon.patch of model.layers.0" in found["said"] and not found["error"]


def test_fuse_may_come_after_the_copy_of_the_modules(tmp_path: Path) -> None:
    wholes = in_two(tmp_path, sharded=False)
    shards = in_two(tmp_path, change=fuse_late)
    assert_writes_what_whole_weights_write(wholes, shards)
    assert not any("tigon.patch of" in one for found in shards for one in found["warned"])
