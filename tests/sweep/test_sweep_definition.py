"""A wrong sweep file is one line with the file, the key and what to write; nothing is measured or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tigon.errors import RecipeError
from tigon.sweep import definition, points

RECIPES = Path(__file__).parents[2] / "recipes"

WRONG = {
    "an unknown key": ({"repeat": 2}, "repeat is not a key of a sweep; the nearest is repeats"),
    "an unknown recipe key": ({"grid": {"train.batchsize": [1]}}, "the nearest is train.batch_size"),
    "an empty axis": ({"grid": {"train.batch_size": []}}, "an empty list"),
    "steps in the recipe's words": ({"set": {"train.steps": 4}}, "write steps: in the sweep file"),
    "a key in two places": ({"set": {"train.batch_size": 4}}, "an axis of the grid"),
    "no step left to time": ({"steps": 2, "warmup": 2}, "leaves no step to time"),
    "a baseline that is no variant": ({"baseline": "x"}, "must be one of all"),
    "an axis of words": (
        {"grid": {"model.kernels": ["none"]}, "stop_after_oom": "model.kernels"}, "a key of the grid with numbers",
    ),
    "rows of another kind": ({"rows": "real"}, "one of recipe, random, alpaca"),
    "a name with a path": ({"name": ".."}, "names a folder"),
    "variants and recipes": ({"variants": {"a": {}}, "recipes": "*.yaml"}, "give one of them"),
    "a pattern without files": ({"recipe": None, "recipes": "x*.yaml"}, "matches no file"),
    "no recipe": ({"recipe": None}, "recipe is the path of a recipe file"),
    "half a step": ({"steps": 2.5}, "steps is 2.5, a number; it must be an integer"),
    "no step": ({"steps": 0}, "steps is 0; it must be at least 1 and at most 10,000"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sweep_file_is_refused_with_its_reason(name, write_sweep, here):
    keys, reason = WRONG[name]
    path = write_sweep(**keys) if keys.get("name") != ".." else write_sweep()
    if keys.get("name") == "..":
        path.write_text(path.read_text().replace("name: s", "name: .."))
    with pytest.raises(RecipeError, match="(?s)" + reason.replace("(", r"\(")):
        definition.load(path)


def test_command_refuses_a_wrong_sweep_file_in_one_line(write_sweep, tigon, here):
    code, out, err = tigon("sweep", write_sweep(stepz=3))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "stepz" in err and not (here / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--time-limit", "soon"), "e.g. 500s, 9m or 1h"),
        (("--memory-limit", "24 apples"), "24GiB"),
        (("--set", "train.batch_size=1"), "is an axis"),
        (("--set", "train.learning_rate=fast"), "no point can be trained"),
        (("--only", "["), "not a regular expression"),
        (("--only", "x"), "finds no point"),
    ],
)
def test_wrong_flag_is_refused_and_leaves_no_folder(arguments, said, write_sweep, tigon, here):
    code, _, err = tigon("sweep", write_sweep(), *arguments)
    assert code == 2 and said in err and err.count("\n") == 1
    assert not (here / "runs").exists()


NAMESAKES = {
    "a number and its text": {"grid": {"model.name": [1, "1"]}},
    "keys of two sections": {"grid": [{"train.seed": [1]}, {"model.config.seed": [1]}]},
    "a variant called like a place": {"grid": [{"train.seed": [1]}, {}], "variants": {"a": {}, "a seed=1": {}}},
}


def test_small_numbers_of_a_recipe_stay_numbers(write_sweep, here):
    recipe = {"model": {"name": "tigon-demo", "config": {"rms_norm_eps": 0.00001}}}
    read = definition.load(write_sweep(recipe=recipe, set={"train.learning_rate": 0.00002}))
    (first, *_) = points.expand(read, (), memory_limit_bytes=None, gpu_present=lambda: False, scratch=here)
    assert first.recipe is not None, first.refused
    assert first.recipe.model.config["rms_norm_eps"] == 1e-05 and first.recipe.train.learning_rate == 2e-05
    assert points.as_yaml({"a": 1e-05, "b": (1, None)}) == "{a: 1.0e-05, b: [1, null]}"


@pytest.mark.parametrize("name", NAMESAKES)
def test_two_points_of_one_name_are_refused(name, write_sweep, here):
    with pytest.raises(RecipeError, match=r"two points would be called '.*=1': variant .* and variant .*; rename"):
        _expand(write_sweep(**NAMESAKES[name]), here)


def _expand(path: Path, here: Path, *assignments: str) -> list[points.Point]:
    read = definition.load(path)
    return points.expand(read, assignments, memory_limit_bytes=None, gpu_present=lambda: False, scratch=here)


def test_union_of_grids_has_every_point_once(write_sweep, here):
    grids = [
        {"train.batch_size": [1, 2], "data.sequence_length": [8]},
        {"train.batch_size": [2], "data.sequence_length": [8, 16]},
    ]
    found = _expand(write_sweep(grid=grids, variants={"a": {}, "b": {"model.kernels": "none"}}), here)
    places = {(p.variant, p.axes["train.batch_size"], p.axes["data.sequence_length"]) for p in found}
    assert len(found) == len(places) == 6
    assert all(p.recipe.train.batch_size == p.axes["train.batch_size"] for p in found)
    assert {p.recipe.model.kernels for p in found if p.variant == "b"} == {"none"}


def test_excluded_pair_is_refused_and_the_other_points_remain(write_sweep, here):
    found = _expand(write_sweep(variants={"good": {}, "bad": {"train.optimizer": "galore", "sharding.zero": 2}}), here)
    assert [bool(p.refused) for p in found] == [False, True, False, True]
    assert "ZeRO hands the optimizer flat slices" in found[1].refused


def test_unchecked_variant_with_an_excluded_pair_is_accepted(write_sweep, here):
    keys = {"train.optimizer": "galore", "sharding.zero": 2, "unchecked": True}
    assert all(p.recipe is not None for p in _expand(write_sweep(variants={"bad": keys}), here))


def test_key_of_a_point_changes_with_what_it_trains_and_not_with_the_title(write_sweep, here):
    before = _expand(write_sweep(), here)[0]
    assert _expand(write_sweep(title="another"), here)[0].key == before.key
    assert _expand(write_sweep(), here, "train.learning_rate=1")[0].key != before.key
    assert _expand(write_sweep(steps=5), here)[0].key != before.key


SWEEPS = [*sorted((RECIPES / "study").glob("*.yaml")), RECIPES / "two-gpus.sweep.yaml"]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_committed_sweep_has_no_refused_point(path, tmp_path):
    if path.stem == "base":
        pytest.skip("a recipe, not a sweep")
    read = definition.load(path)
    assert read.name == path.stem.removesuffix(".sweep")
    found = points.expand(read, (), memory_limit_bytes=None, gpu_present=lambda: True, scratch=tmp_path)
    assert not [f"{p.id}: {p.refused}" for p in found if p.refused]


def test_every_technique_is_measured_in_the_study():
    sweeps = [definition.load(RECIPES / "study" / f"{name}.yaml") for name in ("techniques", "techniques-two-gpus")]
    measured = {variant.name for sweep in sweeps for variant in sweep.variants}
    elsewhere = {
        "adamw",  # in mixed precision it is amp-bf16's recipe
        "cuda-graphs",  # docs/training-benchmarks.md
        "base-offload",  # needs adapters; docs/techniques/lora.md
        "qat",  # on a CPU: docs/techniques/precision.md
        *("muon", "schedule-free"),  # their rows have not been measured
        *("ademamix", "ademamix-8bit", "paged-ademamix", "paged-ademamix-8bit"),
        *("sequence-parallel", "ring-attention"),  # a plan of one node refuses shared rows
        *("fsdp2-hybrid", "tensor-parallel", "zero-3-hpz"),  # need four GPUs
        *("zero-3-int8-weights", "zero-3-int4-gradients"),  # no GPU has run them
    }
    assert {path.stem for path in (RECIPES / "techniques").glob("*.yaml")} - measured == elsewhere
