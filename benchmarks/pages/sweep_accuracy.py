"""Compare the planner with the sweeps that were measured on GPUs.

    python -m benchmarks.pages.sweep_accuracy [--into DOCUMENT]

Every point that ran in the committed results is a case. With `--into`, the predictions are written beside those of
planner_accuracy.py, and a summary between the document's markers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from benchmarks.pages.planner_accuracy import (
    QUANTITIES,
    Comparison,
    Quantity,
    beyond,
    median_error,
    percent,
    save_predictions,
    worst_first,
)
from tigon.errors import TigonError, UsageError
from tigon.objectives import recipe_checks
from tigon.planner.gpus import GPUS, find_gpu
from tigon.recipe.keys import Recipe
from tigon.report.table import markdown_table
from tigon.sweep import failures
from tigon.sweep.one_point import predict

RESULTS = Path("benchmarks/results")
ROOMS = ("study", "medusa")
PREDICTIONS = "planner/sweeps-predicted.json"
"""Path inside the results folder of a GPU."""
BEGIN, END = "<!-- accuracy of sweeps -->", "<!-- /accuracy of sweeps -->"
REMAKE = "`python -m benchmarks.pages.sweep_accuracy --into docs/planner-accuracy.md` makes it"

_STREAMS = (
    "the planner does not simulate memory that the allocator holds back for the engine's copy and gather streams."
)
_LATE = (
    "ZeRO-3: DeepSpeed's reducing stream holds a gradient's memory until it has passed the gradient (record_stream, "
    "stage3.py). The planner does not simulate this. Whether it explains the whole difference was not measured."
)
_FOUR = "the step is CPU-bound, and four sweeps ran on one host at the same time."
_SLOW_HOST = (
    "the step is CPU-bound, and this host was slower than the one that the plan was fitted on. Even the fastest steps "
    "took 1.2 to 1.4 times as long as planned."
)
_TILES = (
    "measured before tiled MLPs were left out of the recomputation, and before inputs of 1 GiB or more came back to "
    "the GPU only when they are used. Until then the predicted peaks were within 1 %."
)
_PEFTS_LAYERS = "measured with PEFT's layers, which `lora_linear` and `lora_linears` have replaced."
REPLACED: Mapping[str, str] = {
    **{f"techniques: {name}": _PEFTS_LAYERS for name in ("lora", "qlora")},
    "techniques-two-gpus: zero-3": "measured with weights gathered one by one. tigon has whole layers gathered now.",
    "longest-sequence": _TILES,
    "largest-batch: tiled MLPs too": _TILES,
}
"""Sweeps, variants and points that are not compared, because tigon computes them in another way since they were
measured."""
KNOWN: Mapping[tuple[str, str], tuple[float, str]] = {
    ("techniques: zero-offload-cpu", "reserved"): (0.19, f"ZeRO-2's copies to the host: {_STREAMS}"),
    ("techniques: adamw-torchao-8bit", "step time"): (
        0.43, "the table look-ups of 8-bit states were fitted to Qwen3-0.6B only; here they take half as long."
    ),
    ("techniques: zero-offload-nvme", "step time"): (
        0.84, "the plan does not know the speed of the disk that holds the files."
    ),
    ("techniques-two-gpus: fsdp2-offload", "reserved"): (0.14, f"FSDP2's weights on their way: {_STREAMS}"),
    ("sequence", "reserved"): (0.16, _LATE),
    ("paper-two-gpus", "reserved"): (0.13, f"FSDP2: {_STREAMS}"),
    ("medusa-two-gpus", "reserved"): (
        0.19, "FSDP2: it is not known which cached memory one stream reuses from another. Most predictions are too "
        "high.",
    ),
    **{
        (f"techniques: {name}", "step time"): (limit, _SLOW_HOST)
        for name, limit in (
            ("checkpointing-selective", 0.39), ("tiled-mlp", 0.41), ("grouped-attention", 0.32),
            ("galore-layerwise", 0.36),
        )
    },
    ("batch: Liger batch_size=32", "step time"): (0.32, _FOUR),
    ("sequence", "step time"): (0.28, _FOUR),
    ("ladder: + tiled MLPs", "step time"): (0.48, _SLOW_HOST),
    ("ladder: GaLore a layer at a time", "step time"): (
        0.62, "the step is CPU-bound. Even the fastest steps took 2.2 times as long as planned."
    ),
    ("medusa: stage 2", "step time"): (
        0.29, "at 1024 tokens the step is CPU-bound, and another sweep ran on the host's other GPU."
    ),
}  # fmt: skip
"""(start of a case's name, quantity) -> (limit that replaces the quantity's own, reason)."""


def known(case_id: str, quantity: str) -> str | None:
    """The longest entry of KNOWN that the case's name starts with, or None."""
    fitting = [begin for begin, name in KNOWN if name == quantity and case_id.startswith(begin)]
    return max(fitting, key=len, default=None)


