"""Liger's flags for one call, and the resulting patch of one model.

A flag that is on by default patches the matching modules, if there are any. A flag that is off by default and set to
True does the same, but warns if it matches no module; the model then keeps its own layer. In the same case Liger warns
or does nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tigon.compat.liger.errors import FlagConflict, warn
from tigon.compat.liger.patching.families import TIGON_FLAG
from tigon.errors import OptionError, PatchError
from tigon.models import PatchReport, patch
from tigon.models.patch import ALL_FLAGS
from tigon.models.spec import ADAPTER_FLAGS, LAYER_FLAGS, LOSS_FLAGS


@dataclass(frozen=True)
class Flags:
    """The keywords of `tigon.patch` for one call of a Liger function."""

    values: Mapping[str, bool | None]
    """False leaves a layer alone; None patches it if the model has it."""
    optional: Mapping[str, str]
    """tigon's keyword -> Liger's flag, for flags that are off by default and that the caller has set to True."""
    of_function: tuple[str, ...]
    """tigon's keywords of all flags that the function has."""

    def patch(self, model: nn.Module, *, loss: bool = True) -> PatchReport:
        """Patch `model`.

        Args:
            model: a transformers model, or a wrapper that `tigon.patch` accepts.
            loss: whether to apply the flags of the loss. False for a model that does not compute a loss.

        Returns:
            The report of `tigon.patch`.

        Raises:
            PatchError: under the conditions of `tigon.patch`, except for flags in `optional`, a loss that is all that
                is on, and a call in which all flags are off.
        """
        values = dict(self.values)
        if not loss:
            values.update(dict.fromkeys(LOSS_FLAGS, False))
        on = [flag for flag in self.of_function if values.get(flag) is not False]
        unsure = dict(self.optional)
        if on == ["linear_cross_entropy"]:  # it is on by default, and the model may compute no loss
            unsure["linear_cross_entropy"] = "fused_linear_cross_entropy"
        for flag, name in unsure.items():
            reason = _reason_for_nothing(model, flag) if flag in on else None
            if reason is not None:
                values[flag] = False
                warn(f"{name}=True has no effect. {reason}")
        if all(values.get(flag) is False for flag in self.of_function):
            values.update(dict.fromkeys(ALL_FLAGS, False))  # the call asks for nothing
        return patch(model, **values)


def read_flags(requested: Mapping[str, Any], signature: inspect.Signature, function: str) -> Flags:
    """Liger's flags as `Flags`.

    Args:
        requested: the flags of the call with their values, including defaults. A name that tigon does not know causes a
            warning.
        signature: the signature of the function that was called. It says which flags are on by default.
        function: the name of that function, for messages.

    Raises:
        FlagConflict: both losses are True.
        OptionError: a value is not True, False or None.
    """
    if requested.get("cross_entropy") and requested.get("fused_linear_cross_entropy"):
        raise FlagConflict("cross_entropy and fused_linear_cross_entropy cannot both be True.")
    values: dict[str, bool | None] = {}
    optional: dict[str, str] = {}
    for name, value in requested.items():
        if name == "relu_squared":
            if value:
                warn("relu_squared=True has no effect. tigon lacks this kernel, so the model keeps its activation.")
            continue
        if name not in TIGON_FLAG:
            warn(f"{name}={value!r} has no effect. {function} has no such flag; known are {', '.join(TIGON_FLAG)}.")
            continue
        if value not in (True, False, None):  # Liger takes any value; "false" from a command line would count as true
            raise OptionError(f"{name}={value!r}: expected True or False.")
        flag, parameter = TIGON_FLAG[name], signature.parameters.get(name)
        values[flag] = None if value else False
        if value and not (parameter is not None and parameter.default is True):
            optional[flag] = name
    names = (*signature.parameters, *requested)
    return Flags(values, optional, tuple(dict.fromkeys(TIGON_FLAG[name] for name in names if name in TIGON_FLAG)))


def _reason_for_nothing(model: nn.Module, flag: str) -> str | None:
    """Why the flag's op fits no module of the model, or None if it fits. The model is not changed."""
    alone: dict[str, bool | None] = {**dict.fromkeys((*LAYER_FLAGS, *ADAPTER_FLAGS, *LOSS_FLAGS), False), flag: True}
    try:
        patch(model, **alone).undo()
    except PatchError as error:
        return str(error).partition(" Nothing was changed")[0]
    return None
