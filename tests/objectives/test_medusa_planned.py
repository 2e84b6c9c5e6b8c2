"""Heads as the planner sees them: what it refuses is what a recipe refuses, and what it says a recipe takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from tests.short_names import settings_of
from tigon.errors import RecipeError
from tigon.medusa import HeadsSpec, Objective
from tigon.models.loading.config import load_config
from tigon.objectives import recipe_checks
from tigon.objectives.base import PlannedObjective
from tigon.objectives.medusa import PlannedMedusa
from tigon.planner.render import as_recipe
from tigon.planner.request import Request
from tigon.techniques.keys.settings import Settings

CASES: tuple[dict[str, Any], ...] = (
    {}, {"checkpointing": "full"}, {"checkpointing": "offload"}, {"lora_rank": 8}, {"kernels": "liger"},
    {"kernels": "none"}, {"optimizer": "galore"}, {"optimizer": "galore-layerwise"}, {"zero": 3}, {"fsdp": True},
    {"lora_rank": 8, "zero": 3}, {"lora_rank": 8, "zero": 2}, {"lora_rank": 8, "fsdp": True},
    {"lora_rank": 8, "checkpointing": "full"}, {"gpus": 2}, {"accumulate": 4},
)  # fmt: skip


def yaml_of(heads: PlannedMedusa, settings: Settings) -> str:
    """The recipe that a plan with these heads and settings prints."""
    request = Request(
        model="tigon-demo", config=load_config("tigon-demo"), batch=2, seq=64, settings=settings, objective=heads,
        clipped=settings.train.optimizer != "galore-layerwise",
    )  # fmt: skip
    return as_recipe.yaml_text(request)


@pytest.mark.parametrize("kind", ["medusa", "mtp"])
@pytest.mark.parametrize("stage", [1, 2])
def test_planner_and_recipe_refuse_the_same_heads(stage: int, kind: str, tmp_path: Path) -> None:
    heads = PlannedMedusa(HeadsSpec(kind=kind, count=2, shared=kind == "mtp"), Objective(stage=stage))
    path, refused = tmp_path / "recipe.yaml", []
    for case in CASES:
        settings = settings_of(case)
        path.write_text(yaml_of(heads, settings))
        reasons = heads.refusals(settings)
        assert all(reason.count(";") == 1 and "\n" not in reason for reason in reasons)
        if reasons:
            refused.append(case)
            with pytest.raises(RecipeError):
                recipe_checks.load(path, gpu_present=lambda: True)
        else:
            made = recipe_checks.load(path, gpu_present=lambda: True)
            assert (made.heads.stage, made.heads.kind, made.heads.count) == (stage, kind, 2)
            assert made.settings() == settings
    assert {"kernels": "liger"} in refused and {} not in refused


def test_search_recommends_nothing_that_the_heads_exclude() -> None:
    """Stage 1 excludes the only rung that is tried."""
    from tigon.planner.gpus import find_gpu
    from tigon.planner.search import recommend, space

    heads = PlannedMedusa(HeadsSpec(count=2, shared=True), Objective(stage=1))
    fixed = Settings.of({"train.checkpointing": "full"})
    request = Request(
        model="tigon-demo", config=load_config("tigon-demo"), batch=1, seq=64, settings=fixed, objective=heads
    )
    problem = space.SearchProblem(request=request, free=frozenset({"train.precision"}), gpu=find_gpu("h200"))
    found, why = recommend.search(problem)
    assert not found and any("keeps no activations" in reason for reason in why)
    plain = dataclasses.replace(problem, request=dataclasses.replace(request, objective=PlannedObjective()))
    assert recommend.search(plain)[0]
