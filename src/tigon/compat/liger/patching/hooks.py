"""Patches models that are built later, with a hook at the end of `__init__` of one family's model classes.

Without a model, Liger assigns into the modeling module. This changes the norms of models that are built later, and also
forward and rotary embedding of existing models. It cannot be undone. Here the family's classes get an `__init__` that
patches the instance it has built. Nothing else in transformers or torch is assigned to.

A hooked model is often part of another one: `LlamaForCausalLM` builds a `LlamaModel`. The outer model is then patched
as a whole, because its row in `tigon.models.MODELS` says more than the structure of the inner one. The inner model is
patched alone if its owner is not hooked: in a classifier, or as the text tower of a vision model.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from tigon.compat.liger.errors import warn
from tigon.compat.liger.patching.families import FAMILIES
from tigon.compat.liger.patching.flags import Flags
from tigon.errors import PatchError
from tigon.models.patch import output_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ConstructionHook:
    """A construction hook on a set of classes, active until `remove`."""

    classes: tuple[type[nn.Module], ...]
    model_types: frozenset[str]
    flags: Flags

    def covers(self, model: PreTrainedModel) -> bool:
        """Whether the hook patches this model, whose class is one of the hook's classes or derived from one.

        A derived class of another known family has its own function and is not patched. A derived class of an unknown
        family, such as one from a repository with `trust_remote_code`, is patched.
        """
        model_type = model.config.model_type
        return model_type in self.model_types or model_type not in FAMILIES

    def patch(self, model: PreTrainedModel) -> None:
        """Patch a model that was built under the hook."""
        computes_loss = output_head(model) is not None
        if model.config.model_type in self.model_types:
            self.flags.patch(model, loss=computes_loss)
            return
        try:
            self.flags.patch(model, loss=computes_loss)
        except PatchError as error:
            warn(f"no kernel was applied: {error}")

    def remove(self) -> None:
        """Remove the hook from its classes. Models built with it stay patched. A second call does nothing."""
        for cls in self.classes:
            if _hooks.get(cls) is self:
                _take_off(cls)


_hooks: dict[type[nn.Module], ConstructionHook] = {}
# class -> (its own `__init__`, or None if it was inherited; the hooked `__init__`)
_inits: dict[type[nn.Module], tuple[Any, Any]] = {}


def patch_instances_of(
    classes: tuple[type[nn.Module], ...], model_types: frozenset[str], flags: Flags
) -> ConstructionHook:
    """Patch every model of these classes and model types that is built later; the flags of the last call count."""
    hook = ConstructionHook(classes, model_types, flags)
    for cls in classes:
        if cls not in _inits:
            _inits[cls] = vars(cls).get("__init__"), _hooked(cls)
            setattr(cls, "__init__", _inits[cls][1])  # noqa: B010  (mypy takes an assigned __init__ for a mistake)
        _hooks[cls] = hook
    return hook


def remove_hooks() -> int:
    """Remove every construction hook; returns the number of classes that had one."""
    classes = tuple(_hooks)
    for cls in classes:
        _take_off(cls)
    return len(classes)


def _hooked(cls: type[nn.Module]) -> Callable[..., None]:
    original: Callable[..., None] = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: object, **kwargs: object) -> None:
        built, outermost = _construction.built, not _construction.depth
        inside = len(built)
        _construction.depth += 1
        try:
            original(self, *args, **kwargs)
            hook = _hooks.get(cls)
            if hook is not None and hook.covers(self):
                built[inside:] = [(hook, self)]  # in place of the models that it consists of
            if outermost:
                for hook, model in built:
                    hook.patch(model)
        except BaseException:
            del built[inside:]
            raise
        finally:
            _construction.depth -= 1
            if outermost:
                built.clear()

    return __init__


class _Construction(threading.local):
    """The hooked models that this thread is building."""

    def __init__(self) -> None:
        self.depth = 0
        self.built: list[tuple[ConstructionHook, nn.Module]] = []


_construction = _Construction()


def _take_off(cls: type[nn.Module]) -> None:
    original, ours = _inits[cls]
    if vars(cls).get("__init__") is not ours:
        raise PatchError(
            f"{cls.__name__}.__init__ was replaced after the hook was installed; undo that replacement first. "
            "The hook is still installed."
        )
    del _hooks[cls], _inits[cls]
    if original is None:
        del cls.__init__
    else:
        setattr(cls, "__init__", original)  # noqa: B010
