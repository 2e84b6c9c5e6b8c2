"""The sweep file: a base recipe, the keys that vary, and how each point is measured.

name: quick
recipe: ../quickstart.yaml             # a file, or the recipe itself as a mapping
grid:                                  # every combination; a list of mappings gives their union
  train.batch_size: [4, 8]
variants:                              # every variant is measured at every point of the grid
  unpatched: {model.kernels: none}
  tigon: {model.kernels: tigon}
recipes: ../techniques/*.yaml          # instead of variants: one recipe file per variant
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from tigon.errors import RecipeError
from tigon.recipe.keys import SECTIONS
from tigon.recipe.recipe_file import read_yaml
from tigon.recipe.rules import folder_name_problem
from tigon.techniques.keys.section import CONFIG, Section, complaint, key

NAME_CHARACTERS = 60
MAX_COUNT = 10_000
UNCHECKED = "unchecked"
TRAINING_ALONE: Mapping[str, Any] = {
    "train.epochs": None,
    "train.log_steps": 1,
    "train.eval_steps": None,
    "train.save_steps": None,
    "train.save_async": False,
    "train.load_best": False,
    "train.early_stopping_patience": None,
    "eval.generate": [],
    "eval.lm_eval": [],
    "data.eval_fraction": 0,
    "data.eval_source": [],
    "comparison.steps": 0,
    "output.save_model": False,
    "output.sample_tokens": 0,
}
"""The values that the sweep sets for every point. Points only train: they do not evaluate, save or compare."""
_EVALUATES = ("train.eval_steps", "train.early_stopping_patience", "eval.generate", "eval.lm_eval")
_SAVES = ("train.save_steps", "train.save_async", "train.load_best")
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("train.steps", "train.epochs"), "steps: in the sweep file"),
    **dict.fromkeys(_EVALUATES, "nothing: a sweep does not evaluate"),
    **dict.fromkeys(_SAVES, "nothing: a sweep saves no checkpoints"),
    **dict.fromkeys(("output.name", "output.folder"), "--out"),
    "train.log_steps": "nothing: every step is recorded",
    "train.report_to": "nothing: a sweep has its own report",
    "comparison.steps": "variants: in the sweep file",
    "output.save_model": "nothing: a sweep saves no model",
}
"""Keys that a sweep file may not set, because their values would be ignored, with what to write instead."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A named change to the base recipe, or a separate recipe file."""

    name: str
    keys: Mapping[str, Any]
    recipe: Path | None = None
    unchecked: bool = False
    """Measure it even if `tigon train` refuses the combination. Meant for baselines."""


def _name_problem(name: str) -> str | None:
    problem = folder_name_problem(name, NAME_CHARACTERS)
    return problem and f"it names a folder: {problem}"


@dataclass(frozen=True, config=CONFIG)
class Sweep(Section):
    """The contents of a sweep file."""

    path: Path
    recipe: Path | Mapping[str, Any] | None
    """None if every variant has its own recipe file."""
    change: Mapping[str, Any]
    """The file's `set`: changes to every recipe, with dotted keys."""
    grids: tuple[Mapping[str, tuple[Any, ...]], ...]
    variants: tuple[Variant, ...]
    name: str = key("", invalid=_name_problem)
    """Name of the results folder."""
    title: str = key("", prose=True)
    """Title of the report."""
    about: str = key("", prose=True)
    """Introduction of the report."""
    rows: str = key("recipe", choices=("recipe", "random", "alpaca"))
    """The samples."""
    steps: int = key(5, minimum=1, maximum=MAX_COUNT)
    """Steps per point."""
    warmup: int = key(1, minimum=0, maximum=MAX_COUNT)
    """Steps that are not timed."""
    repeats: int = key(1, minimum=1, maximum=MAX_COUNT)
    """Processes per point."""
    stop_after_oom: str | None = key(None)
    """An axis of numbers; larger values are skipped after out of memory."""
    memory_limit: str | int | None = key(None)
    """The same as --memory-limit, such as 24GiB."""
    timeout: float = key(1800.0, above=0)
    """Seconds after which a point is ended."""
    baseline: str = key("")
    """The variant that the other variants are compared with."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Every key that a grid varies, in the order of the file."""
        return tuple(dict.fromkeys(key for grid in self.grids for key in grid))


_STRUCTURE = ("recipe", "set", "grid", "variants", "recipes")
_VALUES = tuple(field.name for field in dataclasses.fields(Sweep) if field.default is not dataclasses.MISSING)
_KEYS = (*_STRUCTURE, *_VALUES)


