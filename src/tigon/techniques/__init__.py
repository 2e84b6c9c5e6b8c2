"""The techniques by which a training run saves memory or time, apart from its model and its data.

keys/         the recipe keys of techniques: typed fields with their defaults, help and limits
records/      what a technique's file declares: techniques, exclusions, what the planner searches
mechanisms/   code that techniques run: GaLore, offload of saved tensors, recomputation
matrix.py     checks of settings: exclusions, and packages that are missing
optimizers.py the table of optimizers; optimizer_techniques.py declares them

Every other file declares techniques. To add one, write a file with a `DECLARATION`, which is imported automatically,
and give each of its keys a typed field in `keys/`. `--set`, the search, the checks and the pages follow from both.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping

from tigon.techniques.keys.settings import KEYS, Settings
from tigon.techniques.records.condition import Exclusion, Switch
from tigon.techniques.records.technique import Declaration, Search, Technique

_READS_THE_REGISTRY = "matrix"  # imported after it


def _declared() -> list[Declaration]:
    """Import every file of this folder, and return their declarations in the order of their first keys."""
    modules = [
        importlib.import_module(f"{__name__}.{info.name}")
        for info in pkgutil.iter_modules(__path__)
        if info.name != _READS_THE_REGISTRY
    ]
    places = {key: place for place, key in enumerate(KEYS)}
    declarations = [m.DECLARATION for m in modules if hasattr(m, "DECLARATION")]
    if unknown := [key for declaration in declarations for key in declaration.keys if key not in places]:
        raise TypeError(f"{', '.join(unknown)}: not a field in techniques/keys; add it there")

    def place(declaration: Declaration) -> tuple[bool, int]:
        names = declaration.keys or tuple(technique.chosen[0].key for technique in declaration.techniques)
        return declaration.last, min(places[name] for name in names)

    return sorted(declarations, key=place)


_DECLARATIONS = _declared()
TECHNIQUES: Mapping[str, Technique] = {
    technique.name: technique for declaration in _DECLARATIONS for technique in declaration.techniques
}
SEARCHES: Mapping[str, Search] = {search.key: search for one in _DECLARATIONS for search in one.searches}
"""The recipe keys that the planner may choose if the user has not given them."""
LABELS: Mapping[str, Callable[[Settings], str]] = {
    key: label for declaration in _DECLARATIONS for key, label in declaration.labels.items()
}
"""Recipe key -> its part of the few words that describe a run."""
EXCLUSIONS: tuple[Exclusion, ...] = tuple(row for declaration in _DECLARATIONS for row in declaration.exclusions)
SWITCHES: tuple[Switch, ...] = tuple(row for declaration in _DECLARATIONS for row in declaration.switches)
PAGES: Mapping[str, str] = {page: title for declaration in _DECLARATIONS for page, title in declaration.pages.items()}
"""Pages of docs/techniques -> their titles."""
