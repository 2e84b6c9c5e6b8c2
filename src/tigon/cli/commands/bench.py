"""`tigon bench kernels` and `tigon bench train`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from tigon.cli.shared import Command

Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record to this file after every line.")]
Resume = Annotated[bool, typer.Option("--resume", help="Measure only what the record at --json lacks.")]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit", metavar="SECONDS", help="Start nothing more after this time.")
]


def kernels_command(
    *,
    suite: Annotated[
        str | None, typer.Option(help="usual (a layer of an 8B model) or small. Default: by whether there is a GPU.")
    ] = None,
    ops: Annotated[list[str] | None, typer.Option("--op", help="Only this op; may be repeated.")] = None,
    impls: Annotated[
        list[str] | None, typer.Option("--impl", help="tigon, eager, compile, torch or liger; may be repeated.")
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave this implementation out; may be repeated.")] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="AxB", help="Shape to use instead of the suite's, for one --op; repeatable."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32. Default: bf16 on a GPU, fp32 on a CPU.")
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Rounds. Every implementation runs once per round.")] = 20,
    time_limit: TimeLimit = None,
    json: Json = None,
    resume: Resume = False,
) -> None:
    """Measure time, memory and error of every op, beside PyTorch, torch.compile and Liger."""
    from tigon.bench.kernels import KernelOptions, bench_kernels  # not for --help
    from tigon.bench.session import Session  # not for --help

    bench_kernels(
        KernelOptions(
            suite=suite,
            ops=ops or (),
            impls=impls or (),
            without=without or (),
            shapes=shapes or (),
            dtype=dtype,
            repetitions=repetitions,
            session=Session(time_limit_s=time_limit, json_path=json, resume=resume),
        )
    )


def train_command(
    *,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="NAME", help="Preset, config.json, folder or hub id; weights are random."),
    ] = None,
    batches: Annotated[
        list[int] | None, typer.Option("--batch", metavar="N", help="Samples per optimizer step.")
    ] = None,
    seqs: Annotated[list[int] | None, typer.Option("--seq", metavar="N", help="Tokens per sample.")] = None,
    precisions: Annotated[
        list[str] | None, typer.Option("--precision", help="bf16, amp-bf16 or fp32, as train.precision.")
    ] = None,
    memories: Annotated[
        list[str] | None,
        typer.Option("--memory", metavar="SIZE", help="Peak allowed to auto and fits, e.g. 24GiB. Default: the GPU's."),
    ] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option("--variant", metavar="CODE:RECOMPUTED[@MICRO]", help="E.g. liger:none@fits, tigon:full@8."),
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave this variant out; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds. Every variant has one turn per round.")] = 3,
    steps: Annotated[int, typer.Option(help="Timed steps of a turn, after one that is not timed.")] = 2,
    time_limit: TimeLimit = None,
    json: Json = None,
    resume: Resume = False,
) -> None:
    """Measure whole training steps against other libraries: tokens/s, peak memory and time by kind.

    Options of a case may be repeated; every combination is measured.
    """
    from tigon.bench.session import Session  # not for --help
    from tigon.bench.training.command import TrainOptions, bench_train  # not for --help

    bench_train(
        TrainOptions(
            models=models or (),
            batches=batches or (),
            seqs=seqs or (),
            precisions=precisions or (),
            memories=memories or (),
            variants=variants or (),
            without=without or (),
            rounds=rounds,
            steps=steps,
            session=Session(time_limit_s=time_limit, json_path=json, resume=resume),
            command=shlex.join(["tigon", *sys.argv[1:]]),
        )
    )


_GROUP = typer.Typer(
    help="Measure kernels and training steps against other libraries and the hardware's limit.", no_args_is_help=True
)
_GROUP.command("kernels")(kernels_command)
_GROUP.command("train")(train_command)
COMMAND = Command(_GROUP, place=8)
