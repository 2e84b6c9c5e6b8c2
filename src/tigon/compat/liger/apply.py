"""`apply_liger_kernel_to_<family>`: one function a family, made from the data in `families`.

With `model=` that instance is patched, and nothing else. Without it, models of the family's classes that are built from
now on are (see `hooks`). A flag that is on by default and True patches what is there; one that is off by default and
True has to find something, or it is a PatchError.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from tigon.compat.liger.errors import FlagConflict
from tigon.compat.liger.families import FAMILIES, SIGNATURES, TIGON_FLAG
from tigon.compat.liger.hooks import ConstructionHook, patch_instances_of
from tigon.errors import OptionError, PatchError
from tigon.models import PatchReport, patch
from tigon.models.patch import unwrap

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
    model_types = frozenset(model_type for model_type, of in FAMILIES.items() if of == family)

    def apply(*args: Any, **kwargs: Any) -> PatchReport | ConstructionHook:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        asked = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        asked.pop("kwargs", None)
        model = asked.pop("model")
        flags = _tigon_flags(asked, signature)
        if model is None:
            return patch_instances_of(_classes(family, model_types), model_types, flags)
        inner = unwrap(model)
        model_type: Any = inner.config.model_type  # type: ignore[union-attr]
        if model_type not in model_types:
            right = FAMILIES.get(model_type)
            advice = f"Use apply_liger_kernel_to_{right}." if right else "Use tigon.patch, which matches by structure."
            raise PatchError(
                f"apply_liger_kernel_to_{family} got a {type(inner).__name__} of model_type {model_type!r}. {advice}"
            )
        return patch(model, **flags)

    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{family}"
    apply.__doc__ = f"Patch a model of {family}, or those built from now on; see `tigon.compat.liger.apply`."
    vars(apply)["__signature__"] = signature
    return apply


def _tigon_flags(asked: dict[str, Any], signature: inspect.Signature) -> dict[str, bool | None]:
    """Liger's flags as keywords of `tigon.patch`: True by default is "where it is", False "leave it alone"."""
    if asked.get("cross_entropy") and asked.get("fused_linear_cross_entropy"):
        raise FlagConflict("cross_entropy and fused_linear_cross_entropy cannot both be True.")
    flags: dict[str, bool | None] = {}
    for name, value in asked.items():
        if name not in TIGON_FLAG:
            raise OptionError(f"{name} is no flag; known are {', '.join(TIGON_FLAG)}.")
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r}: expected True or False.")
        parameter = signature.parameters.get(name)
        by_default = parameter is not None and parameter.default is True
        if value and name == "relu_squared":
            raise OptionError("relu_squared=True: tigon has no kernel for it. Leave it out; nothing was changed.")
        flags[TIGON_FLAG[name]] = False if not value else None if by_default else True
    return flags


def _classes(family: str, model_types: frozenset[str]) -> tuple[type[nn.Module], ...]:
    """The classes with a language-model head that transformers has for the family."""
    classes = tuple(dict.fromkeys(cls for model_type in sorted(model_types) for cls in _headed(model_type)))
    if not classes:
        import transformers

        raise PatchError(
            f"transformers {transformers.__version__} has no causal language model of {family}; pass model= to patch "
            "one that exists."
        )
    return classes


def _headed(model_type: str) -> Iterator[type[nn.Module]]:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if model_type not in CONFIG_MAPPING:
        return
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        found = mapping.get(CONFIG_MAPPING[model_type], ())
        yield from found if isinstance(found, tuple) else (found,)


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
    return {name: value for name, value in keywords.items() if name in parameters and name in TIGON_FLAG}


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Hook the classes of a model type; keywords that are no flags of its function are left to others, as in Liger."""
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        _unpatched(f"model_type {model_type!r} has no apply_liger_kernel_to_... function")
        return
    MODEL_TYPE_TO_APPLY_LIGER_FN[model_type](**_flags_of(model_type, kwargs))


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    """Patch one model: what Trainer calls, with `liger_kernel_config` as keywords.

    A family without a function is matched by structure; where nothing matches, a warning says so. A flag that another
    family's function has and this one's has not is named in a warning.

    Raises:
        OptionError: a keyword that is no flag of any family. PatchError: as `tigon.patch`.
    """
    unknown = [name for name in kwargs if name not in TIGON_FLAG]
    if unknown:
        raise OptionError(f"{unknown[0]} is no flag; known are {', '.join(TIGON_FLAG)}. Check liger_kernel_config.")
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        _unpatched(f"{type(model).__name__} has no config.model_type")
    elif model_type in MODEL_TYPE_TO_APPLY_LIGER_FN:
        flags = _flags_of(model_type, kwargs)
        if len(flags) < len(kwargs):
            warnings.warn(
                f"{', '.join(sorted(kwargs.keys() - flags.keys()))}: not used, as "
                f"apply_liger_kernel_to_{FAMILIES[model_type]} has no such flag.",
                stacklevel=2,
            )
        MODEL_TYPE_TO_APPLY_LIGER_FN[model_type](model=model, **flags)
    else:
        _by_structure(model, _tigon_flags(kwargs, _signature(SIGNATURES["llama"])))


def _by_structure(model: nn.Module, flags: dict[str, bool | None]) -> None:
    try:
        patch(model, **flags)
    except PatchError as error:
        _unpatched(str(error))


def _unpatched(reason: str) -> None:
    warnings.warn(f"no kernel was applied: {reason}", stacklevel=3)
