"""Rows of the table in docs/losses.md, results of pairs, and the base class of the modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class LossFormula(NamedTuple):
    """A row of the table in docs/losses.md.

    Attributes:
        formula: the loss, in the symbols that the page explains.
        papers: arXiv numbers.
    """

    formula: str
    papers: tuple[str, ...]


class PairLoss(NamedTuple):
    """A loss over pairs of a chosen and a rejected sequence, and the rewards that trainers log.

    Attributes:
        loss: (B,) loss of each pair; the mean is the batch's.
        chosen_rewards, rejected_rewards: (B,) implicit rewards, without gradient.
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def margins(self) -> Tensor:
        """(B,) chosen minus rejected reward."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> Tensor:
        """(B,) 1.0 where the chosen sequence has the higher reward, else 0.0."""
        return (self.chosen_rewards > self.rejected_rewards).to(self.loss.dtype)


def smoothed_logistic(margin: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log σ(margin) - e log σ(-margin), with e the probability that the label is wrong."""
    loss = -F.logsigmoid(margin)
    if not label_smoothing:
        return loss
    return (1.0 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-margin)


class LossModule(nn.Module):
    """A loss function that holds its options, under the same names; forward takes the function's other parameters.

    A subclass names the function, the options in the order of the constructor, and the function that checks them:
    the constructor raises `OptionError` under the conditions of the loss function.
    """

    __signature__: inspect.Signature
    _function: Callable[..., Any]
    _check: Callable[..., None]

    def __init_subclass__(
        cls, *, of: Callable[..., Any] | None = None, holds: str = "", check: Callable[..., None] | None = None
    ) -> None:
        super().__init_subclass__()
        if of is None or check is None:  # a user's subclass
            return
        parameters = inspect.signature(of).parameters
        held = [parameters[name].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in holds.split()]
        cls.__signature__, cls._function, cls._check = inspect.Signature(held), staticmethod(of), staticmethod(check)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        bound = self.__signature__.bind(*args, **options)
        bound.apply_defaults()
        self.options: dict[str, Any] = dict(bound.arguments)
        self._check(**self.options)

    def forward(self, *tensors: Any, **named: Any) -> Any:
        return self._function(*tensors, **named, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
