"""Compare the planner's estimates with measurements.

    python -m benchmarks.pages.planner_accuracy [--into docs/planner-accuracy.md]

The measurements are those of planner/runs.json. Prints the errors of every case, and the peaks of each phase for cases
whose memory is beyond a limit. With `--into`, the predictions are written beside the measurements, the table
between the document's markers, and the chart into img/ beside the document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from tigon.errors import TigonError, UsageError
from tigon.models.loading.config import load_config
from tigon.models.loading.presets import PRESETS
from tigon.planner.estimate import Estimate, estimate
from tigon.planner.gpus import GIB, find_gpu
from tigon.planner.render.json_names import KEY_OF
from tigon.planner.request import Request
from tigon.report.chart import INK, MUTED, new_figure, svg
from tigon.report.table import markdown_table
from tigon.techniques.keys.settings import Settings

MEASUREMENTS = Path("benchmarks/results/nvidia-h200/planner/runs.json")
CHART = "img/planner-accuracy.svg"
REMAKE = "`python -m benchmarks.pages.planner_accuracy --into docs/planner-accuracy.md` makes it"
BEGIN, END = "<!-- accuracy -->", "<!-- /accuracy -->"


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A quantity that is compared, and the limits of its error."""

    name: str
    measured: str
    """Its key in a measurement."""
    predicted: str
    """Its field of an Estimate."""
    worst: float
    """Limit of every case's error, relative to the measurement."""
    median: float | None
    """Limit of the median error; None: none."""
    unit: str
    scale: float
    """Units in one byte or second."""


