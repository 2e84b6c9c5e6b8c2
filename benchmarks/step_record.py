"""The command line and the record that the scripts which measure training steps share."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tigon.bench.record import environment


def options(doc: str | None, switches: Mapping[str, str] | None = None) -> argparse.Namespace:
    """The options of a script: `tiny`, and `json` for the record.

    doc: the docstring of the script. switches: more flags by name, with their help.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model; also without a GPU")
    parser.add_argument("--json", type=Path, metavar="RECORD", help="write the record to this file")
    for name, text in (switches or {}).items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser.parse_args()


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
