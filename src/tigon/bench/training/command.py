"""`tigon bench train`: choose and measure cases, print each result, and write the record after every case."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tigon.bench import record as records
from tigon.bench import timing
from tigon.bench.training import table
from tigon.bench.training.cases import Case, select
from tigon.bench.training.measure import CaseRun
from tigon.bench.training.record import CaseRecord, TrainRecord, environment, load, resumed
from tigon.bench.training.report import report
from tigon.bench.training.variants import DEFAULT, FITS, WHOLE, Variant, parse
from tigon.errors import BenchError, OptionError
from tigon.models.loading.config import load_config

_TIME_LIMIT = "time limit"
_CEILING_REPETITIONS = 10
_MOST_REASONS = 5


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of the command; an empty sequence stands for the default."""

    models: Sequence[str] = ()
    batches: Sequence[int] = ()
    seqs: Sequence[int] = ()
    precisions: Sequence[str] = ()
    memories: Sequence[str] = ()
    variants: Sequence[str] = ()
    without: Sequence[str] = ()
    rounds: int = 3
    steps: int = 2
    time_limit_s: float | None = None
    json_path: Path | None = None
    resume: bool = False
    plot_dir: Path | None = None
    command: str = ""
    """The command as it was typed, for the record."""


def bench_train(options: TrainOptions) -> TrainRecord:
    """Measure every case on the GPU if there is one, else on the CPU.

    Raises:
        OptionError: an option's value is unknown or out of range.
        UsageError: a model or a memory limit is unknown, or the sequence is longer than the model's positions.
        BenchError: nothing could be measured, a file cannot be written or is not a record, or a variant left the
            device unusable.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    cases = select(
        options.models, options.batches, options.seqs, options.precisions, options.memories, gpu=device.type == "cuda"
    )
    variants = _variants(options, cases)
    _check_places(options)
    for model in dict.fromkeys(case.model for case in cases):
        load_config(model)
    start_s = time.monotonic()
    run = TrainRecord(
        environment=environment(device), ceilings=timing.ceilings(device, _CEILING_REPETITIONS), rounds=options.rounds,
        steps=options.steps,
    )  # fmt: skip
    timing.free_flush_buffer()
    timing.release(device)
    print(table.provenance(run), flush=True)
    if options.resume and options.json_path is not None:
        run.cases = resumed(run, options.json_path)
    for position, case in enumerate(cases):
        known = [m.variant for earlier in run.cases if earlier.id == case.id for m in earlier.measurements]
        if {variant.name for variant in variants} <= set(known):
            continue
        if options.time_limit_s is not None and time.monotonic() - start_s > options.time_limit_s:
            run.not_run += [f"{left.id} ({_TIME_LIMIT})" for left in cases[position:]]
            break
        wanted = [*variants, *(parse(name) for name in known if name not in {v.name for v in variants})]
        print(f"\n{case.id}", flush=True)
        measured = _measure(case, wanted, run, options, device)
        if measured is not None:
            run.cases = [*(earlier for earlier in run.cases if earlier.id != case.id), measured]
            print(table.case_table(measured), flush=True)
        run.seconds = round(time.monotonic() - start_s, 1)
        if options.json_path is not None and _has_figures(run):
            records.save(run, options.json_path)
    _finish(run, options)
    return run


def _variants(options: TrainOptions, cases: Sequence[Case]) -> list[Variant]:
    for name, value in (("--rounds", options.rounds), ("--steps", options.steps)):
        if value < 1:
            raise OptionError(f"{name} {value} must be at least 1.")
    without = {parse(text, "--without").name for text in options.without}
    variants = [v for v in map(parse, options.variants or DEFAULT) if v.name not in without]
    if not variants:
        raise OptionError("--without leaves no variant to measure; name one with --variant.")
    for variant in variants:
        for case in cases:
            if variant.micro not in (WHOLE, FITS) and case.batch % int(variant.micro):
                raise OptionError(
                    f"--variant {variant.name}: a micro-batch of {variant.micro} does not divide --batch {case.batch}."
                )
    return list({variant.name: variant for variant in variants}.values())


def _check_places(options: TrainOptions) -> None:
    if options.resume and options.json_path is None:
        raise OptionError("--resume requires --json FILE, the record to continue.")
    if options.json_path is not None:
        records.check_place(options.json_path)
        records.check_written_over(options.json_path, load)
    if options.plot_dir is not None:
        records.check_place(options.plot_dir / "table.md", flag="--plot")


def _measure(
    case: Case, variants: Sequence[Variant], run: TrainRecord, options: TrainOptions, device: torch.device
) -> CaseRecord | None:
    """The case's record; None if the weights and the optimizer do not fit the device."""
    try:
        measured = CaseRun(
            case, device, options.rounds, options.steps, run.ceilings["matmul_tflop_per_s"],
            lambda text: print(text, flush=True),
        ).measure(variants)  # fmt: skip
    except torch.cuda.OutOfMemoryError:
        run.not_run.append(f"{case.id} (its weights and gradients do not fit)")
        return None
    finally:
        timing.release(device)
    measured.tigon_commit, measured.date = run.environment["tigon_commit"], run.environment["date"]
    measured.command = options.command
    return measured


def _has_figures(run: TrainRecord) -> bool:
    return any(m.step_ms is not None for case in run.cases for m in case.measurements)


def _finish(run: TrainRecord, options: TrainOptions) -> None:
    if run.not_run:
        print(f"\nnot measured: {', '.join(run.not_run)}")
    if not _has_figures(run):
        reasons = [f"{m.variant}: {m.status}: {m.detail}" for case in run.cases for m in case.measurements]
        reasons += [reason for reason in run.not_run if not reason.endswith(f"({_TIME_LIMIT})")]
        if reasons:
            more = f"; and {len(reasons) - _MOST_REASONS} more" if len(reasons) > _MOST_REASONS else ""
            raise BenchError(
                f"nothing was measured, and nothing is written: {'; '.join(reasons[:_MOST_REASONS])}{more}"
            )
    if options.json_path is not None:
        records.save(run, options.json_path)
        print(f"\nwrote {options.json_path}")
    if options.plot_dir is not None:
        report(run, options.plot_dir)
