"""`tigon plan`: flags to a question, the answer to a terminal, JSON or charts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tigon.errors import UsageError
from tigon.techniques.choices import (
    CHECKPOINTING_PATTERN,
    CHECKPOINTINGS,
    KERNELS,
    LIMITS,
    OFFLOADS,
    PRECISIONS,
    Choices,
)
from tigon.techniques.optimizers import OPTIMIZERS
from tigon.techniques.quiet import quiet_packages

DEFAULT_BATCH, DEFAULT_SEQ = 8, 1024
"""The recipe's train.batch_size and data.sequence_length."""
EVALUATED = True
"""The recipe's data.eval_fraction is not 0, so that a recommended recipe evaluates."""
MOST = 1 << 20
"""Of rows and micro-batches: sizes of tensors beyond are no longer 64-bit numbers."""
METHODS, POLICIES = ("trace", "study"), ("search", "study")
ATTENTIONS = ("sdpa", "eager")
_WORDS: Mapping[str, tuple[str, ...]] = {
    "precision": PRECISIONS, "optimizer": tuple(OPTIMIZERS), "kernels": KERNELS, "attention": ATTENTIONS,
    "offload": OFFLOADS, "method": METHODS, "policy": POLICIES,
}  # fmt: skip
# The planner chooses these only where they are asked for: other kernels and attention are slower, adapters train less.
_NEVER_FREE = frozenset({"kernels", "attention", "lora_rank", "lora_targets", "quantized", "gpus", "galore_rank",
                         "reshard"})  # fmt: skip


def run(
    model: str, *, gpu: str, batch: int | None = None, seq: int | None = None, method: str = "trace",
    policy: str = "search", effective_batch: int | None = None, medusa: int | None = None, stage: int | None = None,
    heads: Callable[[str, Any, int, int], Any] | None = None, as_json: bool = False, plot: Path | None = None,
    explain: bool = False, **given: Any,
) -> None:  # fmt: skip
    """Predict and plan, and print it. `given`: fields of Choices, None where the flag was left out; `heads` makes
    `medusa` heads for a `stage` from the model's name and config."""
    from rich.console import Console

    _quiet(model)
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    _check_words({**given, "method": method, "policy": policy})
    _check_numbers({"batch": batch, "seq": seq, "effective-batch": effective_batch, **given})
    if plot is not None and plot.exists() and not plot.is_dir():
        raise UsageError(f"--plot {plot} is a file; name a folder.")

    if stage is not None and medusa is None:
        raise UsageError(f"--stage {stage} is of heads, and there are none; add --medusa 3.")

    import torch

    from tigon.models.loading.config import load_config
    from tigon.planner.gpus import find_gpu
    from tigon.planner.render import explain as explanation
    from tigon.planner.render import terminal
    from tigon.planner.request import Request
    from tigon.planner.search.recommend import plan
    from tigon.planner.search.space import Asked

    torch.set_num_threads(1)  # nothing is computed, and OpenMP's threads spin while they wait
    found_gpu = find_gpu(gpu)
    choices = replace(Choices(), **given)
    if effective_batch is not None:
        batch = _micro_batch(effective_batch, batch, choices.gpus, given.get("accumulate"))
    free = {f.name for f in fields(Choices)} - set(given) - _NEVER_FREE
    if policy == "study" and "kernels" not in given:
        free.add("kernels")
    config = load_config(model)
    asked = Asked(
        request=Request(
            model=model, config=config, batch=DEFAULT_BATCH if batch is None else batch,
            seq=DEFAULT_SEQ if seq is None else seq, choices=choices,
            clipped=choices.optimizer != "galore-layerwise",
            heads=None if medusa is None or heads is None else heads(model, config, medusa, stage or 1),
            evaluated=EVALUATED,
        ),
        free=frozenset(free), gpu=found_gpu, effective_batch=effective_batch,
    )  # fmt: skip
    answer = plan(asked, method="study" if method == "study" else "trace", by=policy)
    if as_json:
        said = {"explanation": explanation.lines(answer)} if explain else {}
        print(json.dumps(terminal.as_mapping(answer) | said, indent=2))
    else:
        console = Console(highlight=False)
        terminal.show(answer, console)
        if explain:
            console.print(explanation.explanation(answer), markup=False, soft_wrap=True)
    if plot is not None:
        from tigon.planner.render import charts

        written = charts.write(answer, plot)
        if not as_json:
            Console(highlight=False).print(f"charts   {', '.join(map(str, written))}", markup=False, soft_wrap=True)


def _check_words(said: Mapping[str, Any]) -> None:
    for name, known in _WORDS.items():
        if name in said and said[name] not in known:
            raise UsageError(f"--{name} is {said[name]!r}; choose one of {', '.join(known)}.")
    if "checkpointing" in said and not re.fullmatch(CHECKPOINTING_PATTERN, said["checkpointing"]):
        raise UsageError(
            f"--checkpointing is {said['checkpointing']!r}; choose one of {', '.join(CHECKPOINTINGS)}, with N of 1 to "
            "9999."
        )
    if "zero" in said and said["zero"] not in (0, 1, 2, 3):
        raise UsageError(f"--zero is {said['zero']}; DeepSpeed's stages are 0, 1, 2 and 3.")
    if said.get("quantized") and "lora_rank" not in said:
        raise UsageError("--qlora keeps the model's weights in 4 bits, which cannot be trained; add --lora 16.")


def _check_numbers(said: Mapping[str, Any]) -> None:
    flags = {"lora_rank": "lora"}
    for name in ("batch", "seq", "effective-batch", "gpus", "accumulate", "lora_rank"):
        value = said.get(name)
        least, most = LIMITS.get(name, (1, None))
        if value is not None and value < least:
            raise UsageError(f"--{flags.get(name, name)} is {value}; it must be at least {least}.")
        most = most or (None if name == "seq" else MOST)  # that one has the model's limit
        if value is not None and most is not None and value > most:
            raise UsageError(f"--{flags.get(name, name)} is {value}; it must be at most {most}.")


def _micro_batch(effective_batch: int, batch: int | None, gpus: int, accumulate: int | None) -> int | None:
    """Rows of a micro-batch where both the step's rows and the number of micro-batches were given; else `batch`."""
    each = gpus * (accumulate or 1)
    if effective_batch % each:
        said = f"--gpus {gpus}" + (f" x --accumulate {accumulate}" if accumulate else "")
        raise UsageError(f"--effective-batch {effective_batch} is no multiple of {said}.")
    if accumulate is None:
        return batch
    if batch not in (None, effective_batch // each):
        raise UsageError(
            f"--batch {batch} x --accumulate {accumulate} x --gpus {gpus} is not --effective-batch {effective_batch}; "
            "leave one of them out."
        )
    return effective_batch // each


def _quiet(model: str) -> None:
    """No network unless the model is a hub id, and none of the libraries' chatter; before transformers is imported."""
    from tigon.models.loading import hub

    hub.settle((model,))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what matters of its warnings is refused
    quiet_packages()
