"""DeepSpeed's compiled Adam on the host (`sharding.offload`): a step's update is the same, whatever ran before it."""

from __future__ import annotations

from typing import Any

import torch

ELSEWHERE = 2**30  # a step that no run gets to


class ExactBetaPowers:
    """DeepSpeed's operators, with powers of the betas that do not depend on the steps taken in this process.

    Its operator multiplies a power by its beta once a step, in fp32, and takes pow() only where the step does not
    follow the last one (0.19.8, csrc/includes/cpu_adam.h: IncrementStep), as in the first step of a resumed run: the
    two round apart, by 6e-8 of a weight. One element updated in between has every step take pow(); that costs
    microseconds.
    """

    def __init__(self, operators: Any) -> None:
        self._operators = operators
        self._element = torch.zeros(4, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def adam_update(self, optimizer_id: int, step: int, *rest: Any) -> None:
        settings = rest[:-4]
        self._operators.adam_update(optimizer_id, ELSEWHERE, *settings, *self._element)
        self._operators.adam_update(optimizer_id, step, *rest)


def use_exact_beta_powers(optimizer: Any) -> None:
    """Have `optimizer`, if it is DeepSpeed's on the host, take powers so."""
    operators = getattr(optimizer, "ds_opt_adam", None)
    if operators is not None:
        optimizer.ds_opt_adam = ExactBetaPowers(operators)
