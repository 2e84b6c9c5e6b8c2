"""Errors that derive from tigon's and also from the type that Liger, or Python's import, raises in the same place."""

from __future__ import annotations

import sys
import warnings

from tigon.compat.liger.absent import reason_for
from tigon.errors import LabelError, OptionError, TigonError


class FlagConflict(OptionError, AssertionError):
    """A value, or a combination of values, that Liger refuses with an `assert`."""


class LigerLabelError(LabelError, AssertionError):
    """A label outside [0, vocab). Liger refuses it with an `assert`."""


class NotInTigon(TigonError, ModuleNotFoundError):
    """A name of Liger Kernel that tigon lacks. It is an ImportError, so `except ImportError` catches it."""


def missing(name: str) -> str:
    """The message for a name under `liger_kernel` that is not offered."""
    reason = reason_for(name)
    return (
        f"tigon has no counterpart of {name}. {reason + ' ' if reason else ''}liger_kernel is tigon.compat.liger in "
        "this process; docs/liger.md lists its names. For other names, install liger-kernel and run without "
        "tigon.compat.liger."
    )


def no_implementation(**named: object) -> None:
    """Refuse the choice of one of Liger's backends; tigon has one implementation per device."""
    for name, value in named.items():
        if value is not None:
            raise OptionError(f"{name}={value!r}: tigon does not have Liger's backends. Leave {name} out.")


def no_reduce(accepted: bool | None, **named: object) -> None:
    """Refuse PyTorch's deprecated `size_average` and `reduce`, which Liger ignores."""
    for name, value in named.items():
        if value is not accepted:
            raise OptionError(f"{name}={value!r} is deprecated in PyTorch and not supported; use reduction.")


def warn(message: str) -> None:
    """Warn at the calling line outside tigon."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tigon":
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)
