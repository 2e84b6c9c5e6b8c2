"""A record of training steps as Markdown: one table per case."""

from __future__ import annotations

from benchmarks.training.codes import ALL, RETIRED
from tigon.bench.training.command import provenance
from tigon.bench.training.record import OVER, CaseRecord, TrainRecord
from tigon.bench.training.table import EXCEEDS, case_table
from tigon.bench.training.variants import CODES
from tigon.report.table import markdown_table
from tigon.units import in_bytes


def section(run: TrainRecord) -> str:
    """Provenance, and a heading, the command and a table for each case."""
    parts = [provenance(run)]
    for case in run.cases:
        limit = "" if case.limit_bytes is None else f" The memory limit is {in_bytes(case.limit_bytes)}."
        over = any(m.status == OVER for m in case.measurements)
        note = f" {EXCEEDS}: the peak exceeds the limit." if over else ""
        retired = {m.code for m in case.measurements} & RETIRED.keys()
        note += "".join(f" `{code}` was {RETIRED[code]}." for code in sorted(retired))
        parts += [
            f"**{case.id}**: {case.tokens:,} tokens per optimizer step.{limit}{note}",
            f"`{_command(case)}`",
            case_table(case),
        ]
    return "\n\n".join(part for part in parts if part != "``")


def _command(case: CaseRecord) -> str:
    """The command of a case, as it runs today: only this repository has the codes beside the wheel's."""
    if {m.code for m in case.measurements} <= CODES.keys():
        return case.command
    return case.command.replace("tigon bench train", "python -m benchmarks train")


def codes() -> str:
    """The table of the codes with their meanings."""
    return markdown_table(("code", "meaning"), [(f"`{code.name}`", code.meaning) for code in ALL.values()])
