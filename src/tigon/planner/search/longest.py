"""The longest row that fits, by kind of recomputation: `tigon plan --longest`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tigon.planner.request import Request, refusals
from tigon.planner.search import space
from tigon.planner.search.largest_batch import longest_sequence
from tigon.planner.search.option import Option, estimate_option
from tigon.planner.search.recommend import Plan
from tigon.techniques import tiling
from tigon.techniques.keys.settings import Settings
from tigon.techniques.keys.train import AUTO

TRIED = 3
"""Kinds of recomputation that are tried beside the recommended one. The last kinds save the most memory."""

MOST = "full"
"""What `auto` chooses for every layer of the longest row that it makes fit."""


@dataclass(frozen=True, kw_only=True)
class LongestRow:
    """The longest row of one configuration."""

    request: Request
    """The configuration; `seq` is the longest row, or the shortest that was tried if none fits."""
    option: Option | None
    """The configuration at that length; None if no row fits."""


def longest_rows(plan: Plan, *, keep_batch: bool) -> tuple[LongestRow, ...]:
    """The longest rows of the first recommendation, or of the request if nothing fits, most recomputation last.

    The last line is for attention across documents, if the recommendation keeps them apart with a mask.

    Args:
        plan: the plan.
        keep_batch: keep its samples per micro-batch. Otherwise a micro-batch has the objective's fewest samples.
    """
    problem = plan.problem
    first = plan.recommended[0].option.request if plan.recommended else plan.option.request
    batch = first.batch if keep_batch else first.objective.least_batch
    first = replace(first, batch=batch, settings=first.settings.having({"train.gradient_accumulation": 1}))
    # The search takes layers in pieces only for long rows.
    long = replace(problem, request=replace(first, seq=max(first.seq, tiling.TILE_TOKENS + 1)))
    kinds = space.recomputations(long, first.settings)
    kinds = [
        {**kept, "train.checkpointing": MOST} if kept.get("train.checkpointing") == AUTO else kept for kept in kinds
    ]
    requests = [first, *(replace(first, settings=first.settings.having(kept)) for kept in kinds[-TRIED:])]
    if first.masked and not first.objective.pads:
        requests.append(replace(requests[-1], masked=False))
    different: dict[tuple[Settings, bool], Request] = {}
    for request in requests:
        different.setdefault((request.settings, request.masked), request)
    rows: list[LongestRow] = []
    for request in different.values():
        if not refusals(request, request.settings):
            rows.append(_longest(plan, request, rows[-1].request.seq if rows else first.seq))
    return tuple(rows)


def _longest(plan: Plan, request: Request, guess: int) -> LongestRow:
    gpu = plan.problem.gpu
    found = longest_sequence(replace(request, seq=guess), gpu)
    if not found:
        return LongestRow(request=request, option=None)
    request = replace(request, seq=found)
    return LongestRow(request=request, option=estimate_option(request, gpu))
