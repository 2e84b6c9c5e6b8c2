"""`tigon plan`: turns flags into a request to the planner, and prints the answer as text, JSON or charts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tigon.errors import UsageError
from tigon.medusa.planned import planned
from tigon.models.loading import hub
from tigon.models.loading.config import load_config
from tigon.planner.gpus import find_gpu
from tigon.planner.request import Request
from tigon.planner.search.recommend import Plan, plan
from tigon.planner.search.space import Asked
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
"""Limit for batch sizes and counts of micro-batches. Beyond it tensor sizes overflow 64 bits."""
METHODS, POLICIES = ("trace", "study"), ("search", "study")
ATTENTIONS = ("sdpa", "eager")
_WORDS: Mapping[str, tuple[str, ...]] = {
    "precision": PRECISIONS, "optimizer": tuple(OPTIMIZERS), "kernels": KERNELS, "attention": ATTENTIONS,
    "offload": OFFLOADS, "method": METHODS, "policy": POLICIES,
}  # fmt: skip
# The planner changes these only on request: other kernels and attention are slower, and adapters train fewer weights.
_NEVER_FREE = frozenset({"kernels", "attention", "lora_rank", "lora_targets", "quantized", "gpus", "galore_rank",
                         "reshard"})  # fmt: skip


def command(
    model: Annotated[str, typer.Argument(help="A preset, a checkpoint folder, a config.json or a hub id.")],
    gpu: Annotated[str, typer.Option(help="A GPU's name (h200, rtx-4090) or its memory (24GiB).")],
    batch: Annotated[int | None, typer.Option(help="Sequences per micro-batch on each GPU.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, amp-bf16, amp-fp16 or bf16.")] = None,
    optimizer: Annotated[str | None, typer.Option(metavar="NAME", help="docs/techniques/optimizers.md")] = None,
    checkpointing: Annotated[str | None, typer.Option(help="none, full, every-N, selective or offload.")] = None,
    kernels: Annotated[str | None, typer.Option(help="none, no-flce, tigon or liger.")] = None,
    attention: Annotated[str | None, typer.Option(help="sdpa or eager.")] = None,
    zero: Annotated[int | None, typer.Option(help="DeepSpeed ZeRO stage: 0, 1, 2 or 3.")] = None,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="PyTorch FSDP2.")] = False,
    offload: Annotated[str | None, typer.Option(help="none, cpu or nvme.")] = None,
    lora: Annotated[int | None, typer.Option(metavar="R", help="Train LoRA adapters of rank R.")] = None,
    qlora: Annotated[bool, typer.Option("--qlora", help="With --lora: keep the base weights in 4 bits.")] = False,
    accumulate: Annotated[int | None, typer.Option(metavar="N", help="Micro-batches per step.")] = None,
    effective_batch: Annotated[
        int | None, typer.Option("--effective-batch", help="Sequences per step over all GPUs.")
    ] = None,
    medusa: Annotated[int | None, typer.Option(metavar="K", help="Train K Medusa heads.")] = None,
    stage: Annotated[
        int | None, typer.Option(help="With --medusa: 1 trains only the heads (default), 2 the model too.")
    ] = None,
    method: Annotated[str, typer.Option(help="trace, or study: the formulas of docs/study.md.")] = "trace",
    policy: Annotated[str, typer.Option(help="search, or study: the ladder of docs/study.md.")] = "search",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw charts.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the terms of each number.")] = False,
) -> None:
    """Predict a run's memory and time without a GPU, and recommend options that make it fit."""
    run(
        model, gpu=gpu, batch=batch, seq=seq, gpus=gpus, precision=precision, optimizer=optimizer,
        checkpointing=checkpointing, kernels=kernels, attention=attention, zero=zero, fsdp=fsdp, offload=offload,
        lora_rank=lora, quantized=qlora, accumulate=accumulate, effective_batch=effective_batch, medusa=medusa,
        stage=stage, method=method, policy=policy, as_json=as_json, plot=plot, explain=explain,
    )  # fmt: skip


