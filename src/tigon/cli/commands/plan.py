"""`tigon plan`: turns flags into a request to the planner, and prints the answer as text, JSON or charts."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tigon.cli import plan_answers, short_forms
from tigon.cli.plan_request import ANY_METHOD, Flags, problem_of
from tigon.cli.shared import Command, stdout_console
from tigon.errors import UsageError
from tigon.planner.collector import collector_off
from tigon.planner.gpus import find_gpu
from tigon.planner.render import charts, terminal
from tigon.planner.render.explain import paragraphs, wrapped_text
from tigon.planner.search.longest import LongestRow, longest_rows
from tigon.planner.search.recommend import Plan, plan


def _with_short_forms(function: Callable[..., None]) -> Callable[..., None]:
    """Replace `**given` in the signature, which typer reads, by the flags of the table."""
    signature = inspect.signature(function, eval_str=True)
    flags = []
    for short in short_forms.PLAN:
        option = typer.Option(f"--{short.flag}", help=short.help, metavar=short.metavar)
        is_switch = short.type is bool
        default, form = (False, bool) if is_switch else (None, short.type | None)
        flags.append(
            inspect.Parameter(
                short.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[form, option]
            )
        )
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    place = 1 + [p.name for p in own].index("gpu")
    setattr(function, "__signature__", signature.replace(parameters=[*own[:place], *flags, *own[place:]]))  # noqa: B010
    return function


@_with_short_forms
def command(
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL|RECIPE.yaml", help="A recipe, preset, checkpoint folder, config.json or hub id."),
    ],
    *,
    gpu: Annotated[str | None, typer.Option(help="A GPU's name (h200, 4090, t4) or its memory (24GiB).")] = None,
    effective_batch: Annotated[
        int | None, typer.Option("--effective-batch", help="Samples per optimizer step over all GPUs.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="full, lora, qlora, or auto: full fine-tuning if it fits, else LoRA, else QLoRA.")
    ] = ANY_METHOD,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", metavar="SIZE", help="Host memory that offloading may use (64GiB).")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key; most other flags are short forms of it."),
    ] = None,
    longest: Annotated[
        bool, typer.Option("--longest", help="Find the longest row that fits, by kind of activation checkpointing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw charts.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the terms of each number, and every recommendation in detail.")
    ] = False,
    **given: object,
) -> None:
    """Predict a run's memory and time without a GPU, and recommend options that make it fit."""
    own = {"gpu": gpu, "effective_batch": effective_batch, "method": method, "host_memory": host_memory}
    shown = {"longest": longest, "as_json": as_json, "plot": plot, "explain": explain}
    plan_answers.print_once(run, target, {**own, "assignments": assignments or (), **shown, **given})


def run(
    model: str,
    *,
    gpu: str | None,
    effective_batch: int | None = None,
    method: str = ANY_METHOD,
    host_memory: str | None = None,
    assignments: Sequence[str] = (),
    longest: bool = False,
    as_json: bool = False,
    plot: Path | None = None,
    explain: bool = False,
    **given: object,
) -> None:
    """Predict, plan and print. given: Flags of the table in short_forms.py.

    Raises:
        UsageError: A flag has an unknown value or a value out of range, or flags exclude each other.
    """
    if plot is not None and plot.exists() and not plot.is_dir():
        raise UsageError(f"--plot {plot} is a file; give a folder.")
    if gpu is None:
        raise UsageError("--gpu is missing; give a GPU's name (h200) or its memory (24GiB).")
    flags = Flags(
        target=model,
        gpu=find_gpu(gpu),
        given=short_forms.keys_of(given),
        assignments=assignments,
        effective_batch=effective_batch,
        method=method,
        host_memory=host_memory,
    )
    torch.set_num_threads(1)  # the planner computes no tensors, and OpenMP's threads spin while they wait
    with collector_off():
        problem = problem_of(flags)
        answer = plan(problem)
        keep_batch = short_forms.BATCH.key in flags.given
        rows = longest_rows(answer, keep_batch=keep_batch) if longest else ()
    _print(answer, rows, as_json, explain, plot)


def _print(answer: Plan, rows: Sequence[LongestRow], as_json: bool, explain: bool, plot: Path | None) -> None:
    console = stdout_console()
    if as_json:
        extra: dict[str, Any] = {"explanation": paragraphs(answer)} if explain else {}
        if rows:
            extra["longest"] = [terminal.longest_mapping(row) for row in rows]
        print(json.dumps(terminal.as_mapping(answer) | extra, indent=2))
    else:
        if rows:
            terminal.show_longest(answer, rows, console)
        terminal.show(answer, console, details=explain)
        if explain:
            console.print(wrapped_text(answer), markup=False, soft_wrap=True)
    if plot is not None:
        written = charts.write(answer, plot)
        if not as_json:
            console.print(f"charts   {', '.join(map(str, written))}", markup=False, soft_wrap=True)


COMMAND = Command(command, place=3)
