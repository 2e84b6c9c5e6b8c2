"""Tokens/s and memory, for the records of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tigon.profiler.recording.device_memory import used_bytes
from tigon.techniques import tensor_parallel
from tigon.techniques.sequence_parallel.sequence_parallel import shards_of


class Speed:
    """Counts the tokens of a trainer's steps. The time of evaluation and saving is left out."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._alike = shards_of(trainer.model) * tensor_parallel.group_size(trainer.model)
        self.n_micro_batches = 0
        self.n_positions = 0
        """Tokens of the micro-batches that this process has read, padding included."""
        self.restart()

    def restart(self) -> None:
        """Begin a new measurement."""
        self.n_tokens = 0
        """This process's share of the tokens since then."""
        self._since_s = time.perf_counter()

    @contextmanager
    def counting(self, inputs: Any) -> Iterator[None]:
        """Count the tokens of a micro-batch. GRPO's is a list of prompts, whose completions are written inside."""
        if not self.n_micro_batches:
            self.restart()  # other callbacks have started trackers meanwhile
        self.n_micro_batches += 1
        named = inputs.items() if isinstance(inputs, Mapping) else ()
        n_positions = sum(int(value.numel()) for name, value in named if name.endswith("input_ids"))
        self.n_positions += n_positions
        self.n_tokens += n_positions // self._alike
        state = self._trainer.state
        before = state.num_input_tokens_seen
        yield
        # TRL counts the tokens of all processes, and the records multiply by their number.
        self.n_tokens += int(state.num_input_tokens_seen - before) // self._trainer.args.world_size

    def take(self) -> dict[str, float]:
        """The figures for a record, and begin a new measurement."""
        args = self._trainer.args
        tokens_per_s = self.n_tokens * args.world_size / (time.perf_counter() - self._since_s)
        now_bytes, peak_bytes = used_bytes(args.device)
        self.restart()
        return {"tokens_per_s": tokens_per_s, "memory_bytes": now_bytes, "memory_peak_bytes": peak_bytes}