QUANTITIES = (
    Quantity(name="allocated", measured="allocated_bytes", predicted="peak_allocated_bytes", worst=0.05, median=0.02,
             unit="GiB", scale=1 / GIB),
    Quantity(name="reserved", measured="reserved_bytes", predicted="peak_reserved_bytes", worst=0.08, median=None,
             unit="GiB", scale=1 / GIB),
    Quantity(name="step time", measured="step_s", predicted="step_s", worst=0.25, median=None, unit="ms", scale=1e3),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """A file of measured runs."""

    environment: Mapping[str, Any]
    memory_bytes: int
    measured: tuple[Mapping[str, Any], ...]
    """The cases that ran."""
    others: tuple[Mapping[str, Any], ...]
    """Those that did not, each with its `status` and `detail`."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case: what was predicted and what was measured, by the name of the quantity, in bytes and seconds."""

    case: Mapping[str, Any]
    predicted: Mapping[str, float]
    phases: Mapping[str, int]
    """The predicted peaks of each phase, bytes."""

    @property
    def id(self) -> str:
        return str(self.case["id"])

    def measured(self, quantity: Quantity) -> float:
        return float(self.case[quantity.measured])

    def error(self, quantity: Quantity) -> float:
        """(predicted - measured) / measured"""
        return self.predicted[quantity.name] / self.measured(quantity) - 1


def load(path: Path) -> Measurements:
    """The measurements in `path`. Raises UsageError if the file has no measured runs."""
    measurements = _read(path, hint="benchmarks/README.md says how such runs are measured")
    try:
        if measurements["tiny"]:
            raise UsageError(f"{path} holds runs of small models on a CPU, whose peaks nobody measured.")
        ran = tuple(case for case in measurements["cases"] if case["status"] == "ok")
        return Measurements(
            environment=measurements["environment"], memory_bytes=measurements["memory_bytes"], measured=ran,
            others=tuple(case for case in measurements["cases"] if case["status"] != "ok"),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} has no measured runs: {error} is missing.") from None


def _read(path: Path, *, hint: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); {hint}.") from None


# --- predictions -----------------------------------------------------------------------------------------------------


def request_of(case: Mapping[str, Any]) -> Request:
    """The request that a measured case answers."""
    config = load_config(case["model"])
    if case["config"]:
        shape = {name: value for name, value in PRESETS[case["model"]].items() if name != "model_type"}
        config = type(config)(**(shape | case["config"]))
    chosen: dict[str, Any] = {
        KEY_OF[name]: tuple(value) if isinstance(value, list) else value for name, value in case["choices"].items()
    }
    return Request(
        model=case["model"], config=config, batch=case["batch"], seq=case["seq"], settings=Settings.of(chosen),
        masked=case["masked"], evaluated=case["evaluated"],
    )  # fmt: skip


def compare(measurements: Measurements) -> list[Comparison]:
    """Predict every measured case."""
    gpu = find_gpu(measurements.environment["device"])
    comparisons = []
    for case in measurements.measured:
        estimated = estimate(request_of(case), gpu=gpu, evaluation=False)
        predicted = {quantity.name: getattr(estimated, quantity.predicted) for quantity in QUANTITIES}
        comparisons.append(Comparison(case=case, predicted=predicted, phases=_merged_phases(estimated)))
    return comparisons


def _merged_phases(estimated: Estimate) -> dict[str, int]:
    """The phases of the measurements, in which the model's forward call includes the loss."""
    phases = dict(estimated.phases)
    phases["forward"] = max(phases["forward"], phases.pop("loss"))
    return phases


def predictions_path(measurements: Path) -> Path:
    """The file with the predictions for a file of measurements."""
    return measurements.with_name(f"{measurements.stem}-predicted.json")


def versions() -> dict[str, str]:
    """Versions of the packages that a prediction traces. Another release may free a tensor at another time."""
    return {name: metadata.version(name).partition("+")[0] for name in ("torch", "transformers", "peft")}


def save_predictions(comparisons: Iterable[Comparison], path: Path) -> None:
    cases = {one.id: {**one.predicted, "phases": dict(one.phases)} for one in comparisons}
    path.write_text(json.dumps({"versions": versions(), "cases": cases}, indent=1) + "\n", encoding="utf-8")


def predicted_with(path: Path) -> dict[str, str]:
    """The versions that the predictions in `path` were made with. Raises UsageError if the file cannot be read."""
    return dict(_read(path, hint=REMAKE)["versions"])


def load_predictions(cases: Sequence[Mapping[str, Any]], path: Path, *, remake: str = REMAKE) -> list[Comparison]:
    """Every measured case with its prediction in `path`. Raises UsageError if the file lacks a case."""
    rows = _read(path, hint=remake)["cases"]
    if missing := [case["id"] for case in cases if case["id"] not in rows]:
        raise UsageError(f"{path} lacks {missing[0]}; {remake}.")
    return [
        Comparison(
            case=case, phases=rows[case["id"]]["phases"],
            predicted={quantity.name: rows[case["id"]][quantity.name] for quantity in QUANTITIES},
        )
        for case in cases
    ]  # fmt: skip


# --- judgement -------------------------------------------------------------------------------------------------------


def median_error(comparisons: Sequence[Comparison], quantity: Quantity) -> float:
    return statistics.median(abs(one.error(quantity)) for one in comparisons)


def worst_first(comparisons: Sequence[Comparison], quantity: Quantity) -> list[Comparison]:
    return sorted(comparisons, key=lambda one: -abs(one.error(quantity)))


def beyond(comparisons: Sequence[Comparison], quantity: Quantity) -> list[str]:
    """One sentence for each case that breaks a limit of this quantity, the worst case first."""
    sentences = [
        f"{quantity.name} of {one.id}: predicted {shown(one.predicted[quantity.name], quantity)}, measured "
        f"{shown(one.measured(quantity), quantity)} {quantity.unit}, {percent(one.error(quantity))} "
        f"(limit {quantity.worst:.0%})"
        for one in worst_first(comparisons, quantity)
        if abs(one.error(quantity)) > quantity.worst
    ]
    middle = median_error(comparisons, quantity)
    if quantity.median is not None and middle > quantity.median:
        sentences.append(f"{quantity.name}: the median error is {middle:.2%} (limit {quantity.median:.0%})")
    return sentences


# --- table and chart -------------------------------------------------------------------------------------------------


def section(measurements: Measurements, comparisons: Sequence[Comparison]) -> str:
    """The text between the document's markers."""
    parts = [
        _provenance(measurements),
        _summary(comparisons),
        f"![Predicted against measured]({CHART})",
        table(comparisons),
    ]
    if measurements.others:
        lines = [f"- {case['id']}: {case['status']}. {case['detail']}" for case in measurements.others]
        parts.append("Not measured:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _provenance(measurements: Measurements) -> str:
    environment = measurements.environment
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    commits = sorted({case["tigon_commit"] or "unknown" for case in measurements.measured})
    dates = sorted({case["date"] for case in measurements.measured})
    earlier = sum("steps_commit" in case for case in measurements.measured)
    again = f" {earlier} runs were measured twice and show the time of the earlier, faster run." if earlier else ""
    named = (", ".join(map(" ".join, case.get("versions", {}).items())) for case in measurements.measured)
    others = [versions for versions in named if versions]
    again += "".join(f" {others.count(other)} runs were measured with {other}." for other in dict.fromkeys(others))
    return (
        f"{len(measurements.measured)} training runs on one {environment['device']} "
        f"({measurements.memory_bytes / GIB:.1f} GiB, "
        f"driver {environment['driver']}; {versions}; tigon at commit {', '.join(commits)}; {', '.join(dates)}). "
        "Each run starts with nothing allocated and takes three optimizer steps. The peaks cover the whole run; the "
        f"time is the mean of the last two steps.{again} Weights and tokens are random."
    )


def _summary(comparisons: Sequence[Comparison]) -> str:
    rows = []
    for quantity in QUANTITIES:
        worst = worst_first(comparisons, quantity)[0]
        limit = "" if quantity.median is None else f"{quantity.median:.0%}"
        errors = (f"{median_error(comparisons, quantity):.1%}", limit, percent(worst.error(quantity)))
        rows.append([quantity.name, *errors, f"{quantity.worst:.0%}", worst.id])
    return markdown_table(("", "median error", "limit", "worst error", "limit", "case"), rows)


def table(comparisons: Sequence[Comparison]) -> str:
    """Markdown: each case with predicted, measured and error of every quantity."""
    names = [name for q in QUANTITIES for name in (f"{q.name} predicted ({q.unit})", f"measured ({q.unit})", "error")]
    rows = []
    for one in comparisons:
        row = [one.id]
        for quantity in QUANTITIES:
            both = (one.predicted[quantity.name], one.measured(quantity))
            row += [*(shown(value, quantity) for value in both), percent(one.error(quantity))]
        rows.append(row)
    return markdown_table(("case", *names), rows, texts=(0,))


def shown(value: float, quantity: Quantity) -> str:
    """The number in the quantity's unit, without the unit."""
    return f"{value * quantity.scale:,.{2 if quantity.unit == 'GiB' else 0}f}"


def percent(error: float) -> str:
    """Signed, one digit."""
    return f"{100 * error:+.1f}%"


# One colour and one shape per model, so that readers can tell them apart without the colour.
_LOOKS = (("#c2410c", "o"), ("#1d4ed8", "s"), ("#0f766e", "^"), ("#7e22ce", "D"), ("#a16207", "v"), ("#9ca3af", "P"))


def chart(comparisons: Sequence[Comparison]) -> str:
    """SVG: predicted against measured, a panel for each quantity, with the limits as a band."""
    figure, panels = new_figure(len(QUANTITIES), columns=len(QUANTITIES), height=3.4)
    by_model = {one.case["model"]: None for one in comparisons}
    for axes, quantity in zip(panels, QUANTITIES, strict=True):
        values = [one.measured(quantity) * quantity.scale for one in comparisons]
        ends = [0.8 * min(values), 1.25 * max(values)]
        axes.fill_between(
            ends, [end * (1 - quantity.worst) for end in ends], [end * (1 + quantity.worst) for end in ends],
            color=MUTED, alpha=0.18, lw=0, label=f"within {quantity.worst:.0%}",
        )  # fmt: skip
        axes.plot(ends, ends, color=MUTED, lw=0.8)
        for number, model in enumerate(by_model):
            color, marker = _LOOKS[number % len(_LOOKS)]
            own = [one for one in comparisons if one.case["model"] == model]
            axes.plot(
                [one.measured(quantity) * quantity.scale for one in own],
                [one.predicted[quantity.name] * quantity.scale for one in own],
                ls="", marker=marker, ms=4, color=color, alpha=0.8, mew=0, label=model if axes is panels[0] else None,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set_box_aspect(1)
        axes.set_title(f"{quantity.name}, {quantity.unit}", color=INK, fontsize=9, loc="left")
        _plain_ticks(axes, ends)
        axes.set_xlabel("measured", color=INK)
        axes.legend(*_band(axes), loc="upper left", frameon=False, fontsize=8)
    panels[0].set_ylabel("predicted", color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    models = [(handle, label) for handle, label in zip(handles, labels, strict=True) if label in by_model]
    figure.legend(*zip(*models, strict=True), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return svg(figure, "planner-accuracy")


def _band(axes: Any) -> tuple[list[Any], list[str]]:
    """The legend entry of the band only."""
    pairs = zip(*axes.get_legend_handles_labels(), strict=True)
    handle, label = next(pair for pair in pairs if pair[1].startswith("within"))
    return [handle], [label]


def _plain_ticks(axes: Any, ends: Sequence[float]) -> None:
    """Label the axes with round numbers: 10, 20, 50 instead of powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    bases = (1, 2, 5) if ends[1] < 20 * ends[0] else (1, 3)
    ticks = [base * 10**power for power in range(-1, 6) for base in bases if ends[0] < base * 10**power < ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


# --- the command -----------------------------------------------------------------------------------------------------


def into_document(measurements: Measurements, comparisons: Sequence[Comparison], document: Path) -> None:
    """Write the table between the document's markers and the chart beside the document. Raises UsageError without the
    markers."""
    inside, drawing = section(measurements, comparisons), chart(comparisons)
    regions.read_document(document, begin=BEGIN, end=END)
    drawn = document.parent / CHART
    drawn.parent.mkdir(parents=True, exist_ok=True)
    drawn.write_text(drawing + "\n", encoding="utf-8")
    regions.write_between(inside, document, begin=BEGIN, end=END)


def _print(measurements: Measurements, comparisons: Sequence[Comparison]) -> None:
    """Print one line per case, and the phases of those beyond a limit."""
    width = max(len(one.id) for one in comparisons)
    for one in comparisons:
        values = (
            f"{shown(one.predicted[q.name], q):>7} {shown(one.measured(q), q):>7} {q.unit} "
            f"{percent(one.error(q)):>7}{'!' if abs(one.error(q)) > q.worst else ' '}"
            for q in QUANTITIES
        )
        print(f"{one.id:{width}}  {'  '.join(values)}")
        if any(abs(one.error(quantity)) > quantity.worst for quantity in QUANTITIES[:2]):
            for phase, nbytes in one.case["phases"].items():
                print(f"    {phase}: {one.phases[phase] / GIB:.2f} predicted, {nbytes / GIB:.2f} GiB measured")
    for case in measurements.others:
        print(f"{case['id']:{width}}  {case['status']}: {case['detail']}")
    for quantity in QUANTITIES:
        worst = worst_first(comparisons, quantity)[0]
        middle = median_error(comparisons, quantity)
        print(f"{quantity.name}: median {middle:.2%}, worst {percent(worst.error(quantity))} ({worst.id})")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages.planner_accuracy", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS, help=f"default: {MEASUREMENTS}")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT", help="write table and chart into this document")
    options = parser.parse_args()
    try:
        measurements = load(options.measurements)
        if not measurements.measured:
            raise UsageError(f"{options.measurements} holds no case that ran to its end.")
        if options.into is not None:
            regions.read_document(
                options.into, begin=BEGIN, end=END
            )  # checked first, because the predictions take half a minute
        comparisons = compare(measurements)
        _print(measurements, comparisons)
        if options.into is not None:
            into_document(measurements, comparisons, options.into)
            save_predictions(comparisons, predictions_path(options.measurements))
            print(f"wrote {options.into}, {options.into.parent / CHART} and {predictions_path(options.measurements)}")
    except (TigonError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
