"""recipes/models: each is what its script writes, stands in the table of docs/model-recipes.md, and fits its GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("rich")
from benchmarks.pages import model_recipes
from tigon.cli.plan_request import Flags, problem_of
from tigon.models import hybrid_layers
from tigon.planner.gpus import GIB, find_gpu
from tigon.planner.search import space
from tigon.planner.search.recommend import estimate_option

ROOT = Path(__file__).parents[2]
SAMPLE = ("smollm2-135m/lora-12gb.yaml", "qwen3-0.6b/qlora-12gb.yaml", "llama-3.1-8b/qlora-8gb.yaml")
"""Small models, a frozen base in 4 bits, and frozen layers on the host."""
OTHER_VERSIONS = 0.05
"""How far a plan may be from the table's with other versions of torch and transformers."""


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def rows() -> dict[str, list[str]]:
    """model/file -> the cells of its row in the table."""
    page = (ROOT / model_recipes.PAGE).read_text(encoding="utf-8")
    table = page.partition(model_recipes.BEGIN)[2].partition(model_recipes.END)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return {found[1]: cells for cells in lines if (found := re.match(r"\[(.+?)\]", cells[0]))}


FILES = sorted(str(path.relative_to(ROOT / "recipes/models")) for path in (ROOT / "recipes/models").glob("*/*.yaml"))


def test_every_recipe_stands_in_the_table_and_belongs_to_a_model_and_method():
    assert FILES and sorted(rows()) == FILES
    known = {str(path.relative_to(model_recipes.FOLDER)) for _, _, path in model_recipes.recipe_files()}
    assert known == set(FILES)


def test_table_by_class_of_gpu_names_the_largest_recipe_that_fits():
    """A link or a name such as `12gb` in each cell, or a dash where no recipe fits."""
    page = (ROOT / model_recipes.PAGE).read_text(encoding="utf-8")
    lines = [line for line in page.partition("## All recipes")[0].splitlines() if line.startswith("| ")]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")][1:] == [f"{gb} GB" for gb in model_recipes.CLASSES]
    for line in lines[1:]:
        _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found = re.search(r"recipes/models/([^/]+)/([a-z]+)-", line)
        assert found is not None, line
        has = sorted(
            model_recipes.memory_class(Path(name)) for name in FILES if name.startswith("/".join(found.groups()))
        )
        for gb, cell in zip(model_recipes.CLASSES, cells, strict=True):
            fitting = [each for each in has if each <= gb]
            assert cell.strip("[").partition("]")[0] == (f"{fitting[-1]}gb" if fitting else "–"), (line, gb)


def test_every_model_has_a_recipe_for_each_of_its_methods():
    names = {(path.split("/")[0], path.split("/")[1].rpartition("-")[0]) for path in FILES}
    assert names == {(model.name, method) for model in model_recipes.MODELS for method in model.methods}


def test_each_class_of_a_model_and_method_has_settings_of_its_own():
    settings: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for name, cells in rows().items():
        model, file = name.split("/")
        settings.setdefault((model, file.rpartition("-")[0]), []).append((cells[4], cells[5], cells[7]))
    assert all(len(set(each)) == len(each) for each in settings.values())


def test_every_recipe_is_what_the_script_writes_for_its_settings():
    for model, method, path in model_recipes.recipe_files():
        gb = int(path.stem.removeprefix(f"{method}-").removesuffix("gb"))
        request = problem_of(Flags(target=str(path), gpu=find_gpu(model_recipes.CLASSES[gb]))).request
        assert path.read_text(encoding="utf-8") == model_recipes.text(model, method, gb, request)
        assert (request.settings.lora.rank is None) == (method == "full")
        assert request.settings.lora.quantize == method.startswith("qlora")
        assert ("experts" in request.settings.lora.targets) == method.endswith("experts")


def beside_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hybrid models are planned with the kernels of flash-linear-attention, whether it is installed or not."""
    library = hybrid_layers.DELTA_RULE.library
    monkeypatch.setattr(
        hybrid_layers, "_installed", lambda kind: library if kind.library == library else hybrid_layers.PYTORCH
    )
    monkeypatch.setattr("tigon.planner.trace.cache.trace_key.found_libraries", lambda: (library,))


def check_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.split("/")[0] in {model.name for model in model_recipes.MODELS if model.hybrid}:
        beside_the_library(monkeypatch)
    cells = rows()[name]
    gb = int(re.search(r"-(\d+)gb", name)[1])
    problem = problem_of(Flags(target=f"recipes/models/{name}", gpu=find_gpu(model_recipes.CLASSES[gb])))
    # As it was chosen: with less memory the allocator gives blocks back sooner, so a plan of the whole card is larger.
    roomy = space.with_headroom(problem.gpu)
    option = estimate_option(problem.request, roomy)
    assert option.fits(roomy)
    assert cells[1] == problem.gpu.name and float(cells[3]) == round(problem.gpu.memory_bytes / GIB, 1)
    assert float(cells[2]) == pytest.approx(option.estimate.device_bytes / GIB, rel=OTHER_VERSIONS, abs=0.06)
    assert float(cells[6].replace(",", "")) == pytest.approx(option.estimate.tokens_per_s, rel=OTHER_VERSIONS)


@pytest.mark.parametrize("name", SAMPLE)
def test_recipe_fits_the_gpu_that_it_is_named_by(name, monkeypatch):
    check_plan(name, monkeypatch)


def smallest() -> list[str]:
    """A recipe of the largest model of each architecture for its smallest GPU, where the plan has the least room.

    The page's script plans all.
    """
    largest = {re.sub(r"(?<=[-ea])[\d.]+[bm]\b", "N", model.name): model.name for model in model_recipes.MODELS}
    by_size: dict[str, str] = {}
    for name in sorted(FILES, key=lambda name: int(name.rpartition("-")[2].removesuffix("gb.yaml")), reverse=True):
        by_size[name.partition("/")[0]] = name
    return sorted(by_size[model] for model in largest.values())


@pytest.mark.second_proof("the sample above shows each method; this plans every architecture")
@pytest.mark.parametrize("name", [name for name in smallest() if name not in SAMPLE])
def test_recipe_for_the_smallest_gpu_of_each_architecture_fits_it(name, monkeypatch):
    check_plan(name, monkeypatch)