def case_of(results: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """A point in the form of a case of planner_accuracy.py."""
    return {
        "id": f"{results['name']}: {point['id']}", "sweep": results["name"], "keys": point["keys"],
        "unchecked": point["unchecked"], "device": results["environment"]["device"],
        "memory_bytes": results["memory_limit_bytes"] or results["environment"]["memory_bytes"],
        "allocated_bytes": point["peak_allocated_bytes"], "reserved_bytes": point["peak_reserved_bytes"],
        "step_s": point["step_s"], "phases": point["phases"],
    }  # fmt: skip


def load(folder: Path) -> list[dict[str, Any]]:
    """Every point that ran in the results of a GPU and is not in REPLACED, in file order. Raises UsageError for a file
    that is not a results.json."""
    cases = []
    for file in sorted(file for room in ROOMS for file in folder.glob(f"{room}/*.json")):
        try:
            results = json.loads(file.read_text(encoding="utf-8"))
            ran = [point for point in results["points"] if point["status"] == failures.OK]
            if ran and _gpu_known(results["environment"]["device"]):
                found = [case_of(results, point) for point in ran]
                cases += [case for case in found if not _is_replaced(case["id"])]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file} is not the results.json of a sweep ({type(error).__name__}: {error}).") from None
    return cases


def _is_replaced(case_id: str) -> bool:
    return any(case_id == name or case_id.startswith((f"{name}:", f"{name} ")) for name in REPLACED)


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
            prediction = predict(recipe_of(case, Path(folder)), case["device"], case["memory_bytes"])
            predicted = {quantity.name: prediction[quantity.predicted] for quantity in QUANTITIES}
            comparisons.append(Comparison(case=case, predicted=predicted, phases={}))
    return comparisons


def recipe_of(case: Mapping[str, Any], folder: Path) -> Recipe:
    """The recipe of a measured point, except for its steps and its output."""
    tree: dict[str, dict[str, Any]] = {"train": {"steps": 1}}
    for key, value in case["keys"].items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    return recipe_checks.load(file, gpu_present=lambda: True, checked=not case["unchecked"])


def unexpected(comparisons: Sequence[Comparison], quantity: Quantity) -> list[str]:
    """One line for each case that breaks its limit (the one in KNOWN if it is listed there, else the quantity's own),
    and one for each entry of KNOWN that no case needs any more."""
    within, sentences, needed = [], [], set()
    for one in comparisons:
        error, begin = abs(one.error(quantity)), known(one.id, quantity.name)
        if error <= quantity.worst or begin is None:
            within.append(one)
            continue
        needed.add(begin)
        if error > (limit := KNOWN[begin, quantity.name][0]):
            sentences.append(f"{quantity.name} of {one.id}: {percent(one.error(quantity))} (known, up to {limit:.0%})")
    idle = [begin for begin, name in KNOWN if name == quantity.name and begin not in needed]
    sentences += [f"{quantity.name} of {begin}: within the limit, so that KNOWN need not have it" for begin in idle]
    return sentences + beyond(within, quantity)


def section(comparisons: Sequence[Comparison]) -> str:
    """The text between the document's markers: one row per sweep and quantity, and the known cases beyond a limit."""
    sweeps = dict.fromkeys(one.case["sweep"] for one in comparisons)
    rows = []
    for sweep in sweeps:
        own = [one for one in comparisons if one.case["sweep"] == sweep]
        for quantity in QUANTITIES:
            worst = worst_first(own, quantity)[0]
            first = quantity is QUANTITIES[0]
            errors = (f"{median_error(own, quantity):.1%}", percent(worst.error(quantity)), f"{quantity.worst:.0%}")
            head = (sweep, str(len(own))) if first else ("", "")
            rows.append([*head, quantity.name, *errors, worst.id.partition(": ")[2]])
    off = {
        (begin, quantity.name)
        for quantity in QUANTITIES
        for one in comparisons
        if abs(one.error(quantity)) > quantity.worst and (begin := known(one.id, quantity.name)) is not None
    }
    beyond_limits = [f"- {begin}, {name}: {why}" for (begin, name), (_, why) in KNOWN.items() if (begin, name) in off]
    lists = {
        "Known cases beyond a limit": beyond_limits,
        "Not compared": [f"- {point}: {why}" for point, why in REPLACED.items()],
    }
    table = markdown_table(("sweep", "points", "", "median error", "worst error", "limit", "point"), rows)
    return table + "".join(f"\n\n{title}:\n\n" + "\n".join(lines) for title, lines in lists.items() if lines)


def predictions_path(folder: Path) -> Path:
    """The file with the predictions of a GPU's sweeps."""
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
    options = parser.parse_args()
    try:
        cases = load(options.results)
        if not cases:
            raise UsageError(f"{options.results} holds no sweep with a point that ran on a GPU that the planner knows.")
        if options.into is not None:
            regions.read_document(options.into, begin=BEGIN, end=END)
        comparisons = compare(cases)
        _print(comparisons)
        if options.into is not None:
            regions.write_between(section(comparisons), options.into, begin=BEGIN, end=END)
            save_predictions(comparisons, predictions_path(options.results))
    except (TigonError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
