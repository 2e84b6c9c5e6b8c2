"""Checks of options and tensors that all losses share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError

_COMPUTED_IN_FP32 = (torch.float16, torch.bfloat16)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `OptionError` unless the value is one of the choices."""
    names = tuple(choices)
    if not isinstance(value, str) or value not in names:
        raise OptionError(f"{name}={value!r} is not known; choose one of {', '.join(names)}.")


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> float:
    """Return the value, or raise `OptionError` unless it is a finite number within the limits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(f"{name}={value!r} is a {type(value).__name__}; it must be a number.")
    limits = []
    for word, limit, holds in (
        ("above", above, above is None or value > above),
        ("at least", at_least, at_least is None or value >= at_least),
        ("at most", at_most, at_most is None or value <= at_most),
    ):
        if limit is not None:
            limits.append((f"{word} {limit:g}", holds))
    if not math.isfinite(value) or not all(holds for _, holds in limits):
        raise OptionError(f"{name}={value} must be {' and '.join([text for text, _ in limits] or ['finite'])}.")
    return value


def as_float(name: str, value: Tensor) -> Tensor:
    """The tensor in fp32 or fp64: fp16 and bf16 are converted to fp32. Raise `DtypeError` for any other dtype."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise DtypeError(f"{name} is {kind}; it must be a floating-point tensor.")
    return value.float() if value.dtype in _COMPUTED_IN_FP32 else value


def vectors(**named: Tensor) -> tuple[Tensor, ...]:
    """The tensors in fp32 or fp64. Raise `ShapeError` unless all are vectors (B,) of one length."""
    converted = tuple(as_float(name, value) for name, value in named.items())
    if len({t.shape for t in converted}) > 1 or converted[0].ndim != 1:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in named.items())
        raise ShapeError(f"{shapes}: all must be vectors of one length, with one value per sequence.")
    return converted


def same_shape(shape: torch.Size, **named: Tensor | None) -> None:
    """Raise `ShapeError` unless every given tensor has the shape."""
    for name, value in named.items():
        if value is not None and value.shape != shape:
            raise ShapeError(f"{name} is {tuple(value.shape)}; it must be {tuple(shape)}.")
