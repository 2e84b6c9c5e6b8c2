"""`return_token_accuracy` and `return_predicted_tokens`: what a model's forward says about its predictions on request.

The loss inside the head knows the largest logit of each token, so a training step gets both without the logits. A
forward that has computed the logits takes them from there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class TokenMetrics:
    """Which of the two metrics the caller of one forward wants."""

    accuracy: bool
    predicted: bool

    @staticmethod
    def pop(kwargs: dict[str, Any]) -> TokenMetrics | None:
        """Take both keywords out of a forward's `kwargs`; None if neither is true."""
        accuracy = bool(kwargs.pop("return_token_accuracy", False))
        predicted = bool(kwargs.pop("return_predicted_tokens", False))
        return TokenMetrics(accuracy, predicted) if accuracy or predicted else None

    def add(self, outputs: Any, predicted: Tensor, target: Tensor, ignore_index: int) -> Any:
        """Put what was asked for on a model's outputs.

        Args:
            outputs: a ModelOutput, or the tuple of `return_dict=False`, at whose end they go.
            predicted: (N,) int64, the index of the largest logit of each token.
            target: (N,) int64, the label of each token.
            ignore_index: the label of tokens that do not count.

        Returns:
            Outputs with `token_accuracy`, the share of the counted tokens that were predicted, 0-dim fp32, and
            `predicted_tokens` (N,) int64, -1 where a token does not count; None for what was not asked for.
        """
        counts = target != ignore_index
        hits = (predicted == target) & counts
        accuracy = hits.sum().float() / counts.sum().clamp(min=1) if self.accuracy else None
        tokens = torch.where(counts, predicted, -1) if self.predicted else None
        if isinstance(outputs, tuple):
            return (*outputs, *(metric for metric in (accuracy, tokens) if metric is not None))
        known = {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
        return _with_metrics(type(outputs))(**known, token_accuracy=accuracy, predicted_tokens=tokens)


# A dict and not functools.cache, which Dynamo ignores.
_classes: dict[type[Any], type[Any]] = {}


def _with_metrics(base: type[Any]) -> type[Any]:
    """The subclass of a ModelOutput with the two fields; the same class for the same base.

    A class, because tools that rebuild outputs field by field (DistributedDataParallel, FSDP, gather) would lose, or
    refuse, an attribute that the class does not declare.
    """
    if base not in _classes:
        _classes[base] = dataclasses.make_dataclass(
            f"{base.__name__}WithTokenMetrics",
            [(name, Tensor | None, None) for name in ("token_accuracy", "predicted_tokens")],
            bases=(base,),
            namespace={"__module__": __name__, "__reduce__": functools.partialmethod(_reduce, base)},
        )
    return _classes[base]


def _reduce(outputs: Any, base: type[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """For pickle, which would not find the generated class by its name."""
    return _rebuild, (base, {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)})


def _rebuild(base: type[Any], values: dict[str, Any]) -> Any:
    return _with_metrics(base)(**values)
