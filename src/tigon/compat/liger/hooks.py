"""Patching what is built from now on: a hook at the end of `__init__` of one class.

Liger, called without a model, assigns into the modeling module: norms of models that are built later change, forward
and rotary embedding of those that exist change too, and there is no way back. Here the class that the call names gets
an `__init__` that patches the instance it has built. Nothing else of transformers or torch is assigned to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tigon.errors import PatchError
from tigon.models import patch


@dataclass(frozen=True)
class ConstructionHook:
    """What is on a set of classes, until `remove`."""

    classes: tuple[type[nn.Module], ...]
    model_types: frozenset[str]
    flags: Mapping[str, bool | None]

    def remove(self) -> None:
        """Take the hook off its classes; what was built with it stays patched. A second call does nothing."""
        for cls in self.classes:
            if _hooks.get(cls) is self:
                _take_off(cls)


_hooks: dict[type[nn.Module], ConstructionHook] = {}
# class -> what `vars(cls)` had under "__init__", None if it was inherited, and what is there instead
_inits: dict[type[nn.Module], tuple[Any, Any]] = {}


def patch_instances_of(
    classes: tuple[type[nn.Module], ...], model_types: frozenset[str], flags: Mapping[str, bool | None]
) -> ConstructionHook:
    """Patch every model of these classes and model types that is built from now on; the last call's flags count."""
    hook = ConstructionHook(classes, model_types, dict(flags))
    for cls in classes:
        if cls not in _inits:
            _inits[cls] = vars(cls).get("__init__"), _hooked(cls)
            setattr(cls, "__init__", _inits[cls][1])  # noqa: B010  (mypy takes an assigned __init__ for a mistake)
        _hooks[cls] = hook
    return hook


def remove_hooks() -> int:
    """Take every construction hook off; returns how many classes had one."""
    classes = tuple(_hooks)
    for cls in classes:
        _take_off(cls)
    return len(classes)


def _hooked(cls: type[nn.Module]) -> Callable[..., None]:
    original: Callable[..., None] = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hook = _hooks.get(cls)
        # A subclass of another family, or one that has been patched by its own class's hook, is not ours.
        if hook is not None and self.config.model_type in hook.model_types:
            patch(self, **hook.flags)

    return __init__


def _take_off(cls: type[nn.Module]) -> None:
    original, ours = _inits[cls]
    if vars(cls).get("__init__") is not ours:
        raise PatchError(
            f"{cls.__name__}.__init__ was replaced after the hook was put on it; take that off first. "
            "The hook is still there."
        )
    del _hooks[cls], _inits[cls]
    if original is None:
        del cls.__init__
    else:
        setattr(cls, "__init__", original)  # noqa: B010
