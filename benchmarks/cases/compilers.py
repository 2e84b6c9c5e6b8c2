"""Compare what two releases of Triton make of all kernels, without a GPU: registers and spills, chip by chip.

    python tests/kernels/aot.py > new.json              once with each release of Triton
    python -m benchmarks compilers 3.6.0:old.json 3.9.0:new.json --commit COMMIT --date DATE --json RECORD

`docs/support.md` shows the record.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench, Case
from tigon.bench.record import save

Binary = Mapping[str, Any]
CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")


def by_launch(report: Path) -> dict[str, Binary]:
    """The binaries of a report of tests/kernels/aot.py, under what tells their launches apart.

    Those of accumulation fusion are left out: their launches differ in the types of pointers, which a report lacks.
    """
    binaries: Iterable[Binary] = json.loads(report.read_text(encoding="utf-8"))["binaries"]
    binaries = [b for b in binaries if any(op != "accumulation fusion" for op, _ in b["used_by"])]
    names = ("target", "kernel", "dtype", "flags", "num_warps", "aligned")
    return {json.dumps([b[name] for name in names], sort_keys=True): b for b in binaries}


def compared(old: Mapping[str, Binary], new: Mapping[str, Binary], chip: str) -> dict[str, Any]:
    """Registers and spills of the launches that both reports have for a chip."""
    pairs = [(old[key], new[key]) for key in old if key in new and old[key]["target"] == chip]
    return {
        "launches": len(pairs),
        "errors": [sum(b["error"] is not None for b in side) for side in zip(*pairs, strict=True)],
        "registers": [sum(b["registers"] or 0 for b in side) for side in zip(*pairs, strict=True)],
        "fewer": sum((b["registers"] or 0) < (a["registers"] or 0) for a, b in pairs if not (a["error"] or b["error"])),
        "more": sum((b["registers"] or 0) > (a["registers"] or 0) for a, b in pairs if not (a["error"] or b["error"])),
        "spilling": [sum(bool(b["spills"]) for b in side) for side in zip(*pairs, strict=True)],
        "spills": [
            {
                "kernel": a["kernel"],
                "dtype": a["dtype"],
                "flags": {k: v for k, v in a["flags"].items() if v},
                "bytes": [a["spills"], b["spills"]],
            }
            for a, b in pairs
            if a["spills"] or b["spills"]
        ],
    }


def measure(bench: Bench) -> None:
    given = bench.given
    versions, files = zip(*(report.split(":", 1) for report in given.reports), strict=True)
    old, new = (by_launch(Path(file)) for file in files)
    record = {
        "triton": versions,
        "tigon_commit": given.commit,
        "date": given.date,
        "chips": {chip: compared(old, new, chip) for chip in CHIPS},
    }
    if given.json is None:
        print(json.dumps(record, indent=1))
    else:
        save(record, given.json)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs=2, metavar="VERSION:FILE", help="the older release first")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--date", required=True)


CASE = Case(measure=measure, options=options, needs_gpu=False)
