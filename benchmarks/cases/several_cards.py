"""Measure `tigon train` on several cards of one host: losses beside one process, times and peaks beside the plan.

    python -m benchmarks several-cards --plan --predictions PLAN           # writes the plan of each row; needs no GPU
    python -m benchmarks several-cards --predictions PLAN --json RECORD    # on four cards: about 12 minutes
    python -m benchmarks several-cards --seconds 500 ...                   # ends then, and starts no row too late
    python -m benchmarks several-cards --rows "8B, FSDP2" DPO ...          # this row, then rows with DPO in their name
    python -m benchmarks several-cards --tiny                              # small models on a CPU, which refuses FSDP2

On four cards, rows of one or two cards run two at a time, each on its own pair of cards. Rows of four run alone. With
two cards, rows of four are left out. A call goes on with the record at `--json` and runs what it lacks. Each row has
new processes. Those of several rows import their packages together, before the first of these rows runs. A row that
takes three times as long as expected is ended.

`losses` rows train a small model in fp32 and must repeat the losses of one process. The others train random tokens with
the widths of the real model. `profile` in a line has the kernels of one step of the main process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.harness import Bench, Case
from benchmarks.several_cards import rows as table
from benchmarks.several_cards.checkpoints import Checkpoints
from benchmarks.several_cards.lanes import Lane, run_stage
from benchmarks.several_cards.rows import Row
from tigon.bench.record import save
from tigon.errors import TigonError
from tigon.objectives import recipe_checks
from tigon.planner.gpus import GIB
from tigon.sweep.failures import OK, line
from tigon.sweep.one_point import predict

CARDS: Mapping[str, tuple[str, int]] = {
    "h100": ("NVIDIA H100 80GB HBM3", 85_017_493_504),
    "h200": ("NVIDIA H200", 150_109_880_320),
}
"""The cards of plans: a word of `--card`, the driver's name, and its bytes."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan", action="store_true", help="predict the rows, write --predictions, and measure nothing"
    )
    parser.add_argument("--predictions", type=Path, metavar="PLAN", help="the plans of the rows")
    parser.add_argument("--card", choices=tuple(CARDS), default="h100", help="the card of --plan")
    parser.add_argument("--seconds", type=float, default=3600, help="start no row that would end later, and end then")
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="NAME", help="only these rows, in this order; a part of a name will do"
    )


def measure(bench: Bench) -> None:
    given = bench.given
    if given.plan:
        _plan(bench)
        return
    plans = json.loads(given.predictions.read_text(encoding="utf-8"))["rows"] if given.predictions else {}
    try:
        stages = table.chosen(given.rows)
    except KeyError as error:
        bench.refuse(f"--rows: no row has {error} in its name")
    run = _Run(bench, plans, bench.resume("rows", choosing=("seconds", "rows")))
    cards = torch.cuda.device_count() if bench.gpu else 4
    halves = [(0, 1), (2, 3)] if cards >= 4 and not bench.tiny else [(0, 1)]
    with tempfile.TemporaryDirectory(prefix="several-cards-") as scratch:
        checkpoints = Checkpoints(Path(scratch, "checkpoints"))
        lanes = [Lane(half, Path(scratch), checkpoints, tiny=bench.tiny) for half in halves]
        whole = Lane(tuple(range(4)), Path(scratch), checkpoints, tiny=bench.tiny)
        try:
            if cards >= 4 and any(row.cards > 2 for stage in stages for row in stage):
                # they import while rows of two cards run
                threading.Thread(target=whole.workers.prepare, args=(4,), daemon=True).start()
            for stage in stages:
                todo = [row for row in stage if row.name not in run.done and row.cards <= cards]
                four = [row for row in todo if row.cards > 2]
                run.skipped += run_stage([row for row in todo if row.cards <= 2], lanes, run.left_s, run.keep)
                run.skipped += run_stage(four, [whole], run.left_s, run.keep)
        finally:
            for lane in (*lanes, whole):
                lane.close()
            run.finish(Path(scratch))


