"""Tensor parallelism: which models it divides, and an optimizer whose steps take one mesh at a time.

tests/trainer/test_mesh_runs.py trains with it in four processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forks import forks, in_forks
from tests.short_names import settings_of
from tigon.errors import RecipeError
from tigon.models import MODELS
from tigon.models.verification.tiny import tiny_config
from tigon.techniques import matrix, tensor_parallel
from tigon.techniques.sharding.sharding import check_sizes

TWO = {"gpus": 4, "fsdp": True, "tensor_shards": 2}


@pytest.mark.parametrize(
    ("family", "changes", "settings", "reason"),
    [
        ("llama", {}, {"gpus": 2}, r"sharding.gpus is 2; set sharding.gpus to a multiple of 2 from 4 on"),
        ("llama", {}, {"gpus": 5}, r"sharding.gpus is 5"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, {}, r"6 heads, 3 key heads and an MLP"),
        ("llama", {"intermediate_size": 33}, {}, r"an MLP of width 33"),
        ("mixtral", {}, {}, r"plan for mixtral divides layers by .*, which tigon has not tried"),
        ("gpt2", {}, {}, r"no plan that divides the layers of gpt2"),
        ("llava", {}, {}, r"llava takes images or sound too"),
    ],
)
def test_models_whose_matrices_cannot_be_divided_are_refused(
    family: str, changes: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    config = tiny_config(family, MODELS[family].tiny)
    config.update(changes)
    with pytest.raises(RecipeError, match=reason):
        tensor_parallel.check(config, settings_of({**TWO, **settings}))


def test_models_whose_plans_have_rows_columns_and_norms_of_heads_are_accepted() -> None:
    for family in ("llama", "qwen2", "qwen3"):
        tensor_parallel.check(tiny_config(family, MODELS[family].tiny), settings_of(TWO))


def test_embeddings_of_a_plan_stay_whole() -> None:
    config = tiny_config("llama")
    layers = tensor_parallel.plan_of(config)
    config.base_model_tp_plan = {"embed_tokens": "embedding_rowwise", **config.base_model_tp_plan}
    assert layers and tensor_parallel.plan_of(config) == layers
    tensor_parallel.check(config, settings_of(TWO))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"fsdp": False}, r"sharding\.tensor: 2 with sharding\.fsdp: false: .*use sharding\.fsdp: true"),
        ({"lora_rank": 8}, r"sharding\.tensor: 2 with lora\.rank: 8"),
        ({"precision": "fp8"}, r"sharding\.tensor: 2 with train\.precision: fp8"),
        ({"optimizer": "adamw-torchao-8bit"}, r"use train\.optimizer: adamw"),
    ],
)
def test_techniques_that_were_not_tried_with_divided_matrices_are_refused(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RecipeError, match=reason):
        matrix.check(settings_of({**TWO, **settings}), device="cuda")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"gpus": 4, "fsdp": True, "replicas": 3}, r"set sharding\.replicas to a divisor of 4 below it"),
        ({"gpus": 4, "fsdp": True, "replicas": 4}, r"at least 2 GPUs"),
        ({"gpus": 2, "fsdp": True, "replicas": 2}, r"which needs at least 4 GPUs"),
        ({"gpus": 4, "zero": 3, "zero_copy_ranks": 3}, r"4 is not a multiple of it"),
    ],
)
def test_copies_that_do_not_divide_the_gpus_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        check_sizes(settings_of(settings))


def test_copies_that_divide_the_gpus_are_accepted() -> None:
    for settings in ({"gpus": 4, "replicas": 2}, {"gpus": 16, "replicas": 8}, {"gpus": 4, "zero_copy_ranks": 4}):
        check_sizes(settings_of(settings))


def test_optimizer_steps_once_per_mesh_and_keeps_the_groups_of_an_ordinary_run() -> None:
    """The Trainer may have made a group per mesh."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second, third, fourth = model.parameters()
    second.device_mesh = "tp"  # type: ignore[attr-defined]  # a stand-in for a DTensor's
    groups = [{"params": [third, first]}, {"params": [second]}, {"params": [fourth], "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    tensor_parallel.step_by_mesh(model, optimizer)
    assert [group["params"] for group in optimizer.param_groups] == [[first, second, third], [fourth]]
    stepped: list[list[Any]] = []
    optimizer.register_step_pre_hook(
        lambda optimizer, *_: stepped.extend(group["params"] for group in optimizer.param_groups)
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    assert stepped == [[first, third], [second], [fourth]]
    assert [group["params"] for group in optimizer.param_groups] == [[first, second, third], [fourth]]
    assert not any(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def norms_as_rank(rank: int, folder: Path) -> None:
    """The norms of a step whose gradients are finite, and of one in which rank 1 has an infinity."""
    torch.distributed.init_process_group("gloo")
    model = nn.Linear(2, 2)
    tensor_parallel._divided[model] = torch.distributed.group.WORLD, ()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norms = [tensor_parallel.sum_gradients(model)]
    if rank == 1:
        next(model.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
    norms.append(tensor_parallel.sum_gradients(model))
    (folder / f"{rank}.json").write_text(json.dumps([bool(torch.isfinite(norm)) for norm in norms if norm is not None]))
    torch.distributed.barrier()


@forks
def test_a_gradient_that_is_not_finite_in_one_process_is_seen_in_all(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    assert in_forks(lambda rank: norms_as_rank(rank, tmp_path), 2, said=said) == [0, 0], said.read_text()[-3000:]
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[True, False]] * 2
    assert tensor_parallel.sum_gradients(nn.Linear(2, 2)) is None
