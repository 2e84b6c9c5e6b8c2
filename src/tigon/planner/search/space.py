"""The search space of the planner.

The files of the techniques (tigon.techniques) define the candidates and their costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tigon.planner.gpus import Gpu
from tigon.planner.request import Request
from tigon.techniques import SEARCHES, TECHNIQUES, matrix, tiling
from tigon.techniques.base_offload import base_offload
from tigon.techniques.checkpointing.checkpointing import KEPT_ON_HOST
from tigon.techniques.keys.settings import DEFAULT, Settings
from tigon.techniques.sharding.sharding import PLACEMENTS
from tigon.techniques.technique import How, Search, Technique

HEADROOM = 0.02
"""Share of a GPU's memory that a recommended recipe leaves free, because predicted reserved memory may be too low."""

# --- the search ------------------------------------------------------------------------------------------------------

MAX_SPLITS = 5
CROSS_DOCUMENT = "cross-document attention"
CROSS_DOCUMENT_RANK = 2
"""How much attention across documents changes a run, on the scale of `Technique.change_rank`."""
_WITHOUT_BF16: Mapping[str, tuple[Any, ...]] = {"train.precision": ("amp-fp16",)}
"""The candidates of a setting on GPUs without bf16."""


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A change of the run that the search makes only if nothing fits without it."""

    name: str
    """For the report: what fits where nothing else does."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Recipe keys."""
    cross_document: bool = False
    """Whether attention crosses documents, which needs no mask."""

    def applied(self, request: Request) -> Request:
        masked = request.masked and not self.cross_document
        return replace(request, settings=request.settings.having(self.settings), masked=masked)


def layers_on_host(settings: Settings) -> Fallback | None:
    """The fallback of frozen layers on the host for a run with adapters; None if they cannot or already wait there."""
    lora = settings.lora
    changed = settings.having({base_offload.KEY: True})
    if not lora.used or lora.base_offload or matrix.refusals(changed):
        return None
    return Fallback(name="frozen layers on the host", settings={base_offload.KEY: True})


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """A question to the planner: a run, the GPU that it must fit, and the settings that may change."""

    request: Request
    """The run. Settings that the user left out have the recipe's defaults."""
    free: frozenset[str]
    """The recipe keys that the user left out, which the search may change."""
    gpu: Gpu
    runnable_here: bool = False
    """Recommend only recipes whose packages this machine has."""
    effective_batch: int | None = None
    """Samples per optimizer step over all GPUs; None: as many as the request has."""
    host_bytes: int | None = None
    """Memory of the host that offloading may use; None: any amount."""
    fallbacks: tuple[Fallback, ...] = ()
    """Changes to try one after another, each alone, if nothing fits."""
    auto: bool = False
    """Whether the run has `train.checkpointing: auto`, so that the planner chooses what `request` recomputes."""
    auto_divides: bool = False
    """Whether `auto` also divides the batch into micro-batches."""
    one_shape: bool = False
    """Whether all batches of the run have one shape, so that `auto` may choose CUDA graphs."""
    command: tuple[str, ...] = ()
    """The words of the `tigon train` command that runs the request, if it is a recipe's."""

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step on one GPU."""
        gpus = self.request.gpus
        wanted = self.effective_batch
        return self.request.samples_per_step if wanted is None else max(1, wanted // gpus)


def with_headroom(gpu: Gpu) -> Gpu:
    """The GPU with its memory reduced by the headroom, for recommendations."""
    return replace(gpu, memory_bytes=int(gpu.memory_bytes * (1.0 - HEADROOM)))


def as_request(request: Request, settings: Settings, batch: int) -> Request:
    """`request` with these settings and batch. Gradients that update weights in the backward pass cannot be clipped."""
    clipped = request.clipped and not settings.train.optimizer_row.in_backward
    return replace(request, settings=settings, batch=batch, clipped=clipped)


def used(settings: Settings) -> list[Technique]:
    """The techniques of a run."""
    return [technique for technique in TECHNIQUES.values() if technique.used_by(settings)]


def changes(settings: Settings) -> Mapping[str, str]:
    """The techniques that change a run's numbers compared with AdamW under autocast, smallest change first.

    Maps the name of each to a description of the change.
    """
    changing = [technique for technique in reversed(used(settings)) if technique.change_rank]
    return {t.name: t.effect_on_result for t in sorted(changing, key=lambda technique: technique.change_rank)}


def change_rank(settings: Settings) -> int:
    """How much the techniques of a run change its numbers, plus 1 for each whose time is modelled roughly."""
    return sum(technique.change_rank + technique.rough_time for technique in used(settings))


def crosses_documents(request: Request) -> bool:
    """Whether attention crosses the documents of a packed sample. FlashAttention keeps them apart without a mask."""
    return not (request.masked or request.objective.pads or request.settings.model.flash_attention)


def request_rank(request: Request) -> int:
    """How much a run's techniques and its attention across documents change its numbers."""
    return change_rank(request.settings) + CROSS_DOCUMENT_RANK * crosses_documents(request)


