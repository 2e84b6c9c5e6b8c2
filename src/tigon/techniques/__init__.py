"""The techniques by which a training run saves memory or time, apart from its model and its data.

keys/         the recipe keys of techniques: typed fields with their defaults, help and limits
technique.py  what a technique declares and answers; condition.py has its conditions and exclusions
matrix.py     checks of settings: exclusions, and packages that are missing
generator_obstacles.py  what the generator of completions does not go with

Every other file declares techniques, and so does the file of a folder that has the folder's name. To add a technique,
write a file with a `DECLARATION`, which is imported automatically, and give each of its keys a typed field in `keys/`.
`--set`, the search and the checks follow from both. Its page in docs/techniques says what it saves and costs.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping

from tigon.techniques.condition import Exclusion, Switch
from tigon.techniques.keys.settings import DEFAULT, KEYS, Settings
from tigon.techniques.technique import Declaration, Search, Technique

_READS_THE_REGISTRY = "matrix"  # imported after it


def _declared() -> Iterator[Declaration]:
    """Import the files that declare techniques, and yield their declarations."""
    for info in pkgutil.iter_modules(__path__):
        name = f"{info.name}.{info.name}" if info.ispkg else info.name
        if info.name not in (_READS_THE_REGISTRY, "keys"):
            module = importlib.import_module(f"{__name__}.{name}")
            if hasattr(module, "DECLARATION"):
                yield module.DECLARATION


_PLACES = {key: place for place, key in enumerate(KEYS)}


def _place(declaration: Declaration) -> tuple[bool, int]:
    """Sorts declarations by the first of their keys."""
    keys = {condition.key for technique in declaration.techniques for condition in technique.chosen}
    keys |= declaration.labels.keys()
    if unknown := sorted(keys - KEYS.keys()):
        raise TypeError(f"{', '.join(unknown)}: not a field in techniques/keys; add it there")
    return declaration.last, min(map(_PLACES.__getitem__, keys))


_DECLARATIONS = sorted(_declared(), key=_place)
TECHNIQUES: Mapping[str, Technique] = {
    technique.name: technique for declaration in _DECLARATIONS for technique in declaration.techniques
}
SEARCHES: Mapping[str, Search] = {search.key: search for one in _DECLARATIONS for search in one.searches}
"""The recipe keys that the planner may choose if the user has not given them."""


def _words(key: str, label: str | Callable[[Settings], str]) -> Callable[[Settings], str]:
    if callable(label):
        return label
    default = DEFAULT.value(key)
    return lambda settings: "" if settings.value(key) == default else label.format(settings.value(key))


LABELS: Mapping[str, Callable[[Settings], str]] = {
    key: _words(key, label) for declaration in _DECLARATIONS for key, label in declaration.labels.items()
}
"""Recipe key -> its part of the few words that describe a run."""
EXCLUSIONS: tuple[Exclusion, ...] = tuple(row for declaration in _DECLARATIONS for row in declaration.exclusions)
MACHINE_CHECKS = tuple(declaration.machine for declaration in _DECLARATIONS)
"""Each raises RecipeError for settings that this machine cannot run. Called with the device of the run."""
SWITCHES: tuple[Switch, ...] = tuple(row for declaration in _DECLARATIONS for row in declaration.switches)
