"""The records of `tigon bench`: JSON with the machine, the versions, the ceilings and one entry per row or case.

Tables and charts are made from the record, on this or another machine. Times are in milliseconds, memory in bytes and
host times in microseconds. `null` means "not measured", and the entry says why.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from tigon._files import read_text
from tigon.bench.timing import Spread  # pydantic reads the annotations
from tigon.errors import BenchError

SCHEMA = 1
Times = dict[str, Spread]

_PACKAGES = ("triton", "transformers", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy")


@dataclass(kw_only=True)
class Measurement:
    """One implementation on one row."""

    impl: str
    role: str
    status: str = "ok"
    """ok, not installed, no such op, not supported, out of memory, failed, or refused (tigon with an error that is not
    allowed)."""
    detail: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    """Relative Frobenius error against fp64 of each output and gradient."""
    breaks_rule: list[str] = field(default_factory=list)
    """Results whose error is over the limit of numerical_errors.py. Only tigon is then not timed."""
    graph_ms: Times | None = None
    graph_detail: str = ""
    """Why there is no graph time."""
    eager_ms: Times | None = None
    host_us: float | None = None
    extra_peak_bytes: int | None = None
    """Peak of one eager forward + backward above what was allocated before it, gradients included."""
    kept_bytes: int | None = None
    """Bytes that the forward keeps for the backward, beyond inputs and outputs; null on a CPU."""
    gb_per_s: float | None = None
    """Bytes of the op's cost divided by the judged time; null for ops of matrix products, which have TFLOP/s."""
    tflop_per_s: float | None = None
    fraction: float | None = None
    """The row's `limit_ms` divided by the judged time; null for variants."""
    prepare_s: float | None = None
    """Seconds before timing: import, compilation, tuning, and the measurement of errors and memory."""

    def judged_ms(self, graph: bool) -> Spread | None:
        """Forward + backward: the CUDA graph's time if `graph` is set and there is one, else the eager time."""
        for times in (self.graph_ms, self.eager_ms) if graph else (self.eager_ms, self.graph_ms):
            if times is not None:
                return times["both"]
        return None


@dataclass(kw_only=True)
class RowRecord:
    """One row of a suite."""

    id: str
    op: str
    shape: list[int]
    dtype: str
    options: dict[str, Any]
    logits: str
    graph: bool
    input_bytes: int
    moved_bytes: int
    saved_bytes: int
    flops: int
    limit_ms: float
    """moved_bytes at the copy rate or flops at the product rate measured before the row, whichever is longer."""
    problem: str = ""
    """Tells the row from others of its shape."""
    tigon_commit: str | None = None
    date: str | None = None
    """Commit and date of this row. A resumed run may have rows of several commits and days."""
    repetitions: int = 0
    error_shape: list[int] = field(default_factory=list)
    """Shape for which the errors were measured: the row's, or one with fewer tokens if fp64 did not fit."""
    allowed_errors: dict[str, float] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)


@dataclass(kw_only=True)
class Record:
    """One run of a command, with the runs that resumed it."""

    kind: str
    environment: dict[str, Any]
    """Environment of the last run."""
    ceilings: dict[str, float]
    not_run: list[str] = field(default_factory=list)
    """What was left out, and why."""
    seconds: float = 0.0
    schema: int = SCHEMA

    SAME: ClassVar[tuple[str, ...]] = ()
    """Fields that a run has to share with the record that it continues."""


@dataclass(kw_only=True)
class RunRecord(Record):
    """The record of `tigon bench kernels`."""

    kind: str = "kernels"
    suite: str
    repetitions: int
    """The most repetitions of any row. Long rows made at least ten."""
    rows: list[RowRecord] = field(default_factory=list)

    SAME: ClassVar = ("suite", "repetitions")


R = TypeVar("R", bound=Record)


