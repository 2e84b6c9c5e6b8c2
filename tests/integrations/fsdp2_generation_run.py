"""GRPO with tigon's generator on gloo processes of a CPU: under FSDP2, and with whole weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fsdp2_run import FSDP2, fsdp2_on_cpus
from trl_runs import build, of_time

from tigon.integrations.trl import decode_in_graphs
from tigon.integrations.trl.whole_weights import BorrowingTwin


def written(rank: int, folder: Path, *, sharded: bool, lora: Callable[[], Any] | None, refuse: str = "") -> None:
    """Train, and write what this process generated, what it logged, and its weights after each rollout."""
    if sharded:
        fsdp2_on_cpus()
    torch.manual_seed(7)
    trainer = build("GRPO", lora=lora, max_steps=2, learning_rate=0.01, **(FSDP2 if sharded else {}))
    generation = decode_in_graphs(trainer)
    if refuse and rank == 1:
        vars(generation)["_missing_memory"] = lambda *_: refuse
    completions, divided, left = [], [], []
    generate = trainer.model.generate

    def kinds() -> dict[str, str]:
        return {name: type(weight).__name__ for name, weight in trainer.model.named_parameters()}

    def noted(*args: Any, **given: Any) -> torch.Tensor:
        before = kinds()
        completions.append(generate(*args, **given))
        divided.append(kinds() == before and "DTensor" in before.values())
        twin: BorrowingTwin | None = generation._twin
        left.append(0 if twin is None else sum(not weight.is_meta for weight in twin.twin.parameters()))
        return completions[-1]

    trainer.model.generate = noted
    torch.manual_seed(11 + rank)
    trainer.train()
    logs = [
        {key: value for key, value in entry.items() if isinstance(value, float | int) and not of_time(key)}
        for entry in trainer.state.log_history
    ]
    result = {"completions": completions, "divided": divided, "left": left, "logs": logs, "said": str(generation)}
    torch.save(result, folder / f"{sharded}-{rank}.pt")
