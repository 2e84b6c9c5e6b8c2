"""`apply_liger_kernel_to_<family>`: one function per family, made from the data in `families`.

With `model=`, only that instance is patched. Without it, models of the family's classes that are built later are
patched (see `hooks.py`). `flags.py` defines the meaning of a flag.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from tigon.compat.liger.errors import warn
from tigon.compat.liger.patching.families import FAMILIES, LIGER_FLAGS, SIGNATURES
from tigon.compat.liger.patching.flags import Flags, read_flags
from tigon.compat.liger.patching.hooks import ConstructionHook, patch_instances_of
from tigon.errors import PatchError
from tigon.models import PatchReport
from tigon.models.patch import unwrap
from tigon.models.seams.base import PatchedModule

Apply = Callable[..., PatchReport | ConstructionHook]


def _signature(names: str) -> inspect.Signature:
    """The Python signature of a line of `SIGNATURES`."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for name in names.split():
        if name == "**":
            parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
        elif name == "model":
            parameters.append(inspect.Parameter("model", kind, default=None, annotation="PreTrainedModel"))
        else:
            default = not name.startswith("-")
            parameters.append(inspect.Parameter(name.removeprefix("-"), kind, default=default, annotation=bool))
    return inspect.Signature(parameters)


def _function(family: str) -> Apply:
    signature = _signature(SIGNATURES[family])
    name = f"apply_liger_kernel_to_{family}"
    model_types = frozenset(model_type for model_type, of in FAMILIES.items() if of == family)

    def apply(*args: object, **kwargs: object) -> PatchReport | ConstructionHook:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        requested = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        requested.pop("kwargs", None)
        model = requested.pop("model")
        flags = read_flags(requested, signature, name)
        if model is None:
            return patch_instances_of(_classes(family, model_types), model_types, flags)
        _warn_of_another_family(model, name, model_types)
        return flags.patch(model)

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"Patch a model of {family}, or those built from now on; see `tigon.compat.liger.patching.apply`."
    vars(apply)["__signature__"] = signature
    return apply


def _warn_of_another_family(model: nn.Module, name: str, model_types: frozenset[str]) -> None:
    """Warn if the model belongs to another function. tigon then patches as much of the model as it can, like Liger."""
    inner = unwrap(model)
    model_type: Any = inner.config.model_type  # type: ignore[union-attr]
    if model_type in model_types:
        return
    right = FAMILIES.get(model_type)
    advice = f"Use apply_liger_kernel_to_{right}." if right else "Use tigon.patch, which matches by structure."
    warn(f"{name} got a {type(inner).__name__} of model_type {model_type!r} and patches it anyway. {advice}")


def _classes(family: str, model_types: frozenset[str]) -> tuple[type[nn.Module], ...]:
    """The currently loaded classes of the family's models.

    A modeling module that was reloaded or imported again, and a repository with custom code, have classes that are
    missing from transformers' own tables. All of them derive from PreTrainedModel and name the family's config.

    Raises:
        PatchError: transformers lacks the family.
    """
    import transformers

    known = [cls for model_type in sorted(model_types) for cls in _of_transformers(model_type)]
    if not known:
        raise PatchError(
            f"transformers {transformers.__version__} does not contain {family}; pass model= to patch a given model."
        )
    for cls in known:
        importlib.import_module(cls.__module__)
    return tuple(
        dict.fromkeys(
            cls
            for cls in _subclasses(transformers.PreTrainedModel)
            if getattr(getattr(cls, "config_class", None), "model_type", None) in model_types
            and "forward" in vars(cls)  # not the abstract base, whose __init__ ends before the layers exist
            and not issubclass(cls, PatchedModule)
        )
    )


def _of_transformers(model_type: str) -> Iterator[type[nn.Module]]:
    """The classes of a model type in transformers' tables."""
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        return
    for mapping in (
        transformers.MODEL_MAPPING,
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    ):
        classes = mapping.get(transformers.CONFIG_MAPPING[model_type], ())
        yield from classes if isinstance(classes, tuple) else (classes,)


def _subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


FUNCTIONS: dict[str, Apply] = {function.__name__: function for function in map(_function, SIGNATURES)}
"""Name -> function, for every family."""

MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Apply] = {
    model_type: FUNCTIONS[f"apply_liger_kernel_to_{family}"] for model_type, family in FAMILIES.items()
}


def __getattr__(name: str) -> Apply:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _flags_of(model_type: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords that are flags of the model type's function."""
    parameters = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {k: value for k, value in keywords.items() if k in LIGER_FLAGS and (takes_any or k in parameters)}


def _apply_liger_kernel(model_type: str, **kwargs: object) -> None:
    """Hook the classes of a model type; keywords that are not flags of its function are ignored, as in Liger."""
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        warn(f"no kernel was applied: model_type {model_type!r} has no apply_liger_kernel_to_... function")
        return
    MODEL_TYPE_TO_APPLY_LIGER_FN[model_type](**_flags_of(model_type, kwargs))


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: object) -> None:
    """Patch one model. Trainer calls this with `liger_kernel_config` as keywords.

    A family without a function is matched by structure, with a warning if nothing matches. A keyword that the family's
    function does not take is dropped with a warning.

    Raises:
        OptionError: a flag is not True, False or None.
        FlagConflict: cross_entropy and fused_linear_cross_entropy are both True.
        PatchError: a module that the patch needs cannot be patched, as in `tigon.patch`.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        warn(f"no kernel was applied: {type(model).__name__} lacks config.model_type")
    elif model_type in MODEL_TYPE_TO_APPLY_LIGER_FN:
        flags = _flags_of(model_type, kwargs)
        dropped = sorted(kwargs.keys() - flags.keys())
        if dropped:
            function = f"apply_liger_kernel_to_{FAMILIES[model_type]}"
            warn(f"{', '.join(dropped)}: not used, because {function} has no such flag. Check liger_kernel_config.")
        MODEL_TYPE_TO_APPLY_LIGER_FN[model_type](model=model, **flags)
    else:
        _by_structure(model, read_flags(kwargs, _signature(SIGNATURES["llama"]), "_apply_liger_kernel_to_instance"))


def _by_structure(model: nn.Module, flags: Flags) -> None:
    try:
        flags.patch(model)
    except PatchError as error:
        warn(f"no kernel was applied: {error}")
