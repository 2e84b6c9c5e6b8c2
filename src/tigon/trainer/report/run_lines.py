"""The lines that a run prints before its first step, and after its last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tigon.data import preview
from tigon.report.table import Table
from tigon.techniques import TECHNIQUES
from tigon.techniques.lora import lora
from tigon.trainer import model
from tigon.trainer.distributed import launch, torchrun
from tigon.trainer.folder.run_folder import RunFolder
from tigon.trainer.guards import segments
from tigon.trainer.guards.prediction import comparison_line
from tigon.trainer.prepare import Prepared
from tigon.trainer.report import labels
from tigon.units import in_parameters

if TYPE_CHECKING:
    from rich.console import Console

    from tigon.objectives.base import Objective


def announce(console: Console, run: RunFolder, prepared: Prepared) -> None:
    """Print what the run trains, on which data, in how many steps, and its warnings."""
    recipe, data = prepared.recipe, prepared.data
    samples_per_step = prepared.samples_per_step
    if prepared.rows is None:
        per_step = f"{samples_per_step * recipe.data.sequence_length:,} tokens per step"
        if not recipe.data.packs:
            per_step = f"about {samples_per_step * data['tokens'] / data['rows']:,.0f} tokens per step"
        counts = f"{data['tokens']:,} tokens in {data['rows']:,} samples, {data['held_out_tokens']:,} tokens for "
        counts += "evaluation"
        if "unigram_entropy" in data:
            counts += f"; unigram entropy {data['unigram_entropy']:.3f} nats"
    else:
        what = "completions" if prepared.objective.trl and prepared.objective.trl.scores else "rows"
        per_step = f"{samples_per_step:,} {what} per step"
        counts = f"{data['rows']:,} rows with {data['tokens']:,} tokens, {len(prepared.rows[1]):,} rows for evaluation"
    techniques = [name for name, row in TECHNIQUES.items() if row.used_by(prepared.settings)]
    if segments.used(prepared.settings, prepared.device):
        techniques.append("expandable segments of PyTorch's allocator")
    lines = [
        f"run      {run.path}" + (f", from {run.checkpoint.name}" if run.checkpoint else ""),
        f"model    {model.described(recipe.model)}, {in_parameters(prepared.n_parameters)}, "
        f"kernels: {recipe.model.kernels}",
        *([f"layers   {'; '.join(map(str, prepared.layer_paths))}"] if prepared.layer_paths else []),
        f"data     {recipe.data.source_names}: {counts}",
        *prepared.rows_line,
        *_kept_line(prepared),
        f"steps    {prepared.size_words}",
        f"device   {prepared.device}, {prepared.settings.train.precision}, {per_step}",
        f"memory   {', '.join(techniques)}",
        *_adapters_line(prepared),
        *([f"disks    all machines share {run.path}"] if launch.has_several_nodes() else []),
        *torchrun.restart_line(),
    ]
    if objective_line := prepared.objective.announcement:
        lines.append(objective_line)
    if data["truncated_rows"] or data["dropped_rows"]:
        counts = f"{data['truncated_rows']} documents truncated, {data['dropped_rows']} dropped"
        lines.append(f"warning  {counts} (data.too_long: {recipe.data.too_long})")
    if prepared.unused_tensors:
        lines.append(model.unused_line(prepared.unused_tensors))
    for name, why in prepared.wrong_ops.items():
        lines.append(
            f"warning  {name} gives wrong results on this device ({why}): the model's own code is used instead; run "
            "`tigon doctor`"
        )
    if data["bad_rows"]:
        lines.append(f"warning  {data['bad_rows']} rows left out (data.bad_rows: skip): {'; '.join(prepared.bad_rows)}")
    lines += [f"warning  {warning}" for warning in prepared.warnings]
    for line in lines:
        console.out(line)
    for row in prepared.shown:
        preview.print_row(console, row, prepared.tokenizer)


def _kept_line(prepared: Prepared) -> list[str]:
    """How many rows the model does not learn. With few rows, a kept one may be the only one that has a fact."""
    kept, data = prepared.data["held_out_documents"], prepared.recipe.data
    if not kept or not prepared.rows_line or data.eval_source:
        return []
    of = kept + prepared.data["documents"]
    return [f"         {kept:,} of {of:,} rows kept for evaluation, not learned; data.eval_fraction: 0 learns all"]


def _adapters_line(prepared: Prepared) -> tuple[str, ...]:
    """The dtype of adapters over 4-bit weights, which TRL's trainers make bf16 in every script."""
    settings = prepared.settings
    if prepared.objective.trl is None or not settings.lora.used or not settings.lora.quantize:
        return ()
    if lora.adapter_dtype(settings) == torch.bfloat16:
        return ("adapters bf16 over 4-bit weights, as in a script of TRL",)
    return ("adapters fp32 over 4-bit weights; a script of TRL trains them in bf16, as lora.adapter_dtype: bf16 does",)


def conclude(console: Console, run: RunFolder, summary: dict[str, Any], objective: Objective) -> None:
    """Print the results of a run that is complete."""
    if summary["stopped_early_step"] is not None:
        console.out(f"stopped  at step {summary['stopped_early_step']}: {summary['stopped_because']}")
    if summary["eval_loss"] is not None and summary["unigram_entropy"] is None:
        console.out(f"eval loss {summary['eval_loss']:.4f}")
    elif summary["eval_loss"] is not None:
        gap = summary["unigram_entropy"] - summary["eval_loss"]
        side = "below" if gap > 0 else "above"
        line = f"eval loss {summary['eval_loss']:.4f} nats, {abs(gap):.2f} {side} the unigram entropy"
        if summary["eval_perplexity"] is not None:
            line += f"; perplexity {summary['eval_perplexity']:,.2f}"
        console.out(line)
    if summary["best_step"] is not None:
        console.out(f"best     checkpoint of step {summary['best_step']}, loaded and saved")
    if summary["decoded"]:
        console.out(f"{objective.name:<8} {summary['decoded']['line']}")
    if summary["labels"]:
        console.out(f"{objective.name:<8} {labels.line(summary['labels'])}")
        for table in labels.tables(summary["labels"]):
            table.show(console)
    if summary["evaluation_error"]:
        console.out(f"warning  {summary['evaluation_error']}")
    if summary["skipped_steps"]:
        console.print(f"warning  {summary['skipped_steps']} steps skipped: loss or gradient was not finite")
    if summary["comparison"]:
        _print_comparison(console, summary["comparison"])
    if summary["memory"]:
        console.out(f"memory   {comparison_line(summary['memory'])}")
    console.out(f"report   {run.path / 'report.html'}")


def _print_comparison(console: Console, repeats: Sequence[Mapping[str, Any]]) -> None:
    """A table of the choices that were measured, and a line for each other one."""
    from tigon.trainer.report.progress import format_bytes  # loads transformers

    rows = [
        (
            row["label"],
            f"{row['losses'][-1]:.6f}",
            format_bytes(row["peak_bytes"]),
            format_bytes(row["peak_bytes"] - row["at_rest_bytes"]),
            f"{row['tokens_per_s']:,.0f}",
            " to ".join(f"{speed:,.0f}" for speed in row["tokens_per_s_range"]),
        )
        for row in repeats
        if row["error"] is None
    ]
    if rows:
        titles = ("kernels", "last loss", "peak memory", "step alone", "tokens/s", "range")
        Table(titles, rows, title="the same steps, seed and samples, in turns").show(console)
        console.print("tokens/s is the median step; the range is from the slowest to the fastest step")
    for row in repeats:
        if row["error"] is not None:
            console.out(f"{row['label']}: {row['error']}")
