"""`tigon bench kernels` and `tigon bench report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tigon.cli.shared import Command


def kernels_command(
    *,
    suite: Annotated[
        str | None,
        typer.Option(help="targets, paper, odd or small. Default: targets on a GPU, small on a CPU."),
    ] = None,
    ops: Annotated[list[str] | None, typer.Option("--op", help="Only this op; may be repeated.")] = None,
    impls: Annotated[
        list[str] | None, typer.Option("--impl", help="Only this implementation; may be repeated.")
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
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", metavar="SECONDS", help="Start no row after this time.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the record to this file after every row.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Measure only what the record at --json lacks.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw charts and write the table.")] = None,
) -> None:
    """Measure time, memory and error of every op, and compare with the other libraries installed here."""
    from tigon.bench.kernels import bench_kernels  # not for --help

    bench_kernels(
        suite=suite, ops=ops or (), impls=impls or (), without=without or (), shapes=shapes or (), dtype=dtype,
        repetitions=repetitions, time_limit_s=time_limit, json_path=json, resume=resume, plot_dir=plot,
    )  # fmt: skip


def report_command(
    record: Annotated[Path, typer.Argument(metavar="FILE.json", help="A record of `tigon bench kernels --json`.")],
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw charts and write the table.")] = None,
    into: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Write the table between the record's markers in this file.")
    ] = None,
) -> None:
    """Print the table of a record and draw its charts, on any machine."""
    from tigon.bench.report import report_file  # not for --help

    report_file(record, plot, into)


_GROUP = typer.Typer(help="Measure kernels against other libraries and the hardware's limit.", no_args_is_help=True)
_GROUP.command("kernels")(kernels_command)
_GROUP.command("report")(report_command)
COMMAND = Command(_GROUP, place=8)
