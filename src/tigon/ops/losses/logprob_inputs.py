"""What log-probabilities are given: their options, ids and mask, checked once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.ops.dispatch import check_number, check_whole
from tigon.ops.losses.inputs import check_devices, check_labels, check_outputs, wants_label_check

# N rows (tokens), K ids of a row.

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
    vocab: int,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    top_k: int = 0,
    outputs: Collection[str] = (),
) -> LogprobOptions:
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


def flat_ids(ids: Tensor, mask: Tensor | None, rows: torch.Size, ignore_index: int, of: str) -> Tensor:
    """`ids` as (N, K), ignore_index where `mask` is False; raises unless ids are (...) or (..., K) and mask (...)."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"ids are {ids.dtype}; the limit is int64 and int32. Cast them.")
    if ids.shape[: len(rows)] != rows or ids.ndim > len(rows) + 1 or (ids.ndim > len(rows) and not ids.shape[-1]):
        raise ShapeError(
            f"ids are {tuple(ids.shape)}, {of} has rows {tuple(rows)}; ids must be {tuple(rows)}, or "
            f"{(*rows, 'K')} for K ids of each token."
        )
    K = ids.shape[-1] if ids.ndim > len(rows) else 1
    ids_NK = ids.reshape(-1, K)
    if mask is not None:
        check_mask(mask, rows)
        ids_NK = torch.where(mask.reshape(-1, 1), ids_NK, ignore_index)
    return ids_NK.contiguous()


def check_mask(mask: Tensor, rows: torch.Size) -> None:
    """Raise unless `mask` holds a bool for each row."""
    if mask.shape != rows or mask.dtype != torch.bool:
        raise ShapeError(
            f"mask is {tuple(mask.shape)} of {mask.dtype}; it must be {tuple(rows)} of torch.bool, True for the "
            "tokens that count."
        )


def check_ids(like: Tensor, ids_NK: Tensor, vocab: int, ignore_index: int) -> None:
    """Raise `LabelError` for an id outside the vocabulary, where labels are checked at all."""
    if wants_label_check(like):
        check_labels(vocab, ids_NK, ignore_index)


class LogprobInputs(NamedTuple):
    """What a call is given besides logits, or hidden states and a head."""

    ids_NK: Tensor
    options: LogprobOptions
    lse: bool
    shape: torch.Size
    """Of the ids."""
    rows: torch.Size

    @classmethod
    def of(
        cls, name: str, states: Tensor, ids: Tensor, mask: Tensor | None, vocab: int, given: Mapping[str, Any]
    ) -> LogprobInputs:
        """Check and flatten the arguments. name: that of `states` (..., H or V). vocab: a bound of the vocabulary.

        given: the arguments of `check_logprob_options`.
        """
        check_devices(**{name: states, "ids": ids, "mask": mask})
        options, rows = check_logprob_options(vocab, **given), states.shape[:-1]
        ids_NK = flat_ids(ids, mask, rows, options.ignore_index, name)
        return cls(ids_NK, options, "lse" in given.get("outputs", ()), ids.shape, rows)
