"""The points of a sweep. Each has a resolved recipe, or the reason why `tigon train` would refuse it."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tigon.errors import RecipeError
from tigon.objectives import recipe_checks
from tigon.objectives.rules.classify import CLASSIFICATION
from tigon.objectives.rules.post_training import POST_TRAINING
from tigon.recipe.keys import Recipe
from tigon.sweep.definition import TRAINING_ALONE, Sweep, Variant, check_key


@dataclass(frozen=True, kw_only=True)
class Point:
    """One variant at one combination of grid values."""

    variant: str
    axes: Mapping[str, Any]
    recipe: Recipe | None
    refused: str = ""
    """Why the recipe was refused; empty if `recipe` is set."""
    unchecked: bool = False
    key: str = ""
    """Hash of everything that the measurement depends on. A record with another key has other settings."""

    @property
    def id(self) -> str:
        """Variant and axis values as text, unique in the sweep."""
        return " ".join([self.variant, *(f"{short(name)}={value}" for name, value in self.axes.items())])

    @property
    def file(self) -> str:
        """The id as a prefix for file names."""
        return f"{re.sub(r'[^A-Za-z0-9._=-]+', '-', self.id)[:80]}-{_digest(self.id)[:8]}"


def short(key: str) -> str:
    """A recipe key without its section, or the section if the key is `name`."""
    section, _, name = key.rpartition(".")
    return section if name == "name" else name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def expand(
    sweep: Sweep,
    assignments: Sequence[str],
    *,
    memory_limit_bytes: int | None,
    gpu_present: Callable[[], bool],
    scratch: Path,
) -> list[Point]:
    """Every point in measuring order: the order of the grid, with all variants of a grid point next to each other.

    Args:
        sweep: the sweep file.
        assignments: the `--set` options, which apply to every recipe.
        memory_limit_bytes: limit per process; part of each point's key.
        gpu_present: whether the recipes' `on_gpu` values apply.
        scratch: a folder for a base recipe that is written out in the sweep file.

    Raises:
        RecipeError: the base recipe cannot be read, two points have one name, or every point is refused.
    """
    for text in assignments:
        _check_assignment(text, sweep)
    base = _base_file(sweep, scratch)
    points: dict[str, Point] = {}
    for axes, variant in _combinations(sweep):
        file = variant.recipe or base
        assert file is not None, "a sweep without a base recipe has one for each variant"
        own = {**axes, **TRAINING_ALONE, "train.steps": sweep.steps}
        if sweep.rows == "random":  # one document per sequence needs no block mask; these keys tell the planner
            own |= {"data.packing": None, "data.cross_document_attention": True}
        overrides = [*_texts({**sweep.change, **variant.keys}), *assignments, *_texts(own)]
        point = Point(variant=variant.name, axes=axes, recipe=None, unchecked=variant.unchecked)
        try:
            recipe = recipe_checks.load(file, overrides, gpu_present=gpu_present, checked=not variant.unchecked)
            for objectives in (CLASSIFICATION, POST_TRAINING):
                objectives.refuse(recipe, "tigon sweep")
        except RecipeError as error:
            point = replace(point, refused=_reason(error, file))
        else:
            # only the keys that differ from the defaults, so that a new recipe key does not invalidate old records
            settings = (changed_keys(recipe), sweep.steps, sweep.rows, memory_limit_bytes)
            point = replace(point, recipe=recipe, key=_digest(json.dumps(settings, sort_keys=True))[:16])
        _refuse_namesake(points.setdefault(point.id, point), point, sweep)
    expanded = list(points.values())
    if all(point.refused for point in expanded):
        raise RecipeError(f"{sweep.path}: no point can be trained; {expanded[0].id}: {expanded[0].refused}")
    return expanded


def as_yaml(value: Any) -> str:
    """A value of a recipe as YAML in one line.

    JSON will not do: it writes 0.00001 as 1e-05, which YAML reads as text.
    """
    plain = json.loads(json.dumps(value, default=str))
    return yaml.safe_dump(plain, default_flow_style=True, width=math.inf, sort_keys=False).removesuffix("...\n").strip()


def _texts(keys: Mapping[str, Any]) -> list[str]:
    """Recipe keys as `--set` takes them."""
    return [f"{key}={as_yaml(value)}" for key, value in keys.items()]


def _refuse_namesake(first: Point, second: Point, sweep: Sweep) -> None:
    """Refuse two different points that would have one id. A place that several grids share is one point."""
    places = [f"variant {p.variant} at {json.dumps(p.axes, default=str)}" for p in (first, second)]
    if places[0] != places[1]:
        raise RecipeError(
            f"{sweep.path}: two points would be called {first.id!r}: {' and '.join(places)}; rename a variant, or put "
            "one of them into a separate variant"
        )


def _reason(error: RecipeError, file: Path) -> str:
    """The message without the file or `--set` at its start: the sweep's keys come as `--set` texts too."""
    return re.sub(rf"^({re.escape(str(file))}(:\d+)?|--set): ", "", str(error))


def _check_assignment(text: str, sweep: Sweep) -> None:
    key, separator, _ = text.partition("=")
    if not separator:
        raise RecipeError(f"--set {text}: expected section.key=value, e.g. --set train.learning_rate=1e-4")
    if check_key(key.strip(), "--set") in sweep.axes:
        raise RecipeError(f"--set {text}: {key} is an axis of {sweep.path}'s grid; change it there")


def _base_file(sweep: Sweep, scratch: Path) -> Path | None:
    if not isinstance(sweep.recipe, Mapping):
        return sweep.recipe
    file = scratch / f"{sweep.name}-recipe.yaml"
    file.write_text(as_yaml(sweep.recipe), encoding="utf-8")
    return file


def _combinations(sweep: Sweep) -> Iterator[tuple[dict[str, Any], Variant]]:
    for grid in sweep.grids:
        for values in itertools.product(*grid.values()):
            for variant in sweep.variants:
                yield dict(zip(grid, values, strict=True)), variant


def changed_keys(recipe: Recipe) -> dict[str, Any]:
    """Dotted keys whose values differ from the defaults, without `train.steps` and the keys that the sweep sets."""
    default = Recipe().as_mapping()
    return {
        f"{section}.{name}": value
        for section, values in recipe.as_mapping().items()
        for name, value in values.items()
        if section != "output"
        and value != default[section][name]
        and f"{section}.{name}" not in (*TRAINING_ALONE, "train.steps")
    }