class _Run:
    """The record of a call, and what it has left to do."""

    def __init__(self, bench: Bench, plans: Mapping[str, Any], earlier: list[dict[str, Any]]) -> None:
        self.bench, self.plans, self.skipped = bench, plans, list[Row]()
        self.lines = {one["name"]: one for one in earlier}
        self.done = {name for name, one in self.lines.items() if one["status"] == OK and one.get("equal", True)}
        self._end_s: float = time.monotonic() + bench.given.seconds

    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def keep(self, row: Row, measured: Mapping[str, Any]) -> None:
        """Add a row's line to the record, with its plan and its difference from one process."""
        one = {**measured, "planned": self.plans.get(row.name), "recipe": table.sections(row, tiny=self.bench.tiny)}
        if row.dense_layers is not None:
            one["weights"] = f"read from files; {row.dense_layers} layers are random, the matrices of others are 0"
        if row.environment:
            one["variables"] = dict(row.environment)
        self.lines[row.name] = one
        self._compare(row)
        self.bench.fields["rows"] = [old for old in self.bench.fields.get("rows", []) if old["name"] != row.name]
        self.bench.add("rows", one, _words(one))

    def _compare(self, row: Row) -> None:
        one, other = self.lines.get(row.name, {}), self.lines.get(row.equals, {})
        if not one.get("losses") or not other.get("losses"):
            return
        one["difference"] = table.worst_difference(one["losses"][:1], other["losses"])
        one["difference_of_all"] = table.worst_difference(one["losses"], other["losses"])
        if all(map(_has_norms, (one, other))):
            one["difference_of_norms"] = table.worst_difference(one["grad_norms"], other["grad_norms"])
        later = max(one["difference_of_all"], one.get("difference_of_norms", 0.0))
        one["equal"] = one["difference"] <= row.limit and later <= max(row.limit, table.LATER)

    def finish(self, logs: Path) -> None:
        """Say what did not run, and write the last lines of the logs of what failed beside the record."""
        for row in table.every():  # a row of one process may have ended after those that repeat its losses
            self._compare(row)
        self.bench.fields["rows"] = list(self.lines.values())
        self.bench.save()
        for row in self.skipped:
            print(f"not started, too little time: {row.name}", flush=True)
        if self.bench.given.json is not None:
            failed = [one["name"] for one in self.lines.values() if one["status"] not in (OK, "refused")]
            texts = [_tail(log, name) for name in failed for log in logs.rglob("*.log") if log.stem == _stem(name)]
            if texts:
                self.bench.given.json.with_suffix(".log").write_text("\n".join(texts), encoding="utf-8")


def _has_norms(one: Mapping[str, Any]) -> bool:
    """Whether a row has the gradient's norm of each step. GRPO's loss is 0 on policy, whatever the gradient."""
    return bool(one.get("grad_norms")) and None not in one["grad_norms"]


def _stem(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def _tail(log: Path, name: str) -> str:
    return f"=== {name}\n{log.read_text(encoding='utf-8', errors='replace')[-6000:]}"


def _words(one: Mapping[str, Any]) -> str:
    """A row in one line."""
    text = f"{one['seconds']:5.0f} s  {one['name']}: "
    if one["status"] != OK:
        return text + f"{one['status']}. {one['detail']}"
    if "difference" in one:
        right = "equal" if one["equal"] else "NOT EQUAL"
        norms = f", norms {one['difference_of_norms']:.1e}" if "difference_of_norms" in one else ""
        return text + f"{right}, first loss {one['difference']:.1e}, all {one['difference_of_all']:.1e}{norms}"
    plan = one["planned"] or {}
    parts = [f"{one['ms']:,.0f} ms{_beside(one['ms'], plan.get('ms'))}"]
    if one.get("peak_bytes"):
        peak = one["peak_bytes"] / GIB
        parts.append(f"peak {peak:.2f} GiB{_beside(one['peak_bytes'], plan.get('peak_bytes'))}")
    if one["losses"]:
        parts.append(f"first loss {one['losses'][0]:.6f}")
    if found := one.get("profile"):
        parts.append(
            f"compute {found['compute_ms']:.0f} ms, collectives alone {found['exposed_collectives_ms']:.0f} ms"
        )
    return text + ", ".join(parts)


def _beside(measured: float, planned: float | None) -> str:
    return "" if planned is None else f" (planned {planned / measured - 1:+.1%})"


def _plan(bench: Bench) -> None:
    """Write the plan of each chosen row of `tigon train` that is timed on a GPU, or why it has none."""
    path: Path | None = bench.given.predictions
    if path is None:
        bench.refuse("--plan writes the file that --predictions names")
    plans: dict[str, Any] = {}
    if path.exists() and bench.given.rows:  # plans of other rows stay
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier["card"] != CARDS[bench.given.card][0]:
            bench.refuse(f"--rows: {path} has plans for {earlier['card']}; name another file, or plan all rows")
        plans = earlier["rows"]
    with tempfile.TemporaryDirectory() as scratch:
        for stage in table.chosen(bench.given.rows):
            for row in (one for one in stage if one.is_planned):
                file = Path(scratch, "recipe.yaml")
                file.write_text(yaml.safe_dump(table.sections(row, tiny=False)), encoding="utf-8")
                plans[row.name] = predicted(file, bench.given.card)
                print(row.name, json.dumps(plans[row.name]), flush=True)
                save({"environment": bench.environment(), "card": CARDS[bench.given.card][0], "rows": plans}, path)


def predicted(recipe: Path, card: str) -> dict[str, Any]:
    """The plan of a recipe's file on one of `CARDS`, or why it has none."""
    try:
        found = predict(recipe_checks.load(recipe, gpu_present=lambda: True), *CARDS[card])
    except TigonError as error:
        return {"detail": line(error).replace(f"{recipe.parent}/", "")}
    return {"ms": 1e3 * found["step_s"], "peak_bytes": found["peak_allocated_bytes"], "phase": found["peak_phase"]}


CASE = Case(
    measure=measure,
    options=options,
    packages=("accelerate", "peft", "deepspeed", "bitsandbytes", "trl"),
    needs_gpu=False,
)
