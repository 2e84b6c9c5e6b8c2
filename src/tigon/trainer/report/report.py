"""The report of a run from the files of its folder: report.md, report.html and charts/."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tigon.objectives import recipe_checks
from tigon.objectives.base import Objective
from tigon.objectives.metric_sections import MetricRow, MetricSection, section_of
from tigon.recipe.keys import Recipe
from tigon.report import page
from tigon.report.blocks import (
    Block,
    ChartImage,
    Code,
    Continuations,
    Heading,
    Items,
    Paragraph,
    Report,
    Tiles,
    facts,
)
from tigon.report.chart import drawn_twice
from tigon.report.table import Table
from tigon.trainer import model as models
from tigon.trainer.evaluation.generations import texts_of
from tigon.trainer.evaluation.harness import metric_rows
from tigon.trainer.folder import run_folder
from tigon.trainer.folder.run_folder import RunFolder
from tigon.trainer.guards.prediction import comparison_line
from tigon.trainer.post_training.completions import table_of
from tigon.trainer.report import charts, labels
from tigon.trainer.report.charts import value_of
from tigon.trainer.report.progress import format_bytes
from tigon.units import in_clock, in_parameters

_DATA_LABELS = {
    "rows": "samples",
    "held_out_documents": "eval documents",
    "held_out_tokens": "eval tokens",
    "truncated_rows": "truncated documents",
    "dropped_rows": "dropped documents",
    "bad_rows": "rows left out",
    "steps": "optimizer steps",
    "learned_tokens": "learned tokens per epoch",
    "unigram_entropy": "unigram entropy (nats per token)",
    "tokenizer_size": "tokens of the tokenizer",
}
COMPARISON_COLUMNS = (
    "kernels",
    "last loss",
    "largest difference",
    "peak memory",
    "peak of the step alone",
    "saved",
    "tokens/s",
    "slowest to fastest step",
)

COMPLETION_RECORDS = 5
"""Records whose completions the report shows, from the first to the last. metrics.jsonl has those of all."""

_MEMORY_ON_GPU = "Memory is the memory that PyTorch has allocated on the GPU."
_MEMORY_ON_CPU = (
    "Memory in the tiles and charts is the resident set of the whole process, including Python and libraries."
)


def write(run: RunFolder, summary: Mapping[str, Any], objective: Objective) -> None:
    """Write charts/*.svg, report.md and report.html."""
    section, records = section_of(objective), run.records()
    drawn = drawn_twice(lambda: charts.draw(records, summary, section))
    recipe = recipe_checks.loads_saved(run.path / run_folder.RECIPE)
    parameters = in_parameters(run.read_json(run_folder.DATA)["parameters"])
    lead = f"{models.described(recipe.model)}, {parameters}, on {recipe.data.source_names}"
    blocks = [
        *_measured(run, summary, section, recipe, drawn),
        *_texts(run, summary, objective, recipe),
        *_setting(run, summary),
    ]
    page.write(Report(kind="train", title=run.path.name, lead=lead, blocks=blocks), drawn, run.write_text)


def _measured(
    run: RunFolder, summary: Mapping[str, Any], section: MetricSection | None, recipe: Recipe, drawn: Collection[str]
) -> Iterator[Block]:
    """The main figures, and the sections of losses, metrics, kernels, speed and tasks."""
    records = run.records()
    on_gpu = run.read_json(run_folder.ENVIRONMENT)["hardware"]["device"].startswith("cuda")
    yield Tiles(tiles([record for record in records if record["event"] == "train"], summary, section))
    if warnings := [text for r in records if r["event"] == "warnings" for text in r["warnings"]]:
        yield Items([f"Warning: {text}" for text in warnings])
    if "loss" in drawn:
        yield from (Heading("Loss"), ChartImage("loss", "loss over steps"))
    if section is not None and (table := _metrics(section, records)):
        yield Heading(section.title)
        if section.name in drawn:
            yield ChartImage(section.name, section.chart_text)
        yield Paragraph(f"The dots and the table are from evaluations, if there were any. {section.columns_text}")
        yield table
        if summary.get("labels"):
            of_labels, confusion = labels.tables(summary["labels"])
            yield Paragraph(f"At the end: {labels.line(summary['labels'])}.")
            yield from (of_labels, Paragraph("A row is a label of the data, a column what the model gave."), confusion)
        if summary.get("decoded"):
            yield Paragraph(f"Decoding from the beginnings of eval samples: {summary['decoded']['line']}.")
    if summary["comparison"]:
        yield Heading("The same steps with and without the kernels")
        yield Paragraph(_comparison_note(recipe.comparison.steps, summary["comparison"], on_gpu))
        if "comparison" in drawn:
            yield ChartImage("comparison", "peak memory and tokens/s")
        yield _comparison(summary["comparison"])
    if "throughput" in drawn:
        yield from (Heading("Throughput and memory"), ChartImage("throughput", "tokens/s and memory over steps"))
        yield Paragraph(_MEMORY_ON_GPU if on_gpu else _MEMORY_ON_CPU)
    if tasks := metric_rows(summary.get("lm_eval") or {}):
        rows = [
            (task, metric, f"{value:.4f}", "" if deviation is None else f"{deviation:.4f}")
            for task, metric, value, deviation in tasks
        ]
        yield Heading("lm-evaluation-harness")
        yield Table(("task", "metric", "value", "standard error"), rows, texts=(0, 1))


def _texts(run: RunFolder, summary: Mapping[str, Any], objective: Objective, recipe: Recipe) -> Iterator[Block]:
    """The texts that the model has written."""
    titles, completions = table_of(run.records(), COMPLETION_RECORDS)
    if completions:
        yield Heading("Completions and their rewards")
        yield Paragraph("Each record has the best completion first. The reward is the weighted sum of the functions.")
        yield Table(titles, completions, texts=(0, 1, 2))
    if prompts := texts_of(run.records()):
        yield from (Heading("What the model writes"), Paragraph("The likeliest continuation of each prompt."))
        for one in prompts:
            yield Continuations(one["prompt"], [(text["label"], text["text"]) for text in one["texts"]])
    if (sample := summary["sample"]) and objective.writes_text and recipe.output.sample_tokens:
        yield Heading("Text sample")
        yield Paragraph("Both samples have the same prompt and seed, and temperature 0.8.")
        labelled = [("Before training", sample["before"]), ("After training", sample["after"])]
        yield Continuations(sample["prompt"], labelled)


def _setting(run: RunFolder, summary: Mapping[str, Any]) -> Iterator[Block]:
    """The data, the kernels, the environment and the recipe."""
    data, environment = run.read_json(run_folder.DATA), run.read_json(run_folder.ENVIRONMENT)
    counts = [(data_label(name), _number(value)) for name, value in data.items() if name != "fingerprint"]
    yield from (Heading("Data"), facts(counts, numeric=True))
    yield from (Heading("Kernels"), Code(summary["patch"]))
    parts = [(name.replace("_", " "), str(value)) for part in environment.values() for name, value in part.items()]
    yield from (Heading("Environment"), facts(parts))
    yield Heading("Configuration")
    yield Code((run.path / run_folder.RECIPE).read_text(encoding="utf-8"))


def data_label(name: str) -> str:
    """The words for an entry of data.json."""
    return _DATA_LABELS.get(name) or name.replace("_", " ")


def tiles(
    train: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], section: MetricSection | None
) -> list[tuple[str, str]]:
    """The run's main figures, as (name, value): losses, tokens/s, memory, time.

    Args:
        train: The training records.
        summary: The run's summary.
        section: The objective's own metrics, if it has some.
    """
    found = []
    if summary["eval_loss"] is not None:
        unit = " (nats per token)" if summary["unigram_entropy"] is not None else ""
        found.append((f"final eval loss{unit}", f"{summary['eval_loss']:.4f}"))
        if summary.get("eval_perplexity") is not None:
            found.append(("perplexity of the eval text", f"{summary['eval_perplexity']:,.2f}"))
    if summary["unigram_entropy"] is not None:
        found.append(("unigram entropy of the eval text", f"{summary['unigram_entropy']:.4f}"))
    if train:
        name, key = "training loss", "loss"
        if section is not None and any(section.tile_metric in record for record in train):
            name, key = section.tile, section.tile_metric
        measured = [record[key] for record in train if key in record]
        steady = [r["tokens_per_s"] for r in train[1:]] or [train[0]["tokens_per_s"]]
        found += [
            (f"{name}, first to last", f"{measured[0]:.3f} → {measured[-1]:.3f}"),
            (_speed_name(steady), f"{statistics.median(steady):,.0f}"),
            ("peak memory", format_bytes(max(r["memory_peak_bytes"] for r in train))),
        ]
    if summary.get("memory"):
        found.append(("peak memory per GPU, predicted and measured", comparison_line(summary["memory"])))
    if summary.get("best_step") is not None:
        found.append(("checkpoint with the lowest eval loss, which is the saved model", f"step {summary['best_step']}"))
    if summary.get("stopped_early_step") is not None:
        found.append((f"stopped early, because {summary['stopped_because']}", f"step {summary['stopped_early_step']}"))
    found.append(("training time", in_clock(summary["train_s"])))
    if summary.get("skipped_steps"):
        found.append(("skipped steps (loss or gradient not finite)", str(summary["skipped_steps"])))
    if summary.get("evaluation_error"):
        found.append(("evaluation failed", summary["evaluation_error"]))
    return found


def _speed_name(tokens_per_s: Sequence[float]) -> str:
    """The name of the median, with how far the records lie apart."""
    if len(tokens_per_s) == 1:
        return "tokens/s, of one record"
    low, high = min(tokens_per_s), max(tokens_per_s)
    return f"tokens/s, median of {len(tokens_per_s)} records from {low:,.0f} to {high:,.0f}"


def _metrics(section: MetricSection, records: Sequence[Mapping[str, Any]]) -> Table | None:
    """The metrics of the last evaluation that has some or, if none has, of the last training step that has some."""
    section = charts.measured(section, records)
    measured = [record for record in records if any(_has(record, row) for row in section.rows)]
    if not measured:
        return None
    last = next((record for record in reversed(measured) if record["event"] == "eval"), measured[-1])
    formats = [".1%" if column.is_share else ".4f" for column in section.columns]
    rows = [
        [row.title, *(_metric(last, name, form) for name, form in itertools.zip_longest(row.metrics, formats))]
        for row in section.rows
        if _has(last, row)
    ]
    return Table(("", *(column.title for column in section.columns)), rows)


def _metric(record: Mapping[str, Any], name: str | None, form: str) -> str:
    return "" if name is None else format(value_of(record, name), form)


def _has(record: Mapping[str, Any], row: MetricRow) -> bool:
    return all(value_of(record, name) is not None for name in row.metrics)


def _comparison(repeats: Sequence[Mapping[str, Any]]) -> Table:
    first = next((repeat for repeat in repeats if not repeat["error"]), None)
    return Table(COMPARISON_COLUMNS, [_repeat_cells(repeat, first) for repeat in repeats])


def _repeat_cells(repeat: Mapping[str, Any], first: Mapping[str, Any] | None) -> list[str]:
    """first: the first row that was measured, with which the others are compared."""
    if repeat["error"] or first is None:
        return [repeat["label"], repeat["error"], *[""] * (len(COMPARISON_COLUMNS) - 2)]
    apart = max(abs(a - b) for a, b in zip(repeat["losses"], first["losses"], strict=True))
    saved = 1 - repeat["peak_bytes"] / first["peak_bytes"]
    return [
        repeat["label"],
        f"{repeat['losses'][-1]:.6f}",
        "" if repeat is first else f"{apart:.1e}",
        format_bytes(repeat["peak_bytes"]),
        format_bytes(repeat["peak_bytes"] - repeat["at_rest_bytes"]),
        "" if repeat is first else f"{saved:.0%}",
        f"{repeat['tokens_per_s']:,.0f}",
        " to ".join(f"{speed:,.0f}" for speed in repeat["tokens_per_s_range"]),
    ]


def _comparison_note(steps: int, repeats: Sequence[Mapping[str, Any]], on_gpu: bool) -> str:
    how = "as PyTorch's allocator counts it" if on_gpu else "summed over PyTorch's allocations and releases"
    return (
        f"Each row is {steps} steps from the same seed, weights and samples. The largest difference compares the loss "
        "of every step with that of the first row that was measured. Peak memory is the peak of the last step, "
        f"{how}. The peak of the step alone leaves out what was allocated before it, such as weights and optimizer "
        "states. Saved is the part of the first measured row's peak that a row does not need. "
        f"{_speed_note(max((repeat['timed_steps'] for repeat in repeats), default=0))}"
    )


def _speed_note(timed: int) -> str:
    """How tokens/s was measured, and how far it can be trusted. timed: steps of a row that were timed."""
    return (
        f"Tokens/s is the median of {timed} steps. The rows took turns, so another program's load meets all of them. "
        "If the ranges from the slowest to the fastest step of two rows overlap widely, their difference may be "
        "chance: raise comparison.steps."
    )


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
