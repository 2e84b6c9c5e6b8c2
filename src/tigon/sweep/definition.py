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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon._files import read_text
from tigon.errors import RecipeError
from tigon.recipe.keys import SECTIONS
from tigon.recipe.recipe_file import OF_VALUES
from tigon.recipe.rules import folder_name_problem

MAX_SWEEP_BYTES = 64 * 1024
NAME_CHARACTERS = 60
ROWS = ("recipe", "random", "alpaca")
UNCHECKED = "unchecked"
# Keys that the sweep sets for every point. A sweep file may not set them, because its values would be ignored.
OWN_KEYS: Mapping[str, str] = {
    "train.steps": "steps: in the sweep file",
    "train.epochs": "steps: in the sweep file",
    "train.log_steps": "nothing: every step is recorded",
    "train.eval_steps": "nothing: a sweep does not evaluate",
    "train.save_steps": "nothing: a sweep saves no checkpoints",
    "train.save_async": "nothing: a sweep saves no checkpoints",
    "train.load_best": "nothing: a sweep saves no checkpoints",
    "train.early_stopping_patience": "nothing: a sweep does not evaluate",
    "train.report_to": "nothing: a sweep has its own report",
    "eval.generate": "nothing: a sweep does not evaluate",
    "eval.lm_eval": "nothing: a sweep does not evaluate",
    "comparison.steps": "variants: in the sweep file",
    "output.name": "--out",
    "output.folder": "--out",
    "output.save_model": "nothing: a sweep saves no model",
}


@dataclass(frozen=True)
class Variant:
    """A named change to the base recipe, or a separate recipe file."""

    name: str
    keys: Mapping[str, Any]
    recipe: Path | None = None
    unchecked: bool = False
    """Measure it even if `tigon train` refuses the combination. Meant for baselines."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The contents of a sweep file."""

    path: Path
    name: str
    title: str
    about: str
    recipe: Path | Mapping[str, Any] | None
    """None if every variant has its own recipe file."""
    change: Mapping[str, Any]
    """The file's `set`: changes to every recipe, with dotted keys."""
    grids: tuple[Mapping[str, tuple[Any, ...]], ...]
    variants: tuple[Variant, ...]
    rows: str
    steps: int
    warmup: int
    repeats: int
    stop_after_oom: str | None
    memory_limit: str | None
    timeout_s: float
    baseline: str
    """The variant that the other variants are compared with."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Every key that a grid varies, in the order of the file."""
        return tuple(dict.fromkeys(key for grid in self.grids for key in grid))


_TEXT, _NUMBER = "text", "a whole number of at least {least}"
_KEYS = (
    "name", "title", "about", "recipe", "set", "grid", "variants", "recipes", "rows", "steps", "warmup", "repeats",
    "stop_after_oom", "memory_limit", "timeout", "baseline",
)  # fmt: skip


def load(path: Path) -> Sweep:
    """Read and check a sweep file. Raises RecipeError for a file that cannot be read or has a bad key or value."""
    raw = _read(path)
    for key in raw:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"the nearest is {near[0]}" if near else f"known: {', '.join(_KEYS)}"
            raise RecipeError(f"{path}: {key} is not a key of a sweep; {hint}")
    name = raw.get("name", path.stem)
    wrong = folder_name_problem(name, NAME_CHARACTERS) if isinstance(name, str) else "it must be text"
    if wrong:
        raise RecipeError(f"{path}: name is {name!r}, which names a folder: {wrong}")
    variants = _variants(raw, path)
    sweep = Sweep(
        path=path,
        name=name,
        title=_text(raw, "title", name, path),
        about=_text(raw, "about", "", path),
        recipe=_recipe(raw, path),
        change=_dotted(raw.get("set") or {}, path, "set"),
        grids=_grids(raw.get("grid") or {}, path),
        variants=variants,
        rows=_choice(raw, "rows", ROWS, path),
        steps=_count(raw, "steps", 5, 1, path),
        warmup=_count(raw, "warmup", 1, 0, path),
        repeats=_count(raw, "repeats", 1, 1, path),
        stop_after_oom=_axis(raw, path),
        memory_limit=None if raw.get("memory_limit") is None else str(raw["memory_limit"]),
        timeout_s=_seconds(raw, path),
        baseline=_text(raw, "baseline", variants[0].name, path),
    )
    _check_together(sweep)
    return sweep


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        raw = yaml.safe_load(read_text(path, MAX_SWEEP_BYTES))
    except FileNotFoundError:
        raise RecipeError(
            f"{path}: no such sweep file; give the path of a YAML file, e.g. recipes/study/quick.yaml"
        ) from None
    except OSError as error:
        raise RecipeError(f"{path}: the sweep cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, *OF_VALUES) as error:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a sweep is a mapping with the keys {', '.join(_KEYS)}")
    return raw


