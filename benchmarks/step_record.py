"""The command line and the record that the scripts which measure training steps share."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # PyTorch imports it from C

from tigon.bench.record import environment


def options(doc: str | None, more: Callable[[argparse.ArgumentParser], Any] | None = None) -> argparse.Namespace:
    """The options of a script: `tiny`, `json` for the record, and those that `more` adds. doc: the docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model; also without a GPU")
    parser.add_argument("--json", type=Path, metavar="RECORD", help="write the record to this file")
    if more is not None:
        more(parser)
    return parser.parse_args()


def device_kernels(events: Any) -> list[Any]:
    """The events of a profile that ran on the GPU: kernels, copies and collectives."""
    return [event for event in events or () if event.device_type == DeviceType.CUDA]


def busy_ms(kernels: list[Any]) -> float:
    """Milliseconds in which the GPU ran at least one of these."""
    total_us, end_us = 0.0, 0.0
    for start, stop in sorted((one.time_range.start, one.time_range.end) for one in kernels):
        total_us += max(0.0, stop - max(start, end_us))
        end_us = max(end_us, stop)
    return total_us / 1e3


def by_name(kernels: list[Any], longest: int = 20) -> dict[str, tuple[int, float]]:
    """Name -> (calls, milliseconds) of those that take the most time."""
    sums: dict[str, tuple[int, float]] = {}
    for one in kernels:
        calls, ms = sums.get(one.name[:120], (0, 0.0))
        sums[one.name[:120]] = calls + 1, ms + one.time_range.elapsed_us() / 1e3
    return dict(sorted(sums.items(), key=lambda item: -item[1][1])[:longest])


class StepRecord:
    """A record that is being measured. packages: those whose versions it names beside the usual ones."""

    def __init__(self, script: str, device: torch.device, packages: tuple[str, ...] = ()) -> None:
        self._start_s = time.monotonic()
        self._fields: dict[str, Any] = {
            "environment": environment(device),
            "command": " ".join([f"python -m benchmarks.{script}", *sys.argv[1:]]),
        }
        self._fields["environment"]["versions"] |= {name: importlib.metadata.version(name) for name in packages}

    def write(self, path: Path | None, **fields: Any) -> None:
        """Write the record with these fields, unless `path` is None."""
        if path is None:
            return
        record = {**self._fields, **fields, "seconds": round(time.monotonic() - self._start_s, 1)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
