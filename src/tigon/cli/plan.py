"""`tigon plan`: turns flags into a request to the planner, and prints the answer as text, JSON or charts."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tigon._quiet import quiet_packages
from tigon.cli.shared import Command
from tigon.errors import UsageError
from tigon.models.loading import hub
from tigon.objectives import post_training_rules, recipe_checks
from tigon.objectives.base import PlannedObjective
from tigon.objectives.causal_lm import PlannedCausalLM
from tigon.objectives.choose import planned_objective
from tigon.objectives.medusa import planned_medusa
from tigon.planner.gpus import find_gpu
from tigon.planner.remembered_config import real_config, remembered_config
from tigon.planner.render import charts, terminal
from tigon.planner.render import explain as explanation
from tigon.planner.request import Request
from tigon.planner.search.checkpointing import fastest
from tigon.planner.search.recommend import Plan, plan
from tigon.planner.search.space import SearchProblem, with_headroom
from tigon.techniques import SEARCHED, SETTINGS
from tigon.techniques.layer_checkpointing import AUTO
from tigon.techniques.optimizers import OPTIMIZERS
from tigon.techniques.records.choices import LIMITS, Choices

DEFAULT_BATCH, DEFAULT_SEQ = 8, 1024
"""The defaults of train.batch_size and data.sequence_length in a recipe."""
EVALUATED = True
"""A recommended recipe evaluates, because the default of data.eval_fraction is not 0."""
MOST = 1 << 20
"""Limit for batch sizes and counts of micro-batches. Beyond it tensor sizes overflow 64 bits."""
CAUSAL_LM = "causal_lm"
METHODS, POLICIES = ("trace", "study"), ("search", "study")


def _with_technique_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Replace `**given` in the signature, which typer reads, by the flags that the techniques declare."""
    signature = inspect.signature(function, eval_str=True)
    flags = []
    for setting in SETTINGS.values():
        flag = setting.flag
        if flag is not None:
            option = typer.Option(f"--{flag.name}", help=flag.help, metavar=flag.metavar)
            is_switch = setting.hint is bool
            flags.append(
                inspect.Parameter(
                    setting.field, inspect.Parameter.KEYWORD_ONLY, default=False if is_switch else None,
                    annotation=Annotated[bool if is_switch else setting.hint | None, option],
                )
            )  # fmt: skip
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    place = 1 + [p.name for p in own].index("seq")
    setattr(function, "__signature__", signature.replace(parameters=[*own[:place], *flags, *own[place:]]))  # noqa: B010
    return function


@_with_technique_flags
def command(
    model: Annotated[str, typer.Argument(help="A preset, a checkpoint folder, a config.json or a hub id.")],
    *,
    gpu: Annotated[str, typer.Option(help="A GPU's name (h200, rtx-4090) or its memory (24GiB).")],
    batch: Annotated[int | None, typer.Option(help="Samples per micro-batch on each GPU.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per sample.")] = None,
    effective_batch: Annotated[
        int | None, typer.Option("--effective-batch", help="Samples per optimizer step over all GPUs.")
    ] = None,
    medusa: Annotated[int | None, typer.Option(metavar="K", help="Train K Medusa heads.")] = None,
    stage: Annotated[
        int | None, typer.Option(help="With --medusa: 1 trains only the heads (default), 2 the model too.")
    ] = None,
    objective: Annotated[
        str, typer.Option(metavar="NAME", help=f"causal_lm, or post-training: {', '.join(post_training_rules.TAKES)}.")
    ] = CAUSAL_LM,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --objective: a recipe key of post_training."),
    ] = None,
    method: Annotated[str, typer.Option(help="trace, or study: the formulas of docs/study.md.")] = "trace",
    policy: Annotated[
        str, typer.Option(help="search, or study: the changes of the Liger study, one after another.")
    ] = "search",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw charts.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the terms of each number.")] = False,
    **given: Any,
) -> None:
    """Predict a run's memory and time without a GPU, and recommend options that make it fit."""
    run(
        model, gpu=gpu, batch=batch, seq=seq, effective_batch=effective_batch, medusa=medusa, stage=stage,
        objective=objective, assignments=assignments or (), method=method, policy=policy, as_json=as_json, plot=plot,
        explain=explain, **given,
    )  # fmt: skip