def load(path: Path) -> Sweep:
    """Read and check a sweep file. Raises RecipeError for a file that cannot be read or has a bad key or value."""
    form = f"a mapping with the keys {', '.join(_KEYS)}"
    raw, lines = read_yaml(path, "sweep", form, "recipes/study/quick.yaml")
    for unknown in (name for name in raw if name not in _KEYS):
        raise RecipeError(f"{_at(path, lines, unknown)}: {unknown} is not a key of a sweep; {_nearest(unknown, _KEYS)}")
    variants = _variants(raw, path)
    given = {"name": path.stem, "baseline": variants[0].name, **{k: raw[k] for k in _VALUES if k in raw}}
    given = {"title": given["name"], **given}
    for text in ("title", "about"):
        if isinstance(given.get(text), str):
            given[text] = " ".join(given[text].split())
    try:
        sweep = Sweep(
            path=path,
            recipe=_recipe(raw, path),
            change=_dotted(raw.get("set") or {}, path, "set"),
            grids=_grids(raw.get("grid") or {}, path),
            variants=variants,
            **given,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise RecipeError(f"{_at(path, lines, name)}: {name} {complaint(Sweep, first)}") from None
    _check_together(sweep)
    return sweep


def _at(path: Path, lines: Mapping[str, int], name: object) -> str:
    """The file, with the line of a key that it has."""
    return f"{path}:{lines[str(name)]}" if str(name) in lines else str(path)


def _nearest(name: object, known: Sequence[str], otherwise: str = "") -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"the nearest is {near[0]}" if near else otherwise or f"known: {', '.join(known)}"


def check_key(dotted: object, where: str) -> str:
    """Return `dotted` if it is a recipe key, or a key inside model.config, that a sweep may set.

    Raises RecipeError for an unknown key and for a key in REFUSED.
    """
    known = [f"{section}.{field.name}" for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)]
    text = str(dotted)
    if text in REFUSED:
        raise RecipeError(f"{where}: {text} is set by the sweep; write {REFUSED[text]}")
    if text not in known and not re.fullmatch(r"model\.config\.[A-Za-z0-9_]+", text):
        raise RecipeError(f"{where}: {text} is not a recipe key; {_nearest(text, known, 'docs/recipe.md lists them')}")
    return text


def _dotted(raw: object, path: Path, name: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: {name} is a mapping of recipe keys such as {{train.batch_size: 4}}")
    return {check_key(key, f"{path}: {name}"): value for key, value in raw.items()}


def _grids(raw: object, path: Path) -> tuple[Mapping[str, tuple[Any, ...]], ...]:
    grids = []
    for grid in raw if isinstance(raw, list) else [raw]:
        axes = _dotted(grid, path, "grid")
        values = {axis: tuple(value) if isinstance(value, list) else (value,) for axis, value in axes.items()}
        for axis in (axis for axis, value in values.items() if not value):
            raise RecipeError(f"{path}: grid: {axis} has an empty list; give values such as [4, 8]")
        grids.append(values)
    return tuple(grids)


def _variants(raw: Mapping[str, Any], path: Path) -> tuple[Variant, ...]:
    named, patterns = raw.get("variants"), raw.get("recipes")
    if named is not None and patterns is not None:
        raise RecipeError(f"{path}: variants and recipes are both given; give one of them")
    if patterns is not None:
        return _recipe_files(patterns if isinstance(patterns, list) else [patterns], path)
    if named is None:
        return (Variant("all", {}),)
    if not isinstance(named, dict) or not named:
        raise RecipeError(f"{path}: variants is a mapping of names, e.g. {{unpatched: {{model.kernels: none}}}}")
    variants = []
    for name, given in named.items():
        keys = {} if given is None else given
        unchecked = isinstance(keys, dict) and bool(keys.get(UNCHECKED))
        others = {key: keys[key] for key in keys if key != UNCHECKED} if isinstance(keys, dict) else keys
        variants.append(Variant(str(name), _dotted(others, path, f"variants: {name}"), unchecked=unchecked))
    return tuple(variants)


def _recipe_files(patterns: Sequence[object], path: Path) -> tuple[Variant, ...]:
    files: dict[Path, None] = {}
    for text in patterns:
        matches = sorted(path.parent.glob(str(text)))
        if not matches:
            raise RecipeError(f"{path}: recipes: {text} matches no file in the sweep file's folder")
        files |= dict.fromkeys(matches)
    return tuple(Variant(file.stem, {}, recipe=file) for file in files)


def _recipe(raw: Mapping[str, Any], path: Path) -> Path | Mapping[str, Any] | None:
    base = raw.get("recipe")
    if isinstance(base, str):
        return path.parent / base
    if isinstance(base, dict) or (base is None and raw.get("recipes") is not None):
        return base
    raise RecipeError(f"{path}: recipe is the path of a recipe file, or a recipe written out; it is {base!r}")


def _check_together(sweep: Sweep) -> None:
    path = sweep.path
    if sweep.warmup >= sweep.steps:
        raise RecipeError(f"{path}: warmup is {sweep.warmup} of {sweep.steps} steps, which leaves no step to time")
    names = [variant.name for variant in sweep.variants]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"{path}: two variants are called {repeated[0]}")
    if sweep.baseline not in names:
        raise RecipeError(f"{path}: baseline is {sweep.baseline!r}; it must be one of {', '.join(names)}")
    if (axis := sweep.stop_after_oom) is not None:
        check_key(axis, f"{path}: stop_after_oom")
        values = [value for grid in sweep.grids for value in grid.get(axis, ())]
        if not values or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
            raise RecipeError(f"{path}: stop_after_oom is {axis}, which must be a key of the grid with numbers")
    for where, keys in [("set", sweep.change), *((f"variants: {v.name}", v.keys) for v in sweep.variants)]:
        for twice in (name for name in keys if name in sweep.axes):
            raise RecipeError(f"{path}: {where}: {twice} is an axis of the grid; give it in one place")
