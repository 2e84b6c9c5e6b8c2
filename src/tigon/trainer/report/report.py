"""Writes report.md and report.html of a run from the files of its folder.

Both templates get the same values, except the charts. Jinja2's autoescape escapes each value in HTML;
`escape_markdown`, as the finalizer, does so in Markdown. Long texts stand in Markdown fences that are longer than any
fence inside them. report.html is one file with inline SVG charts. Its content security policy forbids scripts and
loading.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tigon.objectives import recipe_checks
from tigon.objectives.base import Objective
from tigon.objectives.metric_sections import MetricRow, MetricSection, section_of
from tigon.profiler.render.figure import DARK_STYLE, for_phone, on_page
from tigon.trainer import model as models
from tigon.trainer import run_folder
from tigon.trainer.evaluation.generations import texts_of
from tigon.trainer.evaluation.harness import rows_of
from tigon.trainer.guards.prediction import comparison_line
from tigon.trainer.report import charts
from tigon.trainer.report.charts import value_of
from tigon.trainer.report.progress import format_bytes, format_seconds
from tigon.trainer.run_folder import RunFolder
from tigon.units import in_parameters

_DATA_LABELS = {
    "rows": "samples", "held_out_documents": "eval documents", "held_out_tokens": "eval tokens",
    "truncated_rows": "truncated documents", "dropped_rows": "dropped documents", "bad_rows": "rows left out",
    "steps": "optimizer steps", "learned_tokens": "learned tokens per epoch",
    "unigram_entropy": "unigram entropy (nats per token)", "tokenizer_size": "tokens of the tokenizer",
}  # fmt: skip
COMPARISON_COLUMNS = (
    "last loss", "largest difference", "peak memory", "peak of the step alone", "saved", "tokens/s",
    "slowest to fastest step",
)  # fmt: skip


def write(run: RunFolder, summary: Mapping[str, Any], objective: Objective) -> None:
    """Write charts/*.svg, report.md and report.html."""
    from jinja2 import Environment
    from markupsafe import Markup

    drawn = charts.draw(run.records(), summary, section_of(objective))
    for name, svg in drawn.items():
        run.write_text(f"charts/{name}.svg", svg)
    view = _view(run, summary, objective)
    here = Path(__file__).parent
    html = Environment(autoescape=True).from_string((here / "report.html.j2").read_text(encoding="utf-8"))
    with for_phone():
        narrow = charts.draw(run.records(), summary, section_of(objective))
    # Only the charts are exempt from escaping, because tigon itself draws them.
    both = {
        name: Markup(f'<div class="wide">{on_page(svg)}</div><div class="phone">{on_page(narrow[name])}</div>')
        for name, svg in drawn.items()
    }
    run.write_text("report.html", html.render(**view, charts=both, dark_style=DARK_STYLE))
    plain = Environment(finalize=escape_markdown, keep_trailing_newline=True)
    plain.filters["fenced"] = fenced
    markdown = plain.from_string((here / "report.md.j2").read_text(encoding="utf-8")).render(**view, charts=drawn)
    run.write_text("report.md", re.sub(r"\n{3,}", "\n\n", re.sub(r"\|\n\n\|", "|\n|", markdown)))


def _view(run: RunFolder, summary: Mapping[str, Any], objective: Objective) -> dict[str, Any]:
    recipe_text = (run.path / run_folder.RECIPE).read_text(encoding="utf-8")
    recipe = recipe_checks.loads_saved(run.path / run_folder.RECIPE)
    data, environment = run.read_json(run_folder.DATA), run.read_json(run_folder.ENVIRONMENT)
    train, section = [record for record in run.records() if record["event"] == "train"], section_of(objective)
    sources = recipe.data.source_names
    writes_text = objective.trl is None or objective.trl.writes_text
    on_gpu = environment["hardware"]["device"].startswith("cuda")
    return {
        "title": run.path.name,
        "lead": f"{models.described(recipe.model)}, {in_parameters(data['parameters'])}, on {sources}",
        "tiles": tiles(train, summary, section),
        "warnings": [text for r in run.records() if r["event"] == "warnings" for text in r["warnings"]],
        "metrics": section,
        "metric_rows": _metric_rows(section, run.records()) if section is not None else [],
        "decoded": summary["decoded"]["line"] if summary.get("decoded") else None,
        "comparison": _comparison_rows(summary["comparison"]),
        "comparison_columns": COMPARISON_COLUMNS,
        "comparison_note": _comparison_note(recipe.comparison.steps, summary["comparison"], on_gpu),
        "memory_note": "Memory is the memory that PyTorch has allocated on the GPU." if on_gpu else
        "Memory in the tiles and charts is the resident set of the whole process, including Python and libraries.",
        "texts": texts_of(run.records()),
        "tasks": [
            {"task": task, "metric": metric, "value": f"{value:.4f}", "error": "" if dev is None else f"{dev:.4f}"}
            for task, metric, value, dev in rows_of(summary.get("lm_eval") or {})
        ],
        "sample": summary["sample"] if recipe.output.sample_tokens and writes_text else None,
        "data": [(data_label(name), _number(value)) for name, value in data.items() if name != "fingerprint"],
        "environment": [(k.replace("_", " "), value) for part in environment.values() for k, value in part.items()],
        "patch": summary["patch"],
        "recipe": recipe_text,
    }  # fmt: skip


def data_label(name: str) -> str:
    """The words for an entry of data.json."""
    return _DATA_LABELS.get(name) or name.replace("_", " ")


def tiles(
    train: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], section: MetricSection | None
) -> list[dict[str, str]]:
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
        found.append(("stopped early, because the eval loss fell no more", f"step {summary['stopped_early_step']}"))
    found.append(("training time", format_seconds(summary["train_s"])))
    if summary.get("skipped_steps"):
        found.append(("skipped steps (loss or gradient not finite)", str(summary["skipped_steps"])))
    if summary.get("evaluation_error"):
        found.append(("evaluation failed", summary["evaluation_error"]))
    return [{"name": name, "value": value} for name, value in found]


def _speed_name(tokens_per_s: Sequence[float]) -> str:
    """The name of the median, with how far the records lie apart."""
    if len(tokens_per_s) == 1:
        return "tokens/s, of one record"
    low, high = min(tokens_per_s), max(tokens_per_s)
    return f"tokens/s, median of {len(tokens_per_s)} records from {low:,.0f} to {high:,.0f}"


def _metric_rows(section: MetricSection, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of the last evaluation that has some or, if none has, of the last training step that has some."""
    measured = [record for record in records if any(_has(record, row) for row in section.rows)]
    if not measured:
        return []
    last = next((record for record in reversed(measured) if record["event"] == "eval"), measured[-1])
    formats = [".1%" if column.is_share else ".4f" for column in section.columns]
    return [
        {
            "label": row.title,
            "cells": [format(value_of(last, n), form) for n, form in zip(row.metrics, formats, strict=True)],
        }
        for row in section.rows
        if _has(last, row)
    ]


def _has(record: Mapping[str, Any], row: MetricRow) -> bool:
    return all(value_of(record, name) is not None for name in row.metrics)


def _comparison_rows(repeats: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    measured = [repeat for repeat in repeats if not repeat["error"]]
    rows = []
    for repeat in repeats:
        if repeat["error"]:
            cells = [repeat["error"], *[""] * (len(COMPARISON_COLUMNS) - 1)]
        else:
            first = measured[0]
            apart = max(abs(a - b) for a, b in zip(repeat["losses"], first["losses"], strict=True))
            saved = 1 - repeat["peak_bytes"] / first["peak_bytes"]
            cells = [
                f"{repeat['losses'][-1]:.6f}",
                "" if repeat is first else f"{apart:.1e}",
                format_bytes(repeat["peak_bytes"]),
                format_bytes(repeat["peak_bytes"] - repeat["at_rest_bytes"]),
                "" if repeat is first else f"{saved:.0%}",
                f"{repeat['tokens_per_s']:,.0f}",
                " to ".join(f"{speed:,.0f}" for speed in repeat["tokens_per_s_range"]),
            ]
        rows.append({"label": repeat["label"], "cells": cells})
    return rows


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


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"


def escape_markdown(value: Any) -> Any:
    """Escape the markup of Markdown and HTML, and replace line breaks by spaces. For Jinja2's `finalize`."""
    if isinstance(value, Fenced) or not isinstance(value, str):
        return value
    text = value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#!~])", r"\\\1", " ".join(text.splitlines()))


class Fenced(str):
    """Text in a Markdown fence, which `escape_markdown` leaves unchanged."""


def fenced(value: str) -> Fenced:
    """Put text into a Markdown fence that is longer than any fence inside it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", value)), default=0))
    return Fenced(f"{fence}text\n{value}\n{fence}")
