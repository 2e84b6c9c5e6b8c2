"""The techniques by which a training run saves memory or time, apart from its model and its data.

records/      what a technique's file declares: settings, techniques, conditions; and `Choices`, the values of a run
mechanisms/   code that techniques run: GaLore, offload of saved tensors, recomputation
matrix.py     checks of choices: allowed values, exclusions, packages

Every other file declares techniques. To add one, write a file with a `DECLARATION`, which is imported automatically,
and give each of its settings a typed field in `Choices`. Recipe keys, the flags of `tigon plan`, the search, the checks
and the pages follow from the declaration.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping

from tigon.techniques.records.choices import Choices
from tigon.techniques.records.condition import Exclusion, KeyExclusion, KeySwitch
from tigon.techniques.records.setting import Setting
from tigon.techniques.records.technique import Declaration, Technique

_READS_THE_REGISTRY = "matrix"  # imported after it


def _declared() -> list[Declaration]:
    """Import every file of this folder, and return their declarations."""
    modules = [
        importlib.import_module(f"{__name__}.{info.name}")
        for info in pkgutil.iter_modules(__path__)
        if info.name != _READS_THE_REGISTRY
    ]
    return [m.DECLARATION for m in modules if hasattr(m, "DECLARATION")]


def _first_place(declaration: Declaration) -> int:
    """The position in `Choices` of a declaration's first field; declarations are sorted by it."""
    names = [setting.field for setting in declaration.settings]
    names = names or [technique.chosen[0].field for technique in declaration.techniques]
    return min(_PLACES[name] for name in names)


_PLACES = {f.name: place for place, f in enumerate(dataclasses.fields(Choices))}
_DECLARATIONS = _declared()
_BY_FIELD = {setting.field: setting for declaration in _DECLARATIONS for setting in declaration.settings}
if _without_field := [name for name in _BY_FIELD if name not in _PLACES]:
    raise TypeError(f"{', '.join(_without_field)}: Choices lacks it; add it to techniques/records/choices.py")
_DECLARATIONS.sort(key=_first_place)

SETTINGS: Mapping[str, Setting] = {name: _BY_FIELD[name] for name in _PLACES}
"""Field of Choices -> its setting, in the order of the fields."""
TECHNIQUES: Mapping[str, Technique] = {
    technique.name: technique for declaration in _DECLARATIONS for technique in declaration.techniques
}
EXCLUSIONS: tuple[Exclusion, ...] = tuple(row for declaration in _DECLARATIONS for row in declaration.exclusions)
KEY_EXCLUSIONS: tuple[KeyExclusion, ...] = tuple(row for one in _DECLARATIONS for row in one.key_exclusions)
KEY_SWITCHES: tuple[KeySwitch, ...] = tuple(row for one in _DECLARATIONS for row in one.key_switches)
PAGES: Mapping[str, str] = {page: title for declaration in _DECLARATIONS for page, title in declaration.pages.items()}
"""Pages of docs/techniques -> their titles."""
SEARCHED = frozenset(name for name, setting in SETTINGS.items() if setting.search is not None)
"""The settings that the planner may choose if the user has not given them."""
