"""The command line: flags to recipe, no logic. What is heavy is imported inside the commands, so `--help` is quick."""

# No `from __future__ import annotations`: typer reads the annotations of functions made inside `_app`.
import errno
import sys
from pathlib import Path
from typing import Annotated, Any

from tigon.errors import TigonError
from tigon.trainer.guards import console, system_limits

USAGE_EXIT, INTERRUPTED_EXIT, BROKEN_PIPE_EXIT = 2, 130, 141  # the last two as shells have them
# Of a path that was typed, wherever it is first looked at.
_PATH_ERRORS = (errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS)


def _of_gpus(gpus: int | None) -> list[str]:
    """`--gpus` in the words of `--set`."""
    return [] if gpus is None else [f"sharding.gpus={gpus}"]


def main() -> None:
    """Entry point of `tigon` and `python -m tigon`: what the user can act on is one line on stderr and exit code 2."""
    console.open_closed_streams()
    try:
        import typer
    except ModuleNotFoundError:
        _fail("the command line needs typer, not installed here: pip install 'tigon[train]'")
    try:
        sys.exit(_app()(standalone_mode=False) or 0)
    except TigonError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED_EXIT)
    except BrokenPipeError:  # `tigon plan ... | head`: the reader has all that it wanted
        with console.outlived():  # Python would write what it still holds at exit, and fail again
            sys.stdout.flush()
        sys.exit(BROKEN_PIPE_EXIT)
    except OSError as error:
        if error.errno not in _PATH_ERRORS or error.filename is None:
            _fail_at_a_limit(error)
        _fail(f"{error.filename}: {error.strerror}; name another path, or mend this one")
    except Exception as error:
        _fail_as_typed(error)


def _fail(message: str) -> None:
    with console.outlived():
        print(f"tigon: {message}", file=sys.stderr)
    sys.exit(USAGE_EXIT)


def _fail_at_a_limit(error: Exception) -> None:
    """One line for an error of the system's limits on a process; any other is a bug and keeps its traceback."""
    said = system_limits.words(error)
    if said is None:
        raise error
    _fail(said)


def _planned_heads(*asked: Any) -> Any:
    from tigon.medusa import planned

    return planned(*asked)


