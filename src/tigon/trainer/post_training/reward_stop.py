"""Ends training when the reward has collapsed, or when completions reach their longest length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from tigon.recipe.keys import PostTrainingConfig

COUNTED = "reward_stop"


class RewardStop(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Counts records in a row beyond `stop_reward_drop` and `stop_clipped_share`. Every process has the same ones."""

    def __init__(self, keys: PostTrainingConfig) -> None:
        self._keys = keys
        self._best: float | None = None
        self._low, self._clipped = 0, 0
        """Records in a row."""

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        if "loss" not in (logs or {}) or logs is None:
            return
        reward, share, keys = logs.get("reward"), logs.get("completions/clipped_ratio"), self._keys
        if reward is not None and keys.stop_reward_drop is not None:
            self._best = reward if self._best is None else max(self._best, reward)
            self._low = self._low + 1 if reward <= self._best - keys.stop_reward_drop else 0
        if share is not None and keys.stop_clipped_share is not None:
            self._clipped = self._clipped + 1 if share >= keys.stop_clipped_share else 0
        if self.reason() is not None:
            control.should_training_stop = True

    def reason(self) -> str | None:
        """Why training ends, in a sentence; None if it goes on."""
        keys, records = self._keys, f"in {self._keys.stop_patience} records in a row"
        if self._low >= keys.stop_patience:
            return (
                f"the reward was at least {keys.stop_reward_drop:g} below its best record, {self._best:.4g}, {records} "
                "(post_training.stop_reward_drop); try a lower train.learning_rate, or beta above 0"
            )
        if self._clipped >= keys.stop_patience:
            return (
                f"at least {keys.stop_clipped_share:.0%} of the completions reached {keys.completion_length} tokens "
                f"{records} (post_training.stop_clipped_share); raise completion_length, or reward shorter ones"
            )
        return None

    def counted(self) -> dict[str, Any]:
        return {COUNTED: [self._best, self._low, self._clipped]}

    def resume_counting(self, counted: Mapping[str, Any]) -> None:
        if COUNTED in counted:
            self._best, self._low, self._clipped = counted[COUNTED]