def run(
    model: str, *, gpu: str, batch: int | None = None, seq: int | None = None, method: str = "trace",
    policy: str = "search", effective_batch: int | None = None, medusa: int | None = None, stage: int | None = None,
    objective: str = CAUSAL_LM, assignments: Sequence[str] = (), as_json: bool = False, plot: Path | None = None,
    explain: bool = False, **given: Any,
) -> None:  # fmt: skip
    """Predict, plan and print. given: Fields of Choices; a flag that was left out is None.

    Raises:
        UsageError: A flag has an unknown value or a value out of range, or flags exclude each other.
    """
    _quiet(model)
    given = _with_implied({name: value for name, value in given.items() if value is not None and value is not False})
    chooses = given.get("checkpointing") == AUTO
    if chooses:
        del given["checkpointing"]  # the recommendations choose it too
    _check_words({"method": method, "policy": policy})
    _check_sizes({"batch": batch, "seq": seq, "effective-batch": effective_batch})
    _check_settings(given)
    if plot is not None and plot.exists() and not plot.is_dir():
        raise UsageError(f"--plot {plot} is a file; give a folder.")
    _check_objective(objective, {"medusa": medusa, "stage": stage}, assignments, {"method": method, "policy": policy})

    torch.set_num_threads(1)  # the planner computes no tensors, and OpenMP's threads spin while they wait
    choices = replace(Choices(), **given)
    if effective_batch is not None:
        batch = _micro_batch(effective_batch, batch, choices.gpus, given.get("accumulate"))
    free = SEARCHED - set(given)
    if policy == "study" and "kernels" not in given:
        free |= {"kernels"}
    config = remembered_config(model)
    if medusa is not None:
        planned: PlannedObjective = planned_medusa(model, real_config(config), medusa, stage or 1)
    else:
        planned = PlannedCausalLM() if objective == CAUSAL_LM else _post_training(objective, assignments)
    request = Request(
        model=model, config=config, batch=DEFAULT_BATCH if batch is None else batch,
        seq=DEFAULT_SEQ if seq is None else seq, choices=choices, clipped=not OPTIMIZERS[choices.optimizer].in_backward,
        masked=planned.pads and not choices.attention.startswith("flash"), objective=planned, evaluated=EVALUATED,
    )  # fmt: skip
    if chooses:
        request = fastest(request, with_headroom(find_gpu(gpu))).request
    problem = SearchProblem(request=request, free=free, gpu=find_gpu(gpu), effective_batch=effective_batch)
    _print(plan(problem, method="study" if method == "study" else "trace", by=policy), as_json, explain, plot)


def _check_objective(
    objective: str, heads: Mapping[str, int | None], assignments: Sequence[str], words: Mapping[str, str]
) -> None:
    """Refuse an unknown objective, and flags that do not go with it. heads: --medusa and --stage."""
    names = ", ".join(post_training_rules.TAKES)
    if objective == "medusa":
        raise UsageError("--objective medusa: use --medusa N for the heads.")
    if objective != CAUSAL_LM and objective not in post_training_rules.TAKES:
        raise UsageError(f"--objective {objective} is not one of {CAUSAL_LM}, {names}.")
    if objective == CAUSAL_LM:
        if heads["stage"] is not None and heads["medusa"] is None:
            raise UsageError(f"--stage {heads['stage']} requires --medusa N; add --medusa 3.")
        if assignments:
            raise UsageError(f"--set {assignments[0]} requires --objective with one of {names}.")
        return
    for name, value in heads.items():
        if value is not None:
            raise UsageError(f"--{name} {value} trains heads, which --objective {objective} does not; leave one out.")
    if "study" in words.values():
        name = next(name for name, value in words.items() if value == "study")
        raise UsageError(f"--{name} study describes {CAUSAL_LM}, not --objective {objective}; leave --{name} out.")


def _post_training(objective: str, assignments: Sequence[str]) -> PlannedObjective:
    for text in assignments:
        if not text.strip().startswith("post_training."):
            raise UsageError(
                f"--set {text}: a plan takes keys of post_training, such as post_training.beta=0.1; the other settings "
                "are flags (tigon plan --help)."
            )
    return planned_objective(recipe_checks.of_assignments([*assignments, f"train.objective={objective}"]))


def _print(answer: Plan, as_json: bool, explain: bool, plot: Path | None) -> None:
    from rich.console import Console

    if as_json:
        extra = {"explanation": explanation.lines(answer)} if explain else {}
        print(json.dumps(terminal.as_mapping(answer) | extra, indent=2))
    else:
        console = Console(highlight=False)
        terminal.show(answer, console)
        if explain:
            console.print(explanation.explanation(answer), markup=False, soft_wrap=True)
    if plot is not None:
        written = charts.write(answer, plot)
        if not as_json:
            Console(highlight=False).print(f"charts   {', '.join(map(str, written))}", markup=False, soft_wrap=True)


def _check_words(words: Mapping[str, str]) -> None:
    for name, known in (("method", METHODS), ("policy", POLICIES)):
        if words[name] not in known:
            raise UsageError(f"--{name} is {words[name]!r}; choose one of {', '.join(known)}.")


def _check_sizes(sizes: Mapping[str, int | None]) -> None:
    for name, value in sizes.items():
        least, _ = LIMITS.get(name, (1, None))
        if value is not None and value < least:
            raise UsageError(f"--{name} is {value}; it must be at least {least}.")
        if value is not None and value > MOST and name != "seq":  # the model limits --seq
            raise UsageError(f"--{name} is {value}; it must be at most {MOST}.")


def _check_settings(given: Mapping[str, Any]) -> None:
    """Check each setting by its own rules, with the flag's name in the message."""
    for name, value in given.items():
        setting, flag = SETTINGS[name], SETTINGS[name].flag
        assert flag is not None
        problem = (replace(setting, words=flag.words) if flag.words else setting).problem(value)
        if problem is None and isinstance(value, int) and value > MOST:
            problem = f"it must be at most {MOST}"
        if problem is not None:
            raise UsageError(f"--{flag.name} is {value!r}; {problem}.")


def _with_implied(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, and those that their flags imply: --qlora alone means a rank."""
    flags = [flag for name in given if (flag := SETTINGS[name].flag) is not None]
    return {name: value for flag in flags for name, value in flag.implies} | dict(given)


def _micro_batch(effective_batch: int, batch: int | None, gpus: int, accumulate: int | None) -> int | None:
    """Samples per micro-batch if --effective-batch and --accumulate are both given, else `batch`."""
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
    hub.set_offline_mode((model,))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # tigon turns the relevant warnings into errors
    quiet_packages()


COMMAND = Command(command, place=3)
