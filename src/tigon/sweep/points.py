"""The points of a sweep: a resolved recipe each, or the reason why `tigon train` would refuse it."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tigon.errors import RecipeError
from tigon.recipe import recipe_file
from tigon.recipe.keys import Recipe
from tigon.sweep.definition import Sweep, Variant, check_key

# Every point trains, and does nothing else.
_TRAINING_ALONE: Mapping[str, Any] = {
    "train.epochs": None, "train.log_steps": 1, "train.eval_steps": None, "train.save_steps": None,
    "data.eval_fraction": 0, "data.eval_source": [], "comparison.steps": 0, "output.save_model": False,
    "output.sample_tokens": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination."""

    variant: str
    axes: Mapping[str, Any]
    recipe: Recipe | None
    refused: str = ""
    """Why there is no recipe."""
    unchecked: bool = False
    key: str = ""
    """A hash of all that the measurement depends on: a record with another key is of another point."""

    @property
    def id(self) -> str:
        """Variant and axes in words, unique in the sweep."""
        return " ".join([self.variant, *(f"{short(name)}={value}" for name, value in self.axes.items())])

    @property
    def file(self) -> str:
        """The id as the beginning of a file name."""
        return f"{re.sub(r'[^A-Za-z0-9._=-]+', '-', self.id)[:80]}-{_digest(self.id)[:8]}"


def short(key: str) -> str:
    """A recipe key without its section; a `name` is called after it."""
    section, _, name = key.rpartition(".")
    return section if name == "name" else name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def expand(
    sweep: Sweep, assignments: Sequence[str], *, memory_limit_bytes: int | None, gpu_present: Callable[[], bool],
    scratch: Path,
) -> list[Point]:  # fmt: skip
    """Every point in the order it is measured: the grid's order, the variants of a grid point next to each other.

    assignments: `--set`, on every recipe. scratch: a folder for a recipe that the sweep file writes out. Raises
    RecipeError for a base recipe that cannot be read, and when every point is refused.
    """
    asked = _assignments(sweep, assignments)
    base = _base_file(sweep, scratch)
    points: dict[str, Point] = {}
    for axes, variant in _combinations(sweep):
        keys = {**sweep.change, **variant.keys, **asked, **axes, **_TRAINING_ALONE, "train.steps": sweep.steps}
        if sweep.rows == "random":  # one document a row: there is no border to mask, which the planner is told so
            keys |= {"data.packing": True, "data.cross_document_attention": True}
        words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        file = variant.recipe or base
        assert file is not None, "a sweep without a base recipe has one for each variant"
        point = Point(variant=variant.name, axes=axes, recipe=None, unchecked=variant.unchecked)
        try:
            recipe = recipe_file.load(file, words, gpu_present=gpu_present, checked=not variant.unchecked)
        except RecipeError as error:
            point = replace(point, refused=_reason(error, file))
        else:
            # what differs from the defaults alone: a new recipe key with its default changes no measurement
            settings = (changed_keys(recipe), sweep.steps, sweep.rows, memory_limit_bytes)
            point = replace(point, recipe=recipe, key=_digest(json.dumps(settings, sort_keys=True))[:16])
        _refuse_namesake(points.setdefault(point.id, point), point, sweep)
    found = list(points.values())
    if all(point.refused for point in found):
        raise RecipeError(f"{sweep.path}: no point can be trained; {found[0].id}: {found[0].refused}")
    return found


def _refuse_namesake(first: Point, second: Point, sweep: Sweep) -> None:
    """Places that several grids of a union share are one point; two points of one name would lose one of them."""
    places = [f"variant {p.variant} at {json.dumps(p.axes, default=str)}" for p in (first, second)]
    if places[0] != places[1]:
        raise RecipeError(
            f"{sweep.path}: two points would be called {first.id!r}: {' and '.join(places)}; rename a variant, or put "
            "one of them into a variant of its own"
        )


def _reason(error: RecipeError, file: Path) -> str:
    """Without the file and `--set`, which is not what the user typed here."""
    return re.sub(rf"^({re.escape(str(file))}(:\d+)?|--set): ", "", str(error))


def _assignments(sweep: Sweep, texts: Sequence[str]) -> dict[str, Any]:
    import yaml

    asked = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise RecipeError(f"--set {text}: expected section.key=value, e.g. --set train.learning_rate=1e-4")
        if check_key(key.strip(), "--set") in sweep.axes:
            raise RecipeError(f"--set {text}: {key} is an axis of {sweep.path}'s grid; change it there")
        try:
            asked[key.strip()] = yaml.safe_load(value)
        except (yaml.YAMLError, *recipe_file.OF_VALUES):
            raise RecipeError(f"--set {text[:200]}: the value is not valid YAML; quote it") from None
    return asked


def _base_file(sweep: Sweep, scratch: Path) -> Path | None:
    import yaml

    if not isinstance(sweep.recipe, Mapping):
        return sweep.recipe
    file = scratch / f"{sweep.name}-recipe.yaml"
    file.write_text(yaml.safe_dump(dict(sweep.recipe), sort_keys=False, allow_unicode=True), encoding="utf-8")
    return file


def _combinations(sweep: Sweep) -> Iterator[tuple[dict[str, Any], Variant]]:
    for grid in sweep.grids:
        for values in itertools.product(*grid.values()):
            for variant in sweep.variants:
                yield dict(zip(grid, values, strict=True)), variant


def changed_keys(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says beyond the defaults, dotted; `train.steps` and the sweep's own keys left out."""
    default, said = Recipe().as_mapping(), recipe.as_mapping()
    return {
        f"{section}.{name}": value
        for section, values in said.items()
        for name, value in values.items()
        if value != default[section][name] and f"{section}.{name}" not in (*_TRAINING_ALONE, "train.steps")
        and section != "output"
    }  # fmt: skip