def change_names(request: Request) -> list[str]:
    """The names of all that changes a run's numbers, smallest change first."""
    ranks = {name: TECHNIQUES[name].change_rank for name in changes(request.settings)}
    if crosses_documents(request):
        ranks[CROSS_DOCUMENT] = CROSS_DOCUMENT_RANK
    return sorted(ranks, key=lambda name: ranks[name])


def least_cost(settings: Settings) -> float:
    """Lower bound of a step's time, as a multiple of its time without recomputation."""
    return math.prod(technique.least_cost for technique in used(settings))


def kept_share(settings: Settings) -> float:
    """Lower bound of the share of the layers' activations that stays in memory."""
    return math.prod(technique.kept_share for technique in used(settings))


def is_last_resort(problem: SearchProblem, settings: Settings) -> bool:
    """Whether the search chose a technique that it may use only if no recipe with smaller changes fits."""
    return any(technique.last_resort and _is_free(problem, technique) for technique in used(settings))


def _is_free(problem: SearchProblem, technique: Technique) -> bool:
    return technique.chosen[0].key in problem.free


def _searched(how: How) -> list[Search]:
    return [search for search in SEARCHES.values() if search.how == how]


def _values(problem: SearchProblem, settings: Settings, search: Search) -> tuple[Any, ...]:
    """The values that the search tries for a key: its candidates, or the value that the user gave."""
    if search.key in problem.free and not problem.gpu.has_bf16 and search.key in _WITHOUT_BF16:
        return _WITHOUT_BF16[search.key]
    if search.key in problem.free:
        return search.candidates(problem.request.config)
    return (settings.value(search.key),)


def walks(problem: SearchProblem) -> list[Settings]:
    """Every value of the free `run` settings with every placement, fewest changes of the numbers first."""
    combinations = [problem.request.settings]
    for search in reversed(_searched("run")):
        combinations = [
            each.having({search.key: value}) for each in combinations for value in _values(problem, each, search)
        ]
    return sorted((placed for settings in combinations for placed in placements(problem, settings)), key=change_rank)


def placements(problem: SearchProblem, settings: Settings) -> Iterator[Settings]:
    """`settings` with every placement that agrees with the fixed settings and can save memory."""
    base = problem.request.settings
    fixed = {name: base.value(name) for name in PLACEMENTS[0] if name not in problem.free}
    rows = [row for row in PLACEMENTS if all(row[name] == value for name, value in fixed.items())]
    if base.sharding.gpus == 1 and not any(fixed.get(name) for name in ("sharding.zero", "sharding.fsdp")):
        # A single GPU has no other GPU to shard over, so only offload to the host saves memory.
        rows = [
            row
            for row in rows
            if row["sharding.offload"] != "none" or not (row["sharding.zero"] or row["sharding.fsdp"])
        ]
        if base.lora.used:  # the states of adapters are too small to offload
            rows = [row for row in rows if row["sharding.offload"] == "none"]
    for row in rows or [fixed]:
        placed = settings.having(row)
        needed = [c for technique in used(placed) if _is_free(problem, technique) for c in technique.searched_with]
        if all(condition.holds(placed) for condition in needed):
            yield placed


def recomputations(problem: SearchProblem, settings: Settings) -> list[Mapping[str, Any]]:
    """The kinds of recomputation by recipe key, fastest first. For long samples, layers in pieces come last."""
    values = {search.key: _values(problem, settings, search) for search in _searched("recomputation")}
    options: list[Mapping[str, Any]] = [
        dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())
    ]
    config = problem.request.config
    pieces = {s.key: s.candidates(config)[0] for s in _searched("long samples") if s.key in problem.free}
    if (
        pieces
        and problem.request.seq > tiling.TILE_TOKENS
        and settings.model.attention == "sdpa"
        and not keeps_all(options[-1])
    ):
        most = {**options[-1], **pieces}
        free = "train.checkpointing" in problem.free and not problem.request.masked  # with a mask it would save nothing
        if free and most.get("train.checkpointing") == "offload":
            options.append({**most, "train.checkpointing": KEPT_ON_HOST})
        options.append(most)
    return options


def keeps_all(kept: Mapping[str, Any]) -> bool:
    """Whether one of `recomputations` recomputes nothing."""
    return all(value == DEFAULT.value(key) for key, value in kept.items())


def splits(problem: SearchProblem) -> list[tuple[int, int]]:
    """(batch, accumulate) pairs with the requested samples per optimizer step, largest micro-batch first."""
    request = problem.request
    if "train.gradient_accumulation" not in problem.free:
        return [(request.batch, request.micro_batches)]
    n_samples = problem.samples_per_step
    most = min(request.batch, n_samples)
    takes = request.objective.batch_refusal
    sizes = [size for size in range(most, 0, -1) if n_samples % size == 0 and takes(size) is None]
    if len(sizes) > MAX_SPLITS:
        sizes = [*sizes[: MAX_SPLITS - 1], sizes[-1]]
    return [(size, n_samples // size) for size in sizes]
