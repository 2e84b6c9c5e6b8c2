"""`tigon bench train`: choose and measure cases, print each result, and write the record after every case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tigon.bench import record as records
from tigon.bench import timing
from tigon.bench.session import Session
from tigon.bench.training import table
from tigon.bench.training.cases import Case, select
from tigon.bench.training.measure import CaseRun
from tigon.bench.training.record import TrainRecord
from tigon.bench.training.variants import CODES, DEFAULT, FITS, WHOLE, Code, Variant, parse
from tigon.errors import BenchError, OptionError
from tigon.models.loading.config import load_config

_CEILING_REPETITIONS = 10


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
    session: Session
    codes: Mapping[str, Code] = field(default_factory=lambda: CODES)
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
    device = timing.device()
    cases = select(
        options.models, options.batches, options.seqs, options.precisions, options.memories, gpu=device.type == "cuda"
    )
    variants, session = _variants(options, cases), options.session
    session.check(TrainRecord)
    for model in dict.fromkeys(case.model for case in cases):
        load_config(model)
    run = TrainRecord(
        environment=records.environment(device, ("trl", "accelerate")),
        rounds=options.rounds,
        steps=options.steps,
        ceilings=timing.ceilings(device, _CEILING_REPETITIONS),
    )
    timing.free_flush_buffer()
    timing.release(device)
    print(provenance(run), flush=True)
    run.cases = session.continued(run).cases
    todo = {}
    for case in cases:
        known = [m.variant for earlier in run.cases if earlier.id == case.id for m in earlier.measurements]
        if not {variant.name for variant in variants} <= set(known):
            try:
                both = [*variants, *(parse(name, codes=options.codes) for name in known)]
            except OptionError as error:
                raise BenchError(
                    f"--resume: the record holds {', '.join(known)}, of which this command does not know all. "
                    "Continue it with `python -m benchmarks train` in a checkout, or write another file."
                ) from error
            wanted = list({variant.name: variant for variant in both}.values())
            case_run = CaseRun(case, device, options.rounds, options.steps, run.ceilings["matmul_tflop_per_s"])
            todo[case.id] = partial(case_run.measure, wanted)
    for measured in session.measure(run, run.cases, todo, device):
        measured.command = options.command
        print(table.case_table(measured), flush=True)
        if _has_figures(run):
            session.save(run)
    reasons = [f"{m.variant}: {m.status}: {m.detail}" for case in run.cases for m in case.measurements]
    session.finish(run, has_figures=_has_figures(run), reasons=reasons)
    return run


def provenance(run: TrainRecord) -> str:
    """Card, driver, versions, commits and dates of a record, and the ceilings that its last run measured."""
    origins = [(case.tigon_commit, case.date) for case in run.cases]
    return records.provenance(run, origins, between=f"{run.rounds} rounds of {run.steps} steps. ")


def _variants(options: TrainOptions, cases: Sequence[Case]) -> list[Variant]:
    for name, value in (("--rounds", options.rounds), ("--steps", options.steps)):
        if value < 1:
            raise OptionError(f"{name} {value} must be at least 1.")
    without = {parse(text, "--without", options.codes).name for text in options.without}
    variants = [parse(text, codes=options.codes) for text in options.variants or DEFAULT]
    variants = [variant for variant in variants if variant.name not in without]
    if not variants:
        raise OptionError("--without leaves no variant to measure; name one with --variant.")
    for variant in variants:
        for case in cases:
            if variant.micro not in (WHOLE, FITS) and case.batch % int(variant.micro):
                raise OptionError(
                    f"--variant {variant.name}: a micro-batch of {variant.micro} does not divide --batch {case.batch}."
                )
    return list({variant.name: variant for variant in variants}.values())


def _has_figures(run: TrainRecord) -> bool:
    return any(m.step_ms is not None for case in run.cases for m in case.measurements)
