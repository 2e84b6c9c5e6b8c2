"""docs/study.md and docs/study-paper.md from the committed records: `python -m benchmarks.pages.study --into docs`.

A record is the results.json of a sweep of recipes/study/, kept as benchmarks/results/GPU/study/NAME.json. A page
shows the record's machine, charts, tables and findings between its markers, with figures that others published beside
them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import blocks, regions
from benchmarks.pages.sweep_accuracy import REMAKE, predictions_path
from tigon._files import read_text
from tigon.errors import TigonError, UsageError
from tigon.sweep import charts
from tigon.sweep.schema import SCHEMA
from tigon.sweep.worker.orders import write_text

RECORDS = Path("benchmarks/results")
IMAGES = "img/study"

Results = Mapping[str, Any]
# Name of a block -> its text below the machine and the charts.
BLOCKS: Mapping[str, Callable[[Results], str]] = {
    "batch": blocks.batch,
    "sequence": blocks.sequence,
    "largest-batch": blocks.extreme,
    "longest-sequence": blocks.extreme,
    "ladder": blocks.ladder,
    "techniques": blocks.techniques,
    "techniques-8b": blocks.techniques,
    "techniques-two-gpus": blocks.techniques,
    "training-step": blocks.steps,
    "paper": blocks.models,
    "paper-two-gpus": blocks.models,
}
# Blocks that are made of all records together, or of none.
WHOLE: Mapping[str, Callable[[Mapping[str, Results]], str]] = {"estimate": blocks.estimate, "advice": blocks.advice}
OF_THE_PAPER = ("training-step", "paper", "paper-two-gpus")
PAGES: Mapping[str, Sequence[str]] = {
    "study.md": [name for name in (*BLOCKS, *WHOLE) if name not in OF_THE_PAPER],
    "study-paper.md": OF_THE_PAPER,
}
"""Page -> its blocks."""


def markers(name: str) -> tuple[str, str]:
    """The lines around a block of the page."""
    return f"<!-- study: {name} -->", f"<!-- /study: {name} -->"


def load(root: Path, folder: str = "study") -> dict[str, dict[str, Results]]:
    """GPU -> record name -> record of a folder. Raises UsageError for a file that is not a record."""
    loaded: dict[str, dict[str, Results]] = {}
    for file in sorted(root.glob(f"*/{folder}/*.json")):
        try:
            record = json.loads(read_text(file))
            if record["schema"] != SCHEMA or record["name"] != file.stem:
                raise UsageError(f"{file} is not the results.json of the sweep {file.stem}; copy that file there.")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file} is not a record of `tigon sweep`: {error}.") from None
        loaded.setdefault(file.parent.parent.name, {})[file.stem] = record
    return {gpu: predicted_anew(own, predictions_path(root / gpu)) for gpu, own in loaded.items()}


def predicted_anew(records: Mapping[str, Results], file: Path) -> dict[str, Results]:
    """The records with the planner's current predictions (benchmarks/pages/sweep_accuracy.py) instead of those made
    when the points were measured. Raises UsageError if `file` holds no predictions."""
    if not file.exists():  # nothing was predicted again for this GPU
        return dict(records)
    try:
        cases = json.loads(file.read_text(encoding="utf-8"))["cases"]
        now = {case: predictions["allocated"] for case, predictions in cases.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} holds no predictions ({type(error).__name__}: {error}); {REMAKE}.") from None
    return {
        name: {
            **record,
            "points": [_with_new_prediction(point, now.get(f"{name}: {point['id']}")) for point in record["points"]],
        }
        for name, record in records.items()
    }


def _with_new_prediction(point: Mapping[str, Any], allocated_bytes: int | None) -> Mapping[str, Any]:
    return point if allocated_bytes is None else {**point, "predicted_allocated_bytes": allocated_bytes}


def page(text: str, names: Sequence[str], records: Mapping[str, Mapping[str, Results]]) -> str:
    """The document with its blocks written again. Raises UsageError if the document lacks a marker."""
    for name in names:
        text = regions.put(text, *markers(name), block(name, records))
    return text


def block(name: str, records: Mapping[str, Mapping[str, Results]]) -> str:
    """The text between the markers of `name`."""
    if name in WHOLE:
        merged = {record: own[record] for own in records.values() for record in own}
        return WHOLE[name](merged)
    parts = []
    for gpu, own in records.items():
        if name in own:
            images = [f"![{chart}]({IMAGES}/{gpu}/{name}/{chart}.svg)" for chart in charts.names(own[name])]
            parts.append("\n\n".join([blocks.provenance(own[name]), *images, BLOCKS[name](own[name])]))
    return "\n\n".join(parts)


def drawings(records: Mapping[str, Mapping[str, Results]]) -> dict[str, str]:
    """Path beside the pages -> SVG, of every chart on them."""
    return {
        f"{IMAGES}/{gpu}/{name}/{chart}.svg": svg + "\n"
        for gpu, own in records.items()
        for name in own
        if name in BLOCKS
        for chart, svg in charts.draw(own[name]).items()
    }


def into_pages(records: Mapping[str, Mapping[str, Results]], folder: Path) -> None:
    """Write the blocks into the pages of the folder, and the charts into its img/."""
    new = {name: page(read_text(folder / name), names, records) for name, names in PAGES.items()}
    drawn = drawings(records)
    for path, text in {**drawn, **new}.items():
        write_text(folder / path, text)
    print(f"wrote {', '.join(new)} and {len(drawn)} charts into {folder}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages.study", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--records", type=Path, default=RECORDS, help=f"default: {RECORDS}")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="write the blocks into the pages in this folder")
    options = parser.parse_args(arguments)
    try:
        records = load(options.records)
        for gpu, own in records.items():
            for name, record in own.items():
                done = sum(point["status"] in ("ok", "out of memory") for point in record["points"])
                print(f"{gpu}/{name}: {done} of {len(record['points'])} points, {', '.join(blocks.dates(record))}")
        if options.into is not None:
            into_pages(records, options.into)
    except (TigonError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
