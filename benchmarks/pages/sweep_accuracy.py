"""The planner against the sweeps that were measured on GPUs.

    python -m benchmarks.pages.sweep_accuracy [--into DOCUMENT]

Every point of the results that are committed is a case, if it ran. With a document, the predictions are written beside
the planner's own and a summary between the document's markers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages.planner_accuracy import (
    QUANTITIES,
    Comparison,
    Quantity,
    beyond,
    cells,
    median_error,
    percent,
    read_document,
    save_predictions,
    worst_first,
    write_between,
)
from tigon.errors import TigonError, UsageError
from tigon.planner.gpus import GPUS, find_gpu
from tigon.recipe import recipe_file
from tigon.recipe.keys import Recipe
from tigon.sweep import failures
from tigon.sweep.prediction import predict

RESULTS = Path("benchmarks/results")
ROOMS = ("study", "medusa")
PREDICTIONS = "planner/sweeps-predicted.json"
"""In the results of a GPU."""
BEGIN, END = "<!-- accuracy of sweeps -->", "<!-- /accuracy of sweeps -->"
REMAKE = "`python -m benchmarks.pages.sweep_accuracy --into docs/planner.md` makes it"

_STREAMS = "what the allocator holds back for a stream that the engine copies or gathers on is not simulated."
_LATE = (
    "ZeRO-3: DeepSpeed's reducing stream holds a gradient's memory until it has passed it (record_stream, stage3.py), "
    "which is not simulated; that this is all of the difference was not measured."
)
_FOUR = "the host's time decides, and four sweeps ran on one host at a time."
_SLOW_HOST = (
    "the host's time decides, and this one was slower than the one that the plan was fitted on: the fastest steps, "
    "too, took 1.2 to 1.4 times as long as planned."
)
KNOWN: Mapping[tuple[str, str], tuple[float, str]] = {
    ("techniques: zero-offload-cpu", "reserved"): (0.19, f"ZeRO-2's copies to the host: {_STREAMS}"),
    ("techniques: adamw-torchao-8bit", "step time"): (
        0.39, "the table look-ups of 8-bit states were fitted to Qwen3-0.6B alone; here they take half as long."
    ),
    ("techniques: zero-offload-nvme", "step time"): (
        0.84, "the plan has no speed of the disk that the files are on."
    ),
    ("techniques-two-gpus: zero-2", "reserved"): (0.13, f"ZeRO-2: {_STREAMS}"),
    ("techniques-two-gpus: fsdp2-offload", "reserved"): (0.14, f"FSDP2's weights on their way: {_STREAMS}"),
    ("sequence", "reserved"): (0.16, _LATE),
    ("largest-batch", "reserved"): (0.13, _LATE),
    ("longest-sequence", "reserved"): (0.16, _LATE),
    ("longest-sequence: FSDP2", "reserved"): (0.09, f"FSDP2's weights on their way: {_STREAMS}"),
    ("paper-two-gpus", "reserved"): (0.13, f"FSDP2: {_STREAMS}"),
    ("medusa-two-gpus", "reserved"): (
        0.19, "FSDP2: what one of its streams finds again in another's cache is not known; most are too high."
    ),
    **{
        (f"techniques: {name}", "step time"): (limit, _SLOW_HOST)
        for name, limit in (
            ("checkpointing-selective", 0.39), ("tiled-mlp", 0.32), ("grouped-attention", 0.32), ("lora", 0.45),
            ("galore-layerwise", 0.36), ("qlora", 0.32), ("paged-adamw", 0.29),
        )
    },
    ("batch: Liger batch_size=32", "step time"): (0.32, _FOUR),
    ("sequence", "step time"): (0.28, _FOUR),
    ("ladder", "step time"): (
        0.40, "the host's time decides, and another sweep ran on the host's other GPU; the fastest steps, too, took up "
        "to a quarter longer than planned.",
    ),
    ("ladder: + tiled MLPs", "step time"): (0.42, _SLOW_HOST),
    ("ladder: GaLore a layer at a time", "step time"): (
        0.62, "the host's time decides; the fastest steps, too, took 2.2 times as long as planned."
    ),
    ("medusa: stage 2", "step time"): (
        0.29, "at 1024 tokens the host's time decides, and another sweep ran on the host's other GPU."
    ),
}  # fmt: skip
"""(beginning of a case's name, quantity) -> how far it is allowed to be off instead, and why."""


def known(case_id: str, quantity: str) -> str | None:
    """The longest beginning in KNOWN of a case's name, or None."""
    fitting = [begin for begin, name in KNOWN if name == quantity and case_id.startswith(begin)]
    return max(fitting, key=len, default=None)


def case_of(results: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """A point as the planner's accuracy takes a case."""
    return {
        "id": f"{results['name']}: {point['id']}", "sweep": results["name"], "keys": point["keys"],
        "unchecked": point["unchecked"], "device": results["environment"]["device"],
        "memory_bytes": results["memory_limit_bytes"] or results["environment"]["memory_bytes"],
        "allocated_bytes": point["peak_allocated_bytes"], "reserved_bytes": point["peak_reserved_bytes"],
        "step_s": point["step_s"], "phases": point["phases"],
    }  # fmt: skip


def load(folder: Path) -> list[dict[str, Any]]:
    """Every point in a GPU's results that ran, in the files' order. Raises UsageError for a file that is none."""
    cases = []
    for file in sorted(file for room in ROOMS for file in folder.glob(f"{room}/*.json")):
        try:
            results = json.loads(file.read_text(encoding="utf-8"))
            ran = [point for point in results["points"] if point["status"] == failures.OK]
            if ran and _gpu_known(results["environment"]["device"]):
                cases += [case_of(results, point) for point in ran]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file} is no results.json of a sweep ({type(error).__name__}: {error}).") from None
    return cases


def _gpu_known(device: str) -> bool:
    try:
        return find_gpu(device).name in GPUS
    except UsageError:
        return False


def compare(cases: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Every case, predicted now."""
    comparisons = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            found = predict(recipe_of(case, Path(folder)), case["device"], case["memory_bytes"])
            predicted = {quantity.name: found[quantity.predicted] for quantity in QUANTITIES}
            comparisons.append(Comparison(case=case, predicted=predicted, phases={}))
    return comparisons


def recipe_of(case: Mapping[str, Any], folder: Path) -> Recipe:
    """The recipe that a point was measured with, but for its steps and its output."""
    tree: dict[str, dict[str, Any]] = {"train": {"steps": 1}}
    for key, value in case["keys"].items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    return recipe_file.load(file, gpu_present=lambda: True, checked=not case["unchecked"])


def unexpected(comparisons: Sequence[Comparison], quantity: Quantity) -> list[str]:
    """What breaks a limit of this quantity: its own, or for a case beyond that the one of KNOWN; and what of KNOWN no
    case needs any more."""
    within, said, needed = [], [], set()
    for one in comparisons:
        error, begin = abs(one.error(quantity)), known(one.id, quantity.name)
        if error <= quantity.worst or begin is None:
            within.append(one)
            continue
        needed.add(begin)
        if error > (limit := KNOWN[begin, quantity.name][0]):
            said.append(f"{quantity.name} of {one.id}: {percent(one.error(quantity))} (known, up to {limit:.0%})")
    idle = [begin for begin, name in KNOWN if name == quantity.name and begin not in needed]
    said += [f"{quantity.name} of {begin}: within the limit, so that KNOWN need not have it" for begin in idle]
    return said + beyond(within, quantity)


def section(comparisons: Sequence[Comparison]) -> str:
    """What stands in the document between the markers: a row a sweep and quantity, and what is known to be off."""
    sweeps = dict.fromkeys(one.case["sweep"] for one in comparisons)
    rows = [cells(["sweep", "points", "", "median error", "worst error", "limit", "point"]), cells(["---"] * 7)]
    for sweep in sweeps:
        own = [one for one in comparisons if one.case["sweep"] == sweep]
        for quantity in QUANTITIES:
            worst = worst_first(own, quantity)[0]
            first = quantity is QUANTITIES[0]
            rows.append(
                cells([
                    sweep if first else "", str(len(own)) if first else "", quantity.name,
                    f"{median_error(own, quantity):.1%}", percent(worst.error(quantity)), f"{quantity.worst:.0%}",
                    worst.id.partition(": ")[2],
                ])
            )  # fmt: skip
    off = {
        (begin, quantity.name)
        for quantity in QUANTITIES
        for one in comparisons
        if abs(one.error(quantity)) > quantity.worst and (begin := known(one.id, quantity.name)) is not None
    }
    beyond_limits = [f"- {begin}, {name}: {why}" for (begin, name), (_, why) in KNOWN.items() if (begin, name) in off]
    return "\n".join(rows) + ("\n\nBeyond a limit, and known:\n\n" + "\n".join(beyond_limits) if beyond_limits else "")


def predictions_path(folder: Path) -> Path:
    """Where the predictions of a GPU's sweeps are kept."""
    return folder / PREDICTIONS


def _print(comparisons: Sequence[Comparison]) -> None:
    width = max(len(one.id) for one in comparisons)
    for one in comparisons:
        print(f"{one.id:{width}}  " + "  ".join(f"{q.name} {percent(one.error(q)):>7}" for q in QUANTITIES))
    for quantity in QUANTITIES:
        for line in unexpected(comparisons, quantity):
            print(f"! {line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages.sweep_accuracy", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--results", type=Path, default=RESULTS / "nvidia-h200", help="results of one GPU")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT", help="write the summary into this document")
    asked = parser.parse_args()
    try:
        cases = load(asked.results)
        if not cases:
            raise UsageError(f"{asked.results} holds no sweep with a point that ran on a GPU that the planner knows.")
        if asked.into is not None:
            read_document(asked.into, begin=BEGIN, end=END)
        comparisons = compare(cases)
        _print(comparisons)
        if asked.into is not None:
            write_between(section(comparisons), asked.into, begin=BEGIN, end=END)
            save_predictions(comparisons, predictions_path(asked.results))
    except (TigonError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