def _fail_as_typed(error: Any) -> None:
    """A wrong flag or value in one line, as ours; what typer raises comes from click or from its own copy of it."""
    if not hasattr(error, "format_message"):
        _fail_at_a_limit(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(USAGE_EXIT)
    typed = error.ctx.command_path if getattr(error, "ctx", None) else "tigon"
    _fail(f"{' '.join(error.format_message().split()).rstrip('.')}; {typed} --help lists what there is.")


def _app() -> Any:
    import typer

    app = typer.Typer(
        help="Train larger batches and longer contexts of Hugging Face language models.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    def show_version(asked: bool) -> None:
        if asked:
            from tigon import __version__

            print(f"tigon {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """Train larger batches and longer contexts of Hugging Face language models."""

    @app.command("train")
    def train_command(
        recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="YAML; docs/train.md lists its keys.")],
        assignments: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key, e.g. --set train.batch_size=8."),
        ] = None,
        gpus: Annotated[
            int | None, typer.Option(metavar="N", help="Processes, one a GPU; the same as --set sharding.gpus=N.")
        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
        auto: Annotated[
            bool, typer.Option("--auto", help="Change what the recipe leaves free to the fastest that fits the GPU.")
        ] = False,
    ) -> None:
        """Train a model as a recipe says, with a report at the end."""
        from tigon.trainer.run import train

        with console.outlived():
            train(recipe, [*(assignments or ()), *_of_gpus(gpus)], resume=resume, auto=auto)

    @app.command("medusa")
    def medusa_command(
        recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="YAML with `heads:`; docs/medusa.md.")],
        assignments: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key, e.g. --set heads.count=5."),
        ] = None,
        gpus: Annotated[
            int | None, typer.Option(metavar="N", help="Processes, one a GPU; the same as --set sharding.gpus=N.")
        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    ) -> None:
        """Train heads that predict several tokens ahead (Medusa, MTP), with a report at the end."""
        from tigon.trainer.heads import train_with_heads

        with console.outlived():
            train_with_heads(recipe, [*(assignments or ()), *_of_gpus(gpus)], resume=resume)

    @app.command("plan")
    def plan_command(
        model: Annotated[str, typer.Argument(help="A preset, a checkpoint folder, a config.json or a hub id.")],
        gpu: Annotated[str, typer.Option(help="A GPU's name (h200, rtx-4090) or its memory (24GiB).")],
        batch: Annotated[int | None, typer.Option(help="Rows of a micro-batch on each GPU.")] = None,
        seq: Annotated[int | None, typer.Option(help="Tokens in a row.")] = None,
        gpus: Annotated[int | None, typer.Option(help="How many of them.")] = None,
        precision: Annotated[str | None, typer.Option(help="fp32, amp-bf16, amp-fp16 or bf16.")] = None,
        optimizer: Annotated[str | None, typer.Option(metavar="NAME", help="docs/techniques/optimizers.md")] = None,
        checkpointing: Annotated[str | None, typer.Option(help="none, full, every-N, selective or offload.")] = None,
        kernels: Annotated[str | None, typer.Option(help="none, no-flce, tigon or liger.")] = None,
        attention: Annotated[str | None, typer.Option(help="sdpa or eager.")] = None,
        zero: Annotated[int | None, typer.Option(help="DeepSpeed's stage: 0, 1, 2 or 3.")] = None,
        fsdp: Annotated[bool, typer.Option("--fsdp", help="PyTorch FSDP2.")] = False,
        offload: Annotated[str | None, typer.Option(help="none, cpu or nvme.")] = None,
        lora: Annotated[int | None, typer.Option(metavar="R", help="Train adapters of rank R.")] = None,
        qlora: Annotated[bool, typer.Option("--qlora", help="With --lora: the weights in 4 bits.")] = False,
        accumulate: Annotated[int | None, typer.Option(metavar="N", help="Micro-batches in a step.")] = None,
        effective_batch: Annotated[
            int | None, typer.Option("--effective-batch", help="Rows of a step over all GPUs that are wanted.")
        ] = None,
        medusa: Annotated[int | None, typer.Option(metavar="K", help="With K Medusa heads.")] = None,
        stage: Annotated[
            int | None, typer.Option(help="With --medusa: 1, only they learn (if left out), or 2.")
        ] = None,
        method: Annotated[str, typer.Option(help="trace, or the study's formulas.")] = "trace",
        policy: Annotated[str, typer.Option(help="search, or the study's ladder.")] = "search",
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw charts.")] = None,
        explain: Annotated[bool, typer.Option("--explain", help="Say what each number is made of.")] = False,
    ) -> None:
        """Predict a run's memory and time without a GPU, and what to switch on so that it fits."""
        from tigon.cli import plan

        plan.run(
            model, gpu=gpu, batch=batch, seq=seq, gpus=gpus, precision=precision, optimizer=optimizer,
            checkpointing=checkpointing, kernels=kernels, attention=attention, zero=zero, fsdp=fsdp, offload=offload,
            lora_rank=lora, quantized=qlora, accumulate=accumulate, effective_batch=effective_batch, medusa=medusa,
            stage=stage, heads=_planned_heads, method=method, policy=policy, as_json=as_json, plot=plot,
            explain=explain,
        )  # fmt: skip

    @app.command("sweep")
    def sweep_command(
        file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="YAML; docs/sweep.md lists its keys.")],
        assignments: Annotated[
            list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key of every point.")
        ] = None,
        memory_limit: Annotated[
            str | None, typer.Option(metavar="SIZE", help="Of each process, e.g. 24GiB or rtx-4090.")
        ] = None,
        time_limit: Annotated[
            str | None, typer.Option(metavar="TIME", help="Start no point that would end later, e.g. 500s or 9m.")
        ] = None,
        out: Annotated[Path | None, typer.Option(metavar="DIR", help="Results; runs/sweeps/NAME if left out.")] = None,
        only: Annotated[str | None, typer.Option(metavar="REGEX", help="Only points whose name this finds.")] = None,
        retry: Annotated[bool, typer.Option("--retry", help="Measure points again that failed.")] = False,
        draw: Annotated[bool, typer.Option("--draw", help="Measure nothing; only make the report anew.")] = False,
        earlier: Annotated[
            Path | None, typer.Option("--from", metavar="RESULTS.json", help="Take over what was finished there.")
        ] = None,
    ) -> None:
        """Train a recipe over a grid of its keys; what its folder holds already is not measured again."""
        from tigon.sweep.run import sweep

        with console.outlived():
            sweep(
                file, assignments or (), memory_limit=memory_limit, time_limit=time_limit, out=out, only=only,
                retry=retry, draw=draw, earlier=earlier,
            )  # fmt: skip

    @app.command("profile")
    def profile_command(
        recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="YAML; docs/train.md lists its keys.")],
        assignments: Annotated[
            list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key.")
        ] = None,
        steps: Annotated[int, typer.Option(metavar="N", help="Steps whose allocations are recorded.")] = 2,
        beside: Annotated[
            Path | None, typer.Option(metavar="RECIPE.yaml", help="Profile this one too, side by side.")
        ] = None,
        beside_assignments: Annotated[
            list[str] | None,
            typer.Option("--beside-set", metavar="KEY=VALUE", help="Change a key of the one beside only."),
        ] = None,
        out: Annotated[Path | None, typer.Option(metavar="DIR", help="Empty or new folder to write to.")] = None,
    ) -> None:
        """Record what a recipe's first steps do to memory, and where a step's time goes."""
        from tigon.cli.profile import Asked, profile

        with console.outlived():
            profile(Asked(recipe, tuple(assignments or ()), steps, beside, tuple(beside_assignments or ()), out))

    @app.command("models")
    def models_command(
        families: Annotated[list[str] | None, typer.Argument(metavar="[FAMILY...]", help="Only these rows.")] = None,
        verified: Annotated[bool, typer.Option("--verify", help="Prove each row on a small random model.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON, each row with its proof.")] = False,
        device: Annotated[str | None, typer.Option(help="Where the proof runs: cpu (if left out) or cuda.")] = None,
        dtype: Annotated[str | None, typer.Option(help="Of the proof: fp32 (if left out) or bf16.")] = None,
        into: Annotated[
            Path | None, typer.Option(metavar="FILE.md", help="Put the table between the document's markers.")
        ] = None,
        others: Annotated[
            bool, typer.Option("--others", help="With --into: also the families without a row; takes minutes.")
        ] = False,
    ) -> None:
        """What every model family gets, what is left alone and why; exit code 1 when a family differs."""
        from tigon.cli.models import models

        same = models(
            families or (), as_json=as_json, verified=verified, device=device, dtype=dtype, into=into, others=others
        )
        raise typer.Exit(0 if same else 1)

    @app.command("doctor")
    def doctor_command(
        model: Annotated[
            str | None,
            typer.Argument(metavar="[MODEL]", help="A preset, a checkpoint folder, a config.json or a hub id."),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Check this machine, every op, and which kernels a model gets; exit code 1 when something is wrong."""
        import json

        from tigon.doctor import diagnose
        from tigon.models.loading import hub
        from tigon.techniques.quiet import quiet_packages

        # both of the whole process, so not where a library's caller would have them
        hub.settle(() if model is None else (model,))
        quiet_packages()
        diagnosis = diagnose(model)
        print(json.dumps(diagnosis.to_dict(), indent=2) if as_json else diagnosis)
        raise typer.Exit(0 if diagnosis.ok else 1)

    bench = typer.Typer(help="Measure kernels against their peers and the hardware's limit.", no_args_is_help=True)
    app.add_typer(bench, name="bench")

    @bench.command("kernels")
    def bench_kernels_command(
        suite: Annotated[
            str | None,
            typer.Option(help="targets, paper, odd or small; targets on a GPU and small on a CPU if left out."),
        ] = None,
        ops: Annotated[list[str] | None, typer.Option("--op", help="Only this op; may be repeated.")] = None,
        impls: Annotated[
            list[str] | None, typer.Option("--impl", help="Only this implementation; may be repeated.")
        ] = None,
        without: Annotated[list[str] | None, typer.Option(help="Not this implementation; may be repeated.")] = None,
        shapes: Annotated[
            list[str] | None,
            typer.Option("--shape", metavar="AxB", help="Instead of the suite's, for one --op; may be repeated."),
        ] = None,
        dtype: Annotated[str | None, typer.Option(help="bf16 (on a GPU), fp16 or fp32 (on a CPU).")] = None,
        repetitions: Annotated[int, typer.Option(help="Rounds; every implementation runs once in each.")] = 20,
        time_limit: Annotated[
            float | None, typer.Option("--time-limit", metavar="SECONDS", help="Start no row after this long.")
        ] = None,
        json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record, row by row.")] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Measure what the record at --json lacks.")] = False,
        plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw charts and write the table.")] = None,
    ) -> None:
        """Time, memory and error of every op, against the other libraries installed here."""
        from tigon.bench.kernels import bench_kernels

        bench_kernels(
            suite=suite, ops=ops or (), impls=impls or (), without=without or (), shapes=shapes or (), dtype=dtype,
            repetitions=repetitions, time_limit_s=time_limit, json_path=json, resume=resume, plot_dir=plot,
        )  # fmt: skip

    @bench.command("report")
    def bench_report_command(
        record: Annotated[Path, typer.Argument(metavar="FILE.json", help="A record of `tigon bench kernels --json`.")],
        plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw charts and write the table.")] = None,
        into: Annotated[
            Path | None, typer.Option(metavar="FILE.md", help="Put the table between the record's markers there.")
        ] = None,
    ) -> None:
        """Table and charts of a record, on any machine."""
        from tigon.bench.report import report_file

        report_file(record, plot, into)

    return app
