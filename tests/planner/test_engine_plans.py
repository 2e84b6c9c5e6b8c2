"""Each pair of an objective and an engine has a plan, unless `tigon train` refuses it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from planner_helpers import H200
from transformers import AutoConfig

from benchmarks.pages.engine_pairs import ENGINES, FEATURES, WORKING, Engine, Feature
from tests.trainer.tiny_checkpoint import EXPERTS
from tigon.errors import RecipeError
from tigon.models.loading.config import load_config
from tigon.objectives import recipe_checks
from tigon.recipe.keys import Recipe
from tigon.techniques import TECHNIQUES
from tigon.trainer.guards import prediction

pytest.importorskip("peft")
TWO = "sharding.gpus=2"
FOUR = ("sharding.gpus=4", "sharding.fsdp=true")
MORE_ENGINES = (
    Engine("FSDP2 with copies", (*FOUR, "sharding.replicas=2")),
    Engine("FSDP2, tensor groups", (*FOUR, "sharding.tensor=2")),
    Engine("FSDP2 on the host", (TWO, "sharding.fsdp=true", "sharding.offload=cpu")),
    Engine("ZeRO++", ("sharding.gpus=4", "sharding.zero=3", "sharding.zero_copy_ranks=2")),
    Engine("ZeRO-3 on the host", (TWO, "sharding.zero=3", "sharding.offload=cpu")),
    Engine("rows of two", (TWO, "sharding.sequence=2")),
)
UNPAIRED = (
    Feature("full", "Full fine-tuning", {}),
    Feature("classify", "Classification", {"train": {"objective": "classify"}}),
    Feature("classify-tokens", "Classification of tokens", {"train": {"objective": "classify_tokens"}}),
)
"""What the table of docs/several-gpus.md does not list."""
SHAPE: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def recipe_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Feature, Engine], Recipe]:
    """The recipe of a pair, for a model of three layers."""
    for name, model_type, more in (("dense", "llama", {}), ("experts", "qwen3_moe", EXPERTS)):
        AutoConfig.for_model(model_type, **SHAPE, **more).save_pretrained(tmp_path / name)
    AutoConfig.for_model("llama", **SHAPE).save_pretrained(tmp_path / "teacher")
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)

    def recipe_of(feature: Feature, engine: Engine) -> Recipe:
        sections = {name: dict(values) for name, values in feature.sections.items()}
        sections["model"] = {"name": str(tmp_path / ("experts" if feature.experts else "dense"))}
        sections["data"] = {"source": "rows.jsonl", "sequence_length": 64}
        sections["train"] = {"steps": 2, "batch_size": 2, "precision": "amp-bf16", **sections.get("train", {})}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        return recipe_checks.load(path, engine.keys, gpu_present=lambda: True)

    return recipe_of


def assert_planned(recipe: Recipe) -> None:
    config, settings = load_config(recipe.model.name), recipe.settings(precision=recipe.train.precision)
    found = prediction.predict(recipe, config, settings, H200, evaluated=False).option.estimate
    assert found.peak_allocated_bytes > 0 and found.step_s > 0


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_pairs_that_train_have_a_plan(feature: Feature, recipe_of: Callable[..., Recipe]) -> None:
    engines = [engine for engine in ENGINES if (feature, engine) in WORKING]
    assert engines
    for engine in engines:
        assert_planned(recipe_of(feature, Engine(engine.title, (TWO, *engine.keys))))


@pytest.mark.parametrize("feature", (*FEATURES, *UNPAIRED), ids=lambda feature: feature.name)
def test_a_run_that_is_not_refused_has_a_plan(feature: Feature, recipe_of: Callable[..., Recipe]) -> None:
    more = (Engine(engine.title, (TWO, *engine.keys)) for engine in ENGINES if feature in UNPAIRED)
    for engine in (*MORE_ENGINES, *more):
        try:
            recipe = recipe_of(feature, engine)
            config = load_config(recipe.model.name)
            for technique in TECHNIQUES.values():
                technique.fits(config, recipe.settings(precision=recipe.train.precision))
        except RecipeError as error:
            assert "; use " in str(error) or "; set " in str(error), "a refusal names the next step"
            continue
        assert_planned(recipe)