def environment(device: torch.device, more_packages: Sequence[str] = ()) -> dict[str, Any]:
    """The card, the versions of packages, the commit and the date."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in (*_PACKAGES, *more_packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"CPU ({platform.machine()})",
        "driver": _driver() if gpu else None,
        "threads": None if gpu else torch.get_num_threads(),
        "versions": versions,
        "tigon_commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _output_of(*command: str, cwd: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20, cwd=cwd)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _driver() -> str | None:
    answer = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else None


def _commit() -> str | None:
    """The commit: TIGON_COMMIT if set (for copied sources), else the checkout's, with "+" if the sources differ."""
    here = Path(__file__).parent
    named = os.environ.get("TIGON_COMMIT")
    commit = named or _output_of("git", "rev-parse", "--short=10", "HEAD", cwd=here)
    if named or commit is None:
        return commit
    return commit + ("+" if _output_of("git", "status", "--porcelain", "--", "..", cwd=here) else "")


def provenance(run: Record, origins: Sequence[tuple[str | None, str | None]], *, between: str = "") -> str:
    """One paragraph: card, versions, commits and dates, and the ceilings that the last run measured.

    origins: commit and date of each row. between: a sentence before the ceilings.
    """
    env, ceilings = run.environment, run.ceilings
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items() if version)
    driver = f", driver {env['driver']}" if env["driver"] else ""
    known = dict.fromkeys((commit or env["tigon_commit"], date or env["date"]) for commit, date in origins)
    commits = " and ".join(f"{commit}, {date}" for commit, date in known or [(env["tigon_commit"], env["date"])])
    which = "last" if between or len(known) > 1 else "same"
    return (
        f"{env['device']}{driver}; {versions}; tigon at commit {commits}. {between}In the {which} run a "
        f"copy moved {ceilings['copy_gb_per_s']:.0f} GB/s (read plus written) and a product of "
        f"{ceilings['matmul_size']:.0f}³ made {ceilings['matmul_tflop_per_s']:.3g} TFLOP/s."
    )


def save(record: Mapping[str, Any], path: Path) -> None:
    """Write a record so that an end at any time leaves the old one or the new one. Raises BenchError."""
    _write(path, json.dumps(record, indent=1, allow_nan=True) + "\n")


def check_place(path: Path) -> None:
    """Raise BenchError if `save` would fail, before anything is measured. Existing files are kept."""
    _write(path, None)


def _write(path: Path, text: str | None) -> None:
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text or "", encoding="utf-8")
        if text is None:
            beside.unlink()
        else:
            beside.replace(path)
    except OSError as error:
        raise BenchError(f"{path} cannot be written ({error.strerror}); choose another place for --json.") from None


def load(path: Path, form: type[R]) -> R:
    """Read a record of this form. Raises BenchError if the file has none."""
    from pydantic import TypeAdapter

    wanted = form.__dataclass_fields__["kind"].default
    try:
        raw = json.loads(read_text(path))
        kind = raw.get("kind", "kernels")
        if kind != wanted or raw["schema"] != SCHEMA:
            found = f"kind {kind}, schema {raw['schema']}"
            raise BenchError(f"{path} has {found}; this command reads {wanted}, {SCHEMA}. Measure again.")
        return TypeAdapter(form).validate_python(raw)
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise BenchError(f"{path} is not a record of `tigon bench` with {wanted}: {why}.") from None


def kind_of(path: Path) -> str:
    """The kind of the record in a file; "" if it is none."""
    try:
        raw = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(raw.get("kind", "kernels")) if isinstance(raw, dict) else ""


def other_machine(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first part of the environment that differs, such as "device" or "torch": its name, and both values.

    Older records lack the versions of packages that were added later.
    """
    names = ("device", "driver", "threads")
    parts = [(name, was.get(name), now.get(name)) for name in names]
    old, new = was["versions"], now["versions"]
    parts += [(name, old.get(name, new.get(name)), new.get(name)) for name in {**new, **old}]
    return next((part for part in parts if part[1] != part[2]), None)
