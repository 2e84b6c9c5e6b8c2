"""Completions with their rewards: of each record a few are printed, stored in metrics.jsonl and given to trackers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerState

from tigon.objectives.post_training.reward_entries import RewardEntry
from tigon.rewards import text_of

EVENT = "completion"
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class _Completion:
    prompt: str
    text: str
    rewards: Mapping[str, float]
    """The reward of each function that has scored it."""
    reward: float
    """Their sum, each times its weight."""


class CompletionLog(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Keeps the last completions that were scored, and shows a few of them with each record of the trainer."""

    def __init__(self, entries: Sequence[RewardEntry], count: int) -> None:
        self._weights, self._count = {entry.title: entry.weight for entry in entries}, count
        self._prompts: Sequence[Any] = ()
        self._completions: Sequence[Any] = ()
        self._rewards: dict[str, Sequence[float | None]] = {}

    def show(
        self, write: Callable[[dict[str, Any]], None], console: Console, tables: Sequence[Callable[[Rows, int], None]]
    ) -> None:
        """Say where to show completions. The main process calls it before it adds this callback to a trainer.

        Args:
            write: Appends a record to metrics.jsonl.
            console: Gets a line for each completion.
            tables: Trackers, each called with the rows of a table and the step.
        """
        self._write, self._console, self._tables = write, console, tables

    def note(
        self, title: str, prompts: Sequence[Any], completions: Sequence[Any], rewards: Sequence[float | None]
    ) -> None:
        """A reward function has scored completions. Functions that score the same ones get the same list."""
        if completions is not self._completions:
            self._prompts, self._completions, self._rewards = prompts, completions, {}
        self._rewards[title] = rewards

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, Any] | None = None, **kwargs: object
    ) -> None:
        is_eval = "eval_loss" in (logs or {})
        if not (is_eval or "loss" in (logs or {})) or not self._completions:
            return
        label = f"step {state.global_step}, eval" if is_eval else f"step {state.global_step}"
        rows = [
            {"label": label, "prompt": one.prompt, "text": one.text, "reward": one.reward, "rewards": one.rewards}
            for one in self.chosen()
        ]
        for row in rows:
            self._write({"event": EVENT, "step": state.global_step, **row})
            self._console.out(_line(row, self._console.width))
        for table in self._tables if rows else ():
            table(rows, state.global_step)

    def chosen(self) -> list[_Completion]:
        """Completions from the best to the worst, at equal distances in that order."""
        found = sorted(self._scored(), key=lambda one: one.reward, reverse=True)
        last, count = len(found) - 1, min(self._count, len(found))
        return [found[i * last // max(count - 1, 1)] for i in range(count)]

    def _scored(self) -> list[_Completion]:
        scored = []
        for i, (prompt, completion) in enumerate(zip(self._prompts, self._completions, strict=True)):
            of_one = ((title, rewards[i]) for title, rewards in self._rewards.items())
            own = {title: float(reward) for title, reward in of_one if reward is not None}
            total = sum(self._weights[title] * reward for title, reward in own.items())
            scored.append(_Completion(text_of(prompt), _shown(completion), own, total))
        return scored


def _shown(completion: Any) -> str:
    """The text of a completion; of several messages, each with its role, and calls of tools as JSON."""
    if isinstance(completion, str) or (len(completion) == 1 and not completion[0].get("tool_calls")):
        return text_of(completion)
    parts = (
        f"{turn['role']}: {turn.get('content') or ''}{json.dumps(turn['tool_calls']) if turn.get('tool_calls') else ''}"
        for turn in completion
    )
    return "\n".join(parts)


def _line(row: Mapping[str, Any], width: int) -> str:
    """One line for the terminal; long texts lose their end."""
    start = f"         reward {row['reward']:.2f}: "
    room = max(20, width - len(start) - 4)
    prompt = _cut(repr(row["prompt"]), room // 2)
    return f"{start}{prompt} -> {_cut(repr(row['text']), room - len(prompt))}"


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 3]}..."


def table_of(records: Sequence[Mapping[str, Any]], most: int) -> tuple[list[str], list[list[str]]]:
    """For the report: the titles of the columns, and the completions of `most` labels from the first to the last."""
    own = [record for record in records if record["event"] == EVENT]
    labels = list(dict.fromkeys(record["label"] for record in own))
    last, count = len(labels) - 1, min(most, len(labels))
    kept = {labels[i * last // max(count - 1, 1)] for i in range(count)}
    titles = list(dict.fromkeys(title for record in own for title in record["rewards"]))
    rows = [
        [
            record["label"], record["prompt"], record["text"], f"{record['reward']:.2f}",
            *(f"{record['rewards'][title]:.2f}" if title in record["rewards"] else "" for title in titles),
        ]
        for record in own
        if record["label"] in kept
    ]  # fmt: skip
    return ["", "prompt", "completion", "reward", *titles], rows
