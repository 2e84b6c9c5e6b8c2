"""The options of the losses and log-probabilities, and the checks that they share.

`LossOptions` also gives the operators' schemas (`ops/signature.py`). The public functions repeat the defaults in their
signatures, so that editors show them; a test compares the two.
"""

from __future__ import annotations

import math
import os
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.ops.dispatch import check_number, check_whole

REDUCTIONS = ("mean", "sum", "none")
OUTPUTS = ("logprob", "entropy", "accuracy", "predicted")
_COLLECTIONS = (tuple, list, set, frozenset)


# A value of the plain type in range is returned at once, which takes a fifth of the time of the whole check.


def _whole(name: str, value: Any) -> Any:
    if type(value) is not int:
        check_whole(name, value)
    return value


def _share(name: str, value: Any) -> float:
    if type(value) is float and 0.0 <= value <= 1.0:
        return value
    if not 0.0 <= check_number(name, value) <= 1.0:
        raise OptionError(f"{name}={value} is outside [0, 1].")
    return float(value)


def _cap(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if not 0.0 < check_number(name, value) < math.inf:
        raise OptionError(f"{name}={value} must be positive and finite; pass None for no cap.")
    return float(value)


def _finite(name: str, value: Any) -> float:
    if type(value) is float and -math.inf < value < math.inf:
        return value
    if not -math.inf < check_number(name, value) < math.inf:
        raise OptionError(f"{name}={value} must be finite; leave it out for none.")
    return float(value)


class LossOptions(NamedTuple):
    """The scalar options of all losses. An annotation holds the option's type and its check."""

    ignore_index: Annotated[int, _whole] = -100
    label_smoothing: Annotated[float, _share] = 0.0
    softcap: Annotated[float | None, _cap] = None
    logit_scale: Annotated[float, _finite] = 1.0
    z_loss: Annotated[float, _finite] = 0.0


def _checks() -> tuple[Callable[[str, Any], Any], ...]:
    hints = typing.get_type_hints(LossOptions, include_extras=True)
    return tuple(hints[name].__metadata__[0] for name in LossOptions._fields)


_CHECKS = _checks()


def check_options(
    options: LossOptions, *, reduction: str, num_items: Any, outputs: Any, names: tuple[str, ...] = OUTPUTS
) -> tuple[LossOptions, Any]:
    """Raise `OptionError` for an invalid value; return the options and num_items as plain numbers.

    Args:
        options: as the caller gave them, unchecked.
        reduction, num_items, outputs: as in `cross_entropy`.
        names: what `outputs` may name.
    """
    if reduction not in REDUCTIONS:
        raise OptionError(f"reduction={reduction!r} is not known; choose one of {', '.join(REDUCTIONS)}.")
    checked = [check(name, value) for check, name, value in zip(_CHECKS, LossOptions._fields, options, strict=True)]
    num_items = check_num_items(num_items)
    if num_items is not None and reduction != "mean":
        raise OptionError(f"num_items divides the mean, but reduction is {reduction!r}. Leave one of them out.")
    check_outputs(outputs, names)
    return LossOptions(*checked), num_items


def check_outputs(outputs: Any, names: tuple[str, ...]) -> None:
    """Raise `OptionError` unless `outputs` is a collection of these names."""
    if not isinstance(outputs, _COLLECTIONS):
        raise OptionError(f"outputs={outputs!r} must be a tuple of names; choose from {', '.join(names)}.")
    for name in outputs:
        if name not in names:
            raise OptionError(f"outputs names {name!r}; choose from {', '.join(names)}.")


def check_num_items(num_items: Any) -> Any:
    """Return the denominator as a number, a tensor or None; raise if it is not a count.

    A tensor's value is checked only with TIGON_CHECK=1, because on a GPU the host would wait for it.
    """
    if num_items is None:
        return None
    if not isinstance(num_items, Tensor):
        value = num_items = check_number("num_items", num_items)
    else:
        if num_items.ndim:
            raise ShapeError(
                f"num_items is {tuple(num_items.shape)}; it must be a number or a tensor without dimensions."
            )
        check_vector("num_items", num_items, ())
        if torch.compiler.is_compiling() or num_items.is_meta or os.environ.get("TIGON_CHECK") != "1":
            return num_items
        value = float(num_items)
    if not 0.0 <= value < math.inf:
        raise OptionError(f"num_items={value} must be a count of tokens, 0 or more; leave it out to count the labels.")
    return num_items


def check_shifts(shifts: Sequence[int] | Tensor) -> Sequence[int]:
    """Return the shifts of the heads as a sequence of Python integers; raise `OptionError` for anything else.

    A tensor is taken if reading it does not wait: 1-D integers on the CPU, outside torch.compile.
    """
    if isinstance(shifts, Tensor):
        integers = shifts.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        readable = shifts.device.type == "cpu" and not torch.compiler.is_compiling()
        if not integers or shifts.ndim != 1 or not readable:
            raise OptionError(
                f"shifts is a tensor {tuple(shifts.shape)} of {shifts.dtype} on {shifts.device}; "
                "pass a list of whole numbers."
            )
        return shifts.tolist()
    for shift in shifts:
        check_whole("shifts", shift)
    return [shift if isinstance(shift, (int, torch.SymInt)) else int(shift) for shift in shifts]


def check_vector(name: str, vector: Tensor | None, shape: tuple[int, ...] | torch.Size) -> None:
    """Raise unless `vector` is None, or a real tensor of `shape` that does not require grad."""
    if vector is None:
        return
    if vector.shape != shape:
        raise ShapeError(f"{name} is {tuple(vector.shape)}; it must be {tuple(shape)}.")
    if vector.is_complex():
        raise DtypeError(f"{name} is {vector.dtype}; it must be real.")
    if vector.requires_grad:
        raise OptionError(f"{name} requires a gradient, which the fused loss does not compute. Detach it.")


def check_chunk_bytes(chunk_bytes: int | None, name: str = "chunk_bytes") -> None:
    """Raise unless `chunk_bytes` is None or a positive integer. name: the option's name in the message."""
    if chunk_bytes is None:
        return
    check_whole(name, chunk_bytes)
    if chunk_bytes <= 0:
        raise OptionError(f"{name}={chunk_bytes} must be positive; leave it out for the default.")


def check_devices(**tensors: Tensor | None) -> None:
    """Raise unless all tensors are on the first one's device; a kernel would read another device's address."""
    (name, first), *others = tensors.items()
    assert first is not None
    for other, tensor in others:
        if tensor is not None and tensor.device != first.device:
            raise ShapeError(f"{other} is on {tensor.device}, {name} is on {first.device}; move one of them.")


def check_vocabulary(V: int) -> None:
    """Raise unless there is at least one class."""
    if V == 0:
        raise ShapeError("the vocabulary has 0 classes; V must be at least 1.")


# --- log-probabilities ---

LOGPROB_OUTPUTS = ("lse", "entropy", "predicted")


class LogprobOptions(NamedTuple):
    """The results that a call computes."""

    ignore_index: int = -100
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    entropy: bool = False
    predicted: bool = False


def check_logprob_options(
    *, vocab: int, ignore_index: int = -100, softcap: float | None = None, logit_scale: float = 1.0,
    temperature: float = 1.0, top_k: int = 0, outputs: Collection[str] = (),
) -> LogprobOptions:  # fmt: skip
    """The options of a call; raises `OptionError` for an invalid value."""
    check_whole("ignore_index", ignore_index)
    softcap, logit_scale = check_logit_map(softcap, logit_scale)
    temperature = check_temperature(temperature)
    check_whole("top_k", top_k)
    if not 0 <= top_k <= vocab:
        raise OptionError(f"top_k={top_k} is outside [0, {vocab}], the vocabulary; leave it out for none.")
    check_outputs(outputs, LOGPROB_OUTPUTS)
    return LogprobOptions(
        ignore_index, softcap, logit_scale, temperature, top_k, "entropy" in outputs, "predicted" in outputs
    )


def check_logit_map(softcap: float | None, logit_scale: float, prefix: str = "") -> tuple[float | None, float]:
    """softcap and logit_scale as floats; raises `OptionError` for an invalid value, with `prefix` before its name."""
    if softcap is not None and not 0.0 < check_number(f"{prefix}softcap", softcap) < math.inf:
        raise OptionError(f"{prefix}softcap={softcap} must be positive and finite; pass None for no cap.")
    if not -math.inf < check_number(f"{prefix}logit_scale", logit_scale) < math.inf or logit_scale == 0:
        raise OptionError(f"{prefix}logit_scale={logit_scale} must be finite and not 0; leave it out for none.")
    return None if softcap is None else float(softcap), float(logit_scale)


def check_temperature(temperature: float) -> float:
    """The temperature as a float; raises `OptionError` unless it is positive and finite."""
    if not 0.0 < check_number("temperature", temperature) < math.inf:
        raise OptionError(f"temperature={temperature} must be positive and finite; 1.0 leaves the logits as they are.")
    return float(temperature)
