"""The rules of the objectives' recipe sections, as a recipe file breaks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")
from tigon.errors import RecipeError
from tigon.objectives.recipe_checks import heads_refusals, load, loads_saved, require_heads, without_phases
from tigon.recipe.keys import SECTIONS, HeadsConfig, Recipe, TrainConfig
from tigon.techniques import SWITCHES
from tigon.techniques.keys.settings import Settings

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "adapters in stage 1": ({"heads": {"stage": 1}, "lora": {"rank": 2}}, "set heads.stage: 2, or leave lora.rank out"),
    "checkpointing in stage 1": (
        {"heads": {"stage": 1}, "train": {"checkpointing": "full"}}, "set train.checkpointing: none",
    ),
    "adapters on the head": (
        {"heads": {"stage": 2}, "lora": {"rank": 2, "targets": ["head"]}}, "leave head out of lora.targets",
    ),
    "adapters of sharded weights": (
        {"heads": {"stage": 2}, "lora": {"rank": 2}, "sharding": {"zero": 3}}, "set sharding.zero to 2 or less",
    ),
    "adapters of FSDP2's weights": (
        {"heads": {"stage": 2}, "lora": {"rank": 2}, "sharding": {"fsdp": True}}, "sharding.fsdp: false",
    ),
    "adapters and MTP": ({"heads": {"stage": 2, "kind": "mtp"}, "lora": {"rank": 2}}, "use heads.kind: medusa"),
    "blocks of MTP": ({"heads": {"stage": 1, "kind": "mtp", "layers": 2}}, "heads.layers is for medusa heads"),
    "weights of MTP": ({"heads": {"stage": 1, "kind": "mtp", "output": "separate"}}, "always shares the model's"),
    "layerwise updates": (
        {"heads": {"stage": 1}, "train": {"optimizer": "galore-layerwise", "max_grad_norm": 0}}, "use galore",
    ),
    "Muon": ({"heads": {"stage": 2}, "train": {"optimizer": "muon"}}, "set train.optimizer: adamw"),
    "Liger": ({"heads": {"stage": 1}, "model": {"kernels": "liger"}}, "which Liger Kernel lacks"),
    "heads without a stage": ({"heads": {"count": 2}}, "would do nothing without heads.stage, which is not given"),
    "a ramp to nowhere": ({"heads": {"stage": 1, "ramp": 0.5}}, "would do nothing without heads.schedule"),
}  # fmt: skip


def written(folder: Path, sections: dict[str, dict[str, Any]]) -> Path:
    import yaml

    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**sections, "train": {"steps": 1, **sections.get("train", {})}}))
    return path


@pytest.mark.parametrize("case", WRONG)
def test_recipe_that_breaks_a_rule_is_refused_with_the_way_out(case: str, tmp_path: Path) -> None:
    sections, words = WRONG[case]
    with pytest.raises(RecipeError, match=r"^\S*recipe\.yaml(:\d+)?: ") as caught:
        load(written(tmp_path, sections), gpu_present=lambda: False)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_recipe_of_an_experiment_may_break_the_rules(tmp_path: Path) -> None:
    path = written(tmp_path, WRONG["adapters in stage 1"][0])
    assert load(path, gpu_present=lambda: False, checked=False).lora.rank == 2


def test_saved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    path = written(tmp_path, {"heads": {"stage": 2, "count": 3}})
    assert loads_saved(path).heads == HeadsConfig(stage=2, count=3)


def test_command_for_heads_requires_a_stage() -> None:
    with pytest.raises(RecipeError, match=r"heads\.stage is not given; set it to 1 .* or use tigon train"):
        require_heads(Path("recipe.yaml"), Recipe(train=TrainConfig(steps=1)))
    require_heads(Path("recipe.yaml"), Recipe(train=TrainConfig(steps=1), heads=HeadsConfig(stage=1)))


def test_profile_leaves_out_the_phase_before_the_heads() -> None:
    recipe = Recipe(train=TrainConfig(steps=1), heads=HeadsConfig(stage=1, base_steps=5))
    assert without_phases(recipe).heads == HeadsConfig(stage=1)


def test_choices_that_nothing_excludes_are_not_refused() -> None:
    assert not list(heads_refusals(2, "medusa", Settings.of({"lora.rank": 8, "train.checkpointing": "full"})))
    assert not list(heads_refusals(1, "mtp", Settings.of({"train.optimizer": "galore", "sharding.zero": 3})))


def test_heads_are_refused_if_processes_share_rows() -> None:
    (reason,) = heads_refusals(2, "medusa", Settings.of({"sharding.gpus": 2, "sharding.sequence": 2}))
    assert reason.endswith("set sharding.sequence: 1")


def test_every_key_that_needs_a_technique_says_so() -> None:
    """The other keys of the section do nothing without the rank, or are refused without it."""
    switched = {key for row in SWITCHES for key in row.keys} | {"lora.base_offload"}
    assert {f"lora.{name}" for name in SECTIONS["lora"].__dataclass_fields__} - {"lora.rank"} <= switched
