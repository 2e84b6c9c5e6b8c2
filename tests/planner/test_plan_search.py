"""The planner's recommendations fit and the trainer accepts them; recipes that were ruled out do not fit."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace

import pytest

from tests.planner.planner_helpers import H200, config_of, small_gpu
from tests.short_names import by_key, settings_of
from tigon.errors import UsageError
from tigon.objectives import recipe_checks
from tigon.planner.estimate import estimate
from tigon.planner.gpus import GIB
from tigon.planner.render import as_recipe
from tigon.planner.render.json_names import settings_mapping
from tigon.planner.request import Request
from tigon.planner.search import recommend, space
from tigon.planner.search.option import estimate_option
from tigon.planner.search.recommend import plan, search
from tigon.planner.search.space import SearchProblem
from tigon.techniques import SEARCHES, matrix, tiling
from tigon.techniques.keys.settings import Settings

pytestmark = pytest.mark.usefixtures("in_one_process")
CHECKPOINTINGS = SEARCHES["train.checkpointing"].candidates(None)
KINDS = ("none", "selective", "every-2", "full", "offload")
"""Values that treat all layers alike, or every second one."""
SHAPE = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704}


def asked_of(
    memory_mib: float, *, batch: int = 8, seq: int = 512, effective_batch: int | None = None, **given
) -> SearchProblem:
    """A question about a small model on a small GPU."""
    free = frozenset(SEARCHES) - set(by_key(given))
    config = config_of("llama", **SHAPE)
    request = Request(model="tigon-demo", config=config, batch=batch, seq=512, settings=settings_of(given))
    return SearchProblem(request=request, free=free, gpu=small_gpu(memory_mib), effective_batch=effective_batch)


CASES = {
    "plenty": {"memory_mib": 4000},
    "tight": {"memory_mib": 450},
    "four GPUs": {"memory_mib": 200, "gpus": 4, "optimizer": "adamw", "checkpointing": "none"},
    "LoRA": {"memory_mib": 400, "lora_rank": 8, "optimizer": "adamw"},
    "QLoRA": {"memory_mib": 400, "lora_rank": 8, "quantized": True},
    "layerwise": {"memory_mib": 300, "optimizer": "galore-layerwise"},
    "NVMe": {"memory_mib": 300, "zero": 3, "offload": "nvme"},
    "kernels none": {"memory_mib": 2000, "kernels": "none", "attention": "eager"},
}


def from_yaml(text, tmp_path, overrides=()):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return recipe_checks.load(path, overrides, gpu_present=lambda: True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_recommended_recipe_fits_and_the_trainer_accepts_it(case, tmp_path):
    problem = asked_of(**case)
    found, _ = search(problem)
    assert found, "each of these cases has something that fits"
    for one in found:
        request = one.option.request
        assert one.option.estimate == estimate(request, gpu=problem.gpu, evaluation=False)
        assert one.option.estimate.device_bytes <= problem.gpu.memory_bytes
        assert not matrix.refusals(request.settings)
        recipe = from_yaml(as_recipe.yaml_text(request), tmp_path)
        # ... and its command says the same to a recipe that says otherwise
        words = shlex.split(as_recipe.command(request))
        assert words[:3] == ["tigon", "train", "recipe.yaml"]
        other = "train: {steps: 3, optimizer: sgd, checkpointing: full, precision: fp32, gradient_accumulation: 7}"
        by_command = from_yaml(other, tmp_path, words[4::2])
        for made in (recipe, by_command):
            assert settings_mapping(made.settings()) == settings_mapping(request.settings)
            assert (made.train.batch_size, made.data.sequence_length) == (request.batch, request.seq)
            assert (made.train.max_grad_norm > 0) == request.clipped


def test_recommendations_are_fastest_first_and_change_numbers_only_for_speed():
    found, _ = search(asked_of(450))
    speeds = [one.option.estimate.tokens_per_s for one in found]
    ranks = [space.change_rank(one.option.request.settings) for one in found]
    assert len(found) > 1 and speeds == sorted(speeds, reverse=True) and ranks == sorted(set(ranks), reverse=True)


@pytest.mark.parametrize("memory_mib", (200,))
def test_ruled_out_recipes_do_not_fit(memory_mib):
    """Lower bounds stand in for traces: none of them may rule out a recipe that fits."""
    problem = asked_of(memory_mib, precision="amp-bf16", optimizer="adamw", zero=0, fsdp=False, offload="none")
    ruled_out = [other for one in search(problem)[0] for other in one.cheaper]
    assert any("more than" in other.reason for other in ruled_out)
    for other in ruled_out:
        needs = estimate_option(
            space.as_request(problem.request, other.settings, other.batch), problem.gpu
        ).estimate.device_bytes
        assert needs > problem.gpu.memory_bytes and needs >= other.device_bytes


@pytest.mark.parametrize("memory_mib", (350,))
def test_recommended_recipe_is_the_fastest_of_its_kind(memory_mib):
    problem = asked_of(memory_mib, batch=4, precision="amp-bf16", optimizer="adamw", zero=0, fsdp=False, offload="none")
    (best,) = search(problem)[0]
    speeds = []
    for checkpointing, (batch, accumulate) in itertools.product(KINDS, space.splits(problem)):
        settings = problem.request.settings.having(
            {"train.checkpointing": checkpointing, "train.gradient_accumulation": accumulate}
        )
        option = estimate_option(space.as_request(problem.request, settings, batch), problem.gpu)
        if option.fits(problem.gpu):
            speeds.append(option.estimate.tokens_per_s)
    # `auto` chooses by layers, so it is at least as fast as any of these, except for its leap to larger micro-batches
    assert best.option.estimate.tokens_per_s >= 0.97 * max(speeds)


def test_layers_are_tiled_and_grouped_only_if_nothing_else_fits(monkeypatch):
    monkeypatch.setattr(tiling, "TILE_TOKENS", 512)
    config = config_of("llama", intermediate_size=1024, max_position_embeddings=4096, num_hidden_layers=3)
    fixed = Settings.of({"train.optimizer": "sgd", "train.precision": "bf16"})
    request = Request(model="tigon-demo", config=config, batch=2, seq=4096, settings=fixed)
    free = frozenset({"train.checkpointing", "train.mlp_tile_tokens", "train.attention_groups"})
    problem = replace(asked_of(4000), request=request, free=free)
    pieces = {"train.mlp_tile_tokens": 512, "train.attention_groups": 2}
    kinds = (
        {"train.checkpointing": "offload-attention", **pieces},
        {"train.checkpointing": "offload", **pieces},
    )
    assert space.recomputations(problem, fixed)[-2:] == [*kinds]
    masked = replace(problem, request=replace(request, masked=True))
    assert kinds[0] not in space.recomputations(masked, fixed), "with a mask attention runs twice"
    [plenty] = search(problem)[0]
    assert plenty.option.request.settings.train.mlp_tile_tokens == 0
    in_pieces = estimate_option(replace(request, settings=fixed.having(kinds[1])), problem.gpu)
    tight = replace(problem.gpu, memory_bytes=int(1.03 * in_pieces.estimate.device_bytes))
    [found] = search(replace(problem, gpu=tight))[0]
    assert {key: found.option.request.settings.value(key) for key in pieces} == pieces


def test_search_goes_on_past_a_model_whose_mlps_cannot_be_tiled(monkeypatch):
    """The last rung before tiles needs one byte too many, so tiles are tried in every placement."""
    monkeypatch.setattr(tiling, "TILE_TOKENS", 64)
    problem = asked_of(4000, optimizer="sgd", precision="bf16", accumulate=1)
    experts = config_of("llama", model_type="mixtral", num_local_experts=2, num_hidden_layers=2)
    problem = replace(problem, request=replace(problem.request, config=experts))
    kept = problem.request.settings.having({"train.checkpointing": CHECKPOINTINGS[-1]})
    needs = estimate_option(
        space.as_request(problem.request, kept, problem.request.batch), problem.gpu
    ).estimate.device_bytes
    seen, consider = [], recommend._Search.consider

    def watched(self, settings, batch, unchecked):
        seen.append((settings, consider(self, settings, batch, unchecked)))
        return seen[-1][1]

    monkeypatch.setattr(recommend._Search, "consider", watched)
    found, _ = search(replace(problem, gpu=replace(problem.gpu, memory_bytes=needs - 1)))
    assert not found
    tiled = [(settings.sharding.fsdp, result.reason) for settings, result in seen if settings.train.mlp_tile_tokens]
    assert {fsdp for fsdp, _ in tiled} == {False, True}, "the search ends with the first that cannot be tiled"
    assert all("has no dense MLP" in reason for _, reason in tiled)


def test_splits_of_the_batch_keep_the_number_of_sequences():
    for problem in (asked_of(400), asked_of(400, batch=7), asked_of(400, effective_batch=48)):
        assert all(batch * accumulate == problem.samples_per_step for batch, accumulate in space.splits(problem))
    assert space.splits(asked_of(400, accumulate=3)) == [(8, 3)]


def test_pair_that_the_matrix_excludes_is_refused():
    with pytest.raises(UsageError, match="GaLore projects whole matrices"):
        plan(asked_of(400, optimizer="galore", zero=2))


def test_recommended_recipes_leave_headroom_on_the_gpu():
    problem = asked_of(450, optimizer="adamw", precision="bf16", zero=0, fsdp=False, offload="none")
    found = plan(problem)
    assert found.problem.gpu.memory_bytes < problem.gpu.memory_bytes == found.gpu.memory_bytes
    limit = problem.gpu.memory_bytes * (1 - space.HEADROOM)
    assert all(one.option.estimate.device_bytes <= limit for one in found.recommended)


def test_large_gpu_takes_the_whole_batch_without_checkpointing():
    (first, *_), _ = search(replace(asked_of(1), gpu=replace(H200, memory_bytes=100 * GIB)))
    assert (
        first.option.request.settings.train.gradient_accumulation == 1
        and first.option.request.settings.train.checkpointing == "none"
    )