def run(
    model: str, *, gpu: str, batch: int | None = None, seq: int | None = None, method: str = "trace",
    policy: str = "search", effective_batch: int | None = None, medusa: int | None = None, stage: int | None = None,
    as_json: bool = False, plot: Path | None = None, explain: bool = False, **given: Any,
) -> None:  # fmt: skip
    """Predict, plan and print. given: fields of Choices, with None for flags that were left out.

    Raises UsageError if a flag has an unknown value or a value out of range, or if flags exclude each other.
    """
    _quiet(model)
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    _check_words({**given, "method": method, "policy": policy})
    _check_numbers({"batch": batch, "seq": seq, "effective-batch": effective_batch, **given})
    if plot is not None and plot.exists() and not plot.is_dir():
        raise UsageError(f"--plot {plot} is a file; give a folder.")
    if stage is not None and medusa is None:
        raise UsageError(f"--stage {stage} requires --medusa N; add --medusa 3.")

    import torch

    torch.set_num_threads(1)  # nothing is computed, and OpenMP's threads spin while they wait
    choices = replace(Choices(), **given)
    if effective_batch is not None:
        batch = _micro_batch(effective_batch, batch, choices.gpus, given.get("accumulate"))
    free = {f.name for f in fields(Choices)} - set(given) - _NEVER_FREE
    if policy == "study" and "kernels" not in given:
        free.add("kernels")
    request = _request(model, choices, batch, seq, None if medusa is None else (medusa, stage or 1))
    asked = Asked(request=request, free=frozenset(free), gpu=find_gpu(gpu), effective_batch=effective_batch)
    _print(plan(asked, method="study" if method == "study" else "trace", by=policy), as_json, explain, plot)


def _request(
    model: str, choices: Choices, batch: int | None, seq: int | None, heads: tuple[int, int] | None
) -> Request:
    """heads: (number of Medusa heads, stage of their training), or None for a model without heads."""
    config = load_config(model)
    return Request(
        model=model, config=config, batch=DEFAULT_BATCH if batch is None else batch,
        seq=DEFAULT_SEQ if seq is None else seq, choices=choices, clipped=choices.optimizer != "galore-layerwise",
        heads=None if heads is None else planned(model, config, *heads), evaluated=EVALUATED,
    )  # fmt: skip


def _print(answer: Plan, as_json: bool, explain: bool, plot: Path | None) -> None:
    from rich.console import Console

    from tigon.planner.render import explain as explanation
    from tigon.planner.render import terminal

    if as_json:
        extra = {"explanation": explanation.lines(answer)} if explain else {}
        print(json.dumps(terminal.as_mapping(answer) | extra, indent=2))
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


def _check_words(flags: Mapping[str, Any]) -> None:
    for name, known in _WORDS.items():
        if name in flags and flags[name] not in known:
            raise UsageError(f"--{name} is {flags[name]!r}; choose one of {', '.join(known)}.")
    if "checkpointing" in flags and not re.fullmatch(CHECKPOINTING_PATTERN, flags["checkpointing"]):
        raise UsageError(
            f"--checkpointing is {flags['checkpointing']!r}; choose one of {', '.join(CHECKPOINTINGS)}, with N from 1 "
            "to 9999."
        )
    if "zero" in flags and flags["zero"] not in (0, 1, 2, 3):
        raise UsageError(f"--zero is {flags['zero']}; DeepSpeed's stages are 0, 1, 2 and 3.")
    if flags.get("quantized") and "lora_rank" not in flags:
        raise UsageError("--qlora keeps the model's weights in 4 bits, which cannot be trained; add --lora 16.")


def _check_numbers(said: Mapping[str, Any]) -> None:
    flags = {"lora_rank": "lora"}
    for name in ("batch", "seq", "effective-batch", "gpus", "accumulate", "lora_rank"):
        value = said.get(name)
        least, most = LIMITS.get(name, (1, None))
        if value is not None and value < least:
            raise UsageError(f"--{flags.get(name, name)} is {value}; it must be at least {least}.")
        most = most or (None if name == "seq" else MOST)  # the model limits --seq
        if value is not None and most is not None and value > most:
            raise UsageError(f"--{flags.get(name, name)} is {value}; it must be at most {most}.")


def _micro_batch(effective_batch: int, batch: int | None, gpus: int, accumulate: int | None) -> int | None:
    """Sequences per micro-batch if --effective-batch and --accumulate are both given, else `batch`."""
    each = gpus * (accumulate or 1)
    if effective_batch % each:
        divisor = f"--gpus {gpus}" + (f" x --accumulate {accumulate}" if accumulate else "")
        raise UsageError(f"--effective-batch {effective_batch} is not a multiple of {divisor}.")
    if accumulate is None:
        return batch
    if batch not in (None, effective_batch // each):
        raise UsageError(
            f"--batch {batch} x --accumulate {accumulate} x --gpus {gpus} is not --effective-batch {effective_batch}; "
            "leave one of them out."
        )
    return effective_batch // each


def _quiet(model: str) -> None:
    """Disable the network unless the model is a hub id, and silence libraries. Call before importing transformers."""
    hub.settle((model,))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # tigon turns the relevant warnings into errors
    quiet_packages()
