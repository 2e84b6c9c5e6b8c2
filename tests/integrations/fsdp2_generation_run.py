"""GRPO with tigon's generator on gloo processes of a CPU: under FSDP2, and with whole weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from fsdp2_run import FSDP2, fsdp2_on_cpus
from trl_runs import build, of_time

from tigon.errors import UsageError
from tigon.integrations.trl import GraphGeneration, decode_in_graphs
from tigon.integrations.trl.whole_weights import BorrowingTwin


def written(
    rank: int, folder: Path, *, sharded: bool, lora: Callable[[], Any] | None = None,
    change: Callable[[int, GraphGeneration], None] | None = None, required: bool = False,
    fsdp: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Train, and write what this process generated, what it logged, and its weights after each rollout.

    change: called with the rank and the generation before the training. fsdp: further options of `fsdp_config`.
    """
    if sharded:
        fsdp2_on_cpus()
    torch.manual_seed(7)
    options = {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], **(fsdp or {})}} if sharded else {}
    trainer = build("GRPO", lora=lora, max_steps=2, learning_rate=0.01, **options)
    generation = decode_in_graphs(trainer, required=required)
    if change is not None:
        change(rank, generation)
    completions, divided, left = [], [], []
    generate = trainer.model.generate

    def kinds() -> dict[str, str]:
        return {name: type(weight).__name__ for name, weight in trainer.model.named_parameters()}

    def noted(*args: Any, **given: Any) -> torch.Tensor:
        before = kinds()
        try:
            completions.append(generate(*args, **given))
        finally:
            divided.append(kinds() == before and "DTensor" in before.values())
            twin: BorrowingTwin | None = generation._twin
            left.append(0 if twin is None else sum(not weight.is_meta for weight in twin.twin.parameters()))
        return completions[-1]

    trainer.model.generate = noted
    torch.manual_seed(11 + rank)
    error = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.train()
        except (UsageError, RuntimeError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    logs = [
        {key: value for key, value in entry.items() if isinstance(value, float | int) and not of_time(key)}
        for entry in trainer.state.log_history
    ]
    result = {"completions": completions, "divided": divided, "left": left, "logs": logs, "said": str(generation)}
    result |= {"error": error, "warned": [str(one.message) for one in warned]}
    torch.save(result, folder / f"{sharded}-{rank}.pt")
