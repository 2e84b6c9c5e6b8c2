"""`return_token_accuracy` and `return_predicted_tokens`: optional outputs of a patched model's forward.

The fused loss knows the largest logit of each token, so a training step gets both outputs without the logits. A forward
that has computed the logits uses them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers.utils import ModelOutput


@dataclasses.dataclass(frozen=True)
class TokenMetrics:
    """The metrics that the caller of a forward requests."""

    accuracy: bool
    predicted: bool

    @staticmethod
    def pop(kwargs: dict[str, Any]) -> TokenMetrics | None:
        """Remove both keywords from a forward's `kwargs`; returns None if neither is true."""
        accuracy = bool(kwargs.pop("return_token_accuracy", False))
        predicted = bool(kwargs.pop("return_predicted_tokens", False))
        return TokenMetrics(accuracy, predicted) if accuracy or predicted else None

    def add(self, outputs: ModelOutput, predicted: Tensor, target: Tensor, ignore_index: int) -> Any:
        """Add the requested metrics to a model's outputs.

        Args:
            outputs: a ModelOutput, or the tuple of `return_dict=False`, to which they are appended.
            predicted: (N,) int64, the index of the largest logit of each token.
            target: (N,) int64, the label of each token.
            ignore_index: the label of tokens that do not count.

        Returns:
            The outputs with two more fields; a metric that was not requested is None.

            - `token_accuracy`: 0-dim fp32, the share of the counted tokens that were predicted.
            - `predicted_tokens`: (N,) int64, -1 for tokens that do not count.
        """
        counts = target != ignore_index
        hits = (predicted == target) & counts
        accuracy = hits.sum().float() / counts.sum().clamp(min=1) if self.accuracy else None
        tokens = torch.where(counts, predicted, -1) if self.predicted else None
        return self._join(outputs, accuracy, tokens)

    def add_none(self, outputs: ModelOutput) -> Any:
        """Like `add`, for outputs whose logits do not fit the labels: the requested metrics are None."""
        return self._join(outputs, None, None)

    def _join(self, outputs: ModelOutput, accuracy: Tensor | None, tokens: Tensor | None) -> Any:
        if isinstance(outputs, tuple):
            requested = ((self.accuracy, accuracy), (self.predicted, tokens))
            return (*outputs, *(metric for wanted, metric in requested if wanted))
        known = {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
        return _with_metrics(type(outputs))(**known, token_accuracy=accuracy, predicted_tokens=tokens)


# A dict and not functools.cache, which Dynamo ignores.
_classes: dict[type[Any], type[Any]] = {}


def _with_metrics(base: type[Any]) -> type[Any]:
    """The subclass of a ModelOutput with the two fields; the same class for the same base.

    DistributedDataParallel, FSDP and gather rebuild outputs field by field. They lose or refuse attributes that the
    class does not declare, so a class is needed.
    """
    if base not in _classes:
        _classes[base] = dataclasses.make_dataclass(
            f"{base.__name__}WithTokenMetrics",
            [(name, Tensor | None, None) for name in ("token_accuracy", "predicted_tokens")],
            bases=(base,),
            namespace={"__module__": __name__, "__reduce__": functools.partialmethod(_reduce, base)},
        )
    return _classes[base]


def _reduce(outputs: ModelOutput, base: type[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Pickle support: pickle cannot find the generated class by its name."""
    return _rebuild, (base, {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)})


def _rebuild(base: type[Any], values: dict[str, Any]) -> Any:
    return _with_metrics(base)(**values)
