"""Makes the update of DeepSpeed's compiled CPU Adam (`sharding.offload`) independent of the steps before it."""

from __future__ import annotations

from typing import Any

import torch

UNUSED_STEP = 2**30  # a step number that no run reaches


class ExactBetaPowers:
    """DeepSpeed's operators, with powers of the betas that do not depend on earlier steps in this process.

    DeepSpeed multiplies each power by its beta once per step, in fp32. It calls pow() only if a step does not follow
    the last one, as in the first step of a resumed run (0.19.8, csrc/includes/cpu_adam.h: IncrementStep). The two round
    differently, by 6e-8 of a weight. Updating one element with an unused step number before each step makes every step
    call pow(), which costs microseconds.
    """

    def __init__(self, operators: Any) -> None:
        self._operators = operators
        self._element = torch.zeros(4, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def adam_update(self, optimizer_id: int, step: int, *rest: Any) -> None:
        settings = rest[:-4]
        self._operators.adam_update(optimizer_id, UNUSED_STEP, *settings, *self._element)
        self._operators.adam_update(optimizer_id, step, *rest)


def use_exact_beta_powers(optimizer: Any) -> None:
    """Apply ExactBetaPowers to `optimizer` if it is DeepSpeed's CPU Adam."""
    operators = getattr(optimizer, "ds_opt_adam", None)
    if operators is not None:
        optimizer.ds_opt_adam = ExactBetaPowers(operators)