def check_key(dotted: Any, where: str) -> str:
    """Return `dotted` if it is a recipe key, or a key inside model.config, that a sweep may set.

    Raises RecipeError for an unknown key and for a key in OWN_KEYS.
    """
    known = [f"{section}.{field.name}" for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)]
    text = str(dotted)
    if text in OWN_KEYS:
        raise RecipeError(f"{where}: {text} is set by the sweep; write {OWN_KEYS[text]}")
    if text not in known and not re.fullmatch(r"model\.config\.[A-Za-z0-9_]+", text):
        near = difflib.get_close_matches(text, known, n=1)
        hint = f"the nearest is {near[0]}" if near else "docs/recipe.md lists them"
        raise RecipeError(f"{where}: {text} is not a recipe key; {hint}")
    return text


def _dotted(raw: Any, path: Path, name: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: {name} is a mapping of recipe keys such as {{train.batch_size: 4}}")
    return {check_key(key, f"{path}: {name}"): value for key, value in raw.items()}


def _grids(raw: Any, path: Path) -> tuple[Mapping[str, tuple[Any, ...]], ...]:
    grids = []
    for grid in raw if isinstance(raw, list) else [raw]:
        values = _dotted(grid, path, "grid")
        for key, value in values.items():
            values[key] = tuple(value) if isinstance(value, list) else (value,)
            if not values[key]:
                raise RecipeError(f"{path}: grid: {key} has an empty list; give values such as [4, 8]")
        grids.append(values)
    return tuple(grids)


def _variants(raw: Mapping[str, Any], path: Path) -> tuple[Variant, ...]:
    named, pattern = raw.get("variants"), raw.get("recipes")
    if named is not None and pattern is not None:
        raise RecipeError(f"{path}: variants and recipes are both given; give one of them")
    if pattern is not None:
        return _recipe_files(pattern, path)
    if named is None:
        return (Variant("all", {}),)
    if not isinstance(named, dict) or not named:
        raise RecipeError(f"{path}: variants is a mapping of names, e.g. {{unpatched: {{model.kernels: none}}}}")
    variants = []
    for name, keys in named.items():
        keys = dict(keys) if isinstance(keys, dict) else {} if keys is None else keys
        unchecked = bool(keys.pop(UNCHECKED, False)) if isinstance(keys, dict) else False
        variants.append(Variant(str(name), _dotted(keys, path, f"variants: {name}"), unchecked=unchecked))
    return tuple(variants)


def _recipe_files(pattern: Any, path: Path) -> tuple[Variant, ...]:
    patterns = pattern if isinstance(pattern, list) else [pattern]
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
    if isinstance(base, dict):
        return base
    if base is None and raw.get("recipes") is not None:
        return None
    raise RecipeError(f"{path}: recipe is the path of a recipe file, or a recipe written out; it is {base!r}")


def _text(raw: Mapping[str, Any], key: str, default: str, path: Path) -> str:
    value = raw.get(key, default)
    if not isinstance(value, str):
        raise RecipeError(f"{path}: {key} is {value!r}; it must be text")
    return " ".join(value.split())


def _choice(raw: Mapping[str, Any], key: str, choices: Sequence[str], path: Path) -> str:
    value = raw.get(key, choices[0])
    if value not in choices:
        raise RecipeError(f"{path}: {key} is {value!r}; it must be one of {', '.join(choices)}")
    return str(value)


def _count(raw: Mapping[str, Any], key: str, default: int, least: int, path: Path) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 10_000:
        raise RecipeError(f"{path}: {key} is {value!r}; it must be a whole number from {least} to 10000")
    return value


def _seconds(raw: Mapping[str, Any], path: Path) -> float:
    value = raw.get("timeout", 1800)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise RecipeError(f"{path}: timeout is {value!r}; give the time limit of a point in seconds, above 0")
    return float(value)


def _axis(raw: Mapping[str, Any], path: Path) -> str | None:
    value = raw.get("stop_after_oom")
    return None if value is None else check_key(value, f"{path}: stop_after_oom")


def _check_together(sweep: Sweep) -> None:
    path = sweep.path
    if sweep.warmup >= sweep.steps:
        raise RecipeError(f"{path}: warmup is {sweep.warmup} of {sweep.steps} steps, which leaves no step to time")
    names = [variant.name for variant in sweep.variants]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"{path}: two variants are called {repeated[0]}")
    if sweep.baseline not in names:
        raise RecipeError(f"{path}: baseline is {sweep.baseline!r}; it must be one of {', '.join(names)}")
    if sweep.stop_after_oom is not None:
        values = [value for grid in sweep.grids for value in grid.get(sweep.stop_after_oom, ())]
        if not values or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
            raise RecipeError(
                f"{path}: stop_after_oom is {sweep.stop_after_oom}, which must be a key of the grid with numbers"
            )
    for where, keys in [("set", sweep.change), *((f"variants: {v.name}", v.keys) for v in sweep.variants)]:
        for key in keys:
            if key in sweep.axes:
                raise RecipeError(f"{path}: {where}: {key} is an axis of the grid; give it in one place")
